"""Lint rules for TensorRT; importing the package registers them."""

from qdqspec.backends.tensorrt.lint import importers, numbers, placement, sizes

__all__ = ["importers", "numbers", "placement", "sizes"]
