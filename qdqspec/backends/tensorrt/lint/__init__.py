"""Lint rules for TensorRT; importing the package registers them."""

from qdqspec.backends.tensorrt.lint import compiler, importers, numbers, placement, sizes

__all__ = ["compiler", "importers", "numbers", "placement", "sizes"]
