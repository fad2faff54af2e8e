"""The numbers: formats, calibration, scales, integer weights. May import floors 0 and 1."""
