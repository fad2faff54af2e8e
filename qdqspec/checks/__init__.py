"""What must hold. One file a check; `base` holds the seam. Judges evidence, never measures."""
