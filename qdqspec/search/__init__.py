"""What to try next. One file a strategy; `base` holds the seam. Never measures. May import floors 0 to 3."""
