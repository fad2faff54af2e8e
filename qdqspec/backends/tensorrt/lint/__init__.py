"""Lint rules for TensorRT; importing the package registers them."""

from qdqspec.backends.tensorrt.lint import numbers, operators, placement

__all__ = ["numbers", "operators", "placement"]
