"""Lint rules for ONNX Runtime's CPU provider; importing the package registers them."""

from qdqspec.backends.onnxruntime.lint import numbers, placement

__all__ = ["numbers", "placement"]
