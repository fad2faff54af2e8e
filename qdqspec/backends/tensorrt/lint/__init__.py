"""Lint rules for TensorRT; importing the package registers them."""

from qdqspec.backends.tensorrt.lint import fusion, importers, numbers, placement, scales, sizes

__all__ = ["fusion", "importers", "numbers", "placement", "scales", "sizes"]
