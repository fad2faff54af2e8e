"""Lint rules for TensorRT; importing the package registers them."""

from qdqspec.backends.tensorrt.lint import (
    fusion,
    importers,
    numbers,
    placement,
    scales,
    sizes,
)

__all__ = ["blocks", "fusion", "hardware", "importers", "numbers", "placement", "scales", "sizes"]
