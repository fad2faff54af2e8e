"""Corrections: better scales and integers at the same placement, found on calibration data."""
