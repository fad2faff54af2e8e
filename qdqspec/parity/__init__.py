"""Comparison of model outputs, and the data for it."""
