"""What users start: `session`, the pytest `plugin`, the command line `cli`, `report`, and `cluster`."""
