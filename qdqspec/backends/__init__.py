"""Who runs a model. One file a backend; `base` holds the seam. May import floors 0 and 1."""
