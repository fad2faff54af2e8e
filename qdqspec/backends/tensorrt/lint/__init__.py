"""Lint rules for TensorRT; importing the package registers them."""

from qdqspec.backends.tensorrt.lint import numbers, operators, placement, sizes

__all__ = ["numbers", "operators", "placement", "sizes"]
