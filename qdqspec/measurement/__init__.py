"""Latency measurement: clocks, statistics, races, process isolation, locks, journal and cache."""
