"""Units of placement: regions of a model and the patterns they share. May import floors 0 and 1."""
