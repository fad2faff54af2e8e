"""What held before."""
