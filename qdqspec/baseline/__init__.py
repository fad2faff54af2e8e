"""What held before. May import floors 0 and 1."""
