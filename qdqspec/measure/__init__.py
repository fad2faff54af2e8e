"""How long it takes: clocks, statistics, races, isolation, journal. May import floors 0 to 2."""
