"""How close outputs are, and the data they are compared on. May import floors 0 to 2."""
