"""Quantization parameters: number formats, calibration, scales, integer weights."""
