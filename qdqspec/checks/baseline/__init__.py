"""Committed baselines of earlier measurements."""
