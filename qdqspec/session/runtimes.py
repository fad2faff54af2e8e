"""The runtime that computes Q/DQ as ONNX defines it, whatever the backend of a case."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.backends.onnxruntime.options import AS_DEFINED, FULL, OPTIMIZATION
from qdqspec.config.settings import DEFAULT_BACKEND
from qdqspec.measure.isolate import Isolated
from qdqspec.rehearsal import Runtime

ARITHMETIC = DEFAULT_BACKEND  # the backend that computes a model as ONNX defines it


def unfused(options: BuildOptions) -> BuildOptions:
    """Options for a build by `ARITHMETIC` that computes every pair and fuses nothing."""
    return replace(options, extra={**options.extra, OPTIMIZATION: AS_DEFINED})


def reference_runtime(opened: ExitStack, options: BuildOptions, backend: Backend | None = None) -> Runtime:
    """ONNX Runtime, with each engine in a process of its own until ``opened`` is closed.

    ``backend`` is used if it is already ONNX Runtime.
    """
    if backend is None or backend.name != ARITHMETIC:
        backend = opened.enter_context(Isolated(ARITHMETIC))
    fast = replace(options, extra={**options.extra, OPTIMIZATION: FULL})
    return Runtime(
        exact=partial(backend.build, options=unfused(options)), fast=partial(backend.build, options=fast)
    )
