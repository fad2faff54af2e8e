"""Corrections: better scales, integers and biases at the same placement, found in calibration data."""
