"""Lint rules for TensorRT for RTX; importing the package registers them, and those of TensorRT."""

from qdqspec.backends.tensorrt_rtx.lint import held, own

__all__ = ["held", "own"]
