"""Units of placement: regions of a model and the patterns they share."""
