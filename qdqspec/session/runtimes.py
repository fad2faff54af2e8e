"""The runtime that computes Q/DQ as ONNX defines it, whatever the backend of a case."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.config import hooks
from qdqspec.config.settings import DEFAULT_BACKEND
from qdqspec.graph.model import Model
from qdqspec.measurement.isolate import Isolated
from qdqspec.rehearsal import Runtime

ARITHMETIC = DEFAULT_BACKEND  # the backend that computes a model as ONNX defines it


def unfused(options: BuildOptions) -> BuildOptions:
    """Options for a build by `ARITHMETIC` that computes every pair and fuses nothing."""
    return replace(options, extra={**options.extra, **hooks.default().as_defined})


def reference_runtime(opened: ExitStack, options: BuildOptions, backend: Backend | None = None) -> Runtime:
    """The runtime `ARITHMETIC`, with each engine in a process of its own until ``opened`` is closed.

    ``backend`` is used if it is that runtime already.
    """
    if backend is None or backend.name != ARITHMETIC:
        backend = opened.enter_context(Isolated(ARITHMETIC))
    fast = replace(options, extra={**options.extra, **hooks.default().optimized})
    return Runtime(
        exact=partial(backend.build, options=unfused(options)), fast=partial(backend.build, options=fast)
    )


def half_model(model: Model, path: Path, *, backend: str, keep_io: bool = False) -> onnx.ModelProto:
    """The model of a file in float16; inputs and outputs too, unless ``keep_io`` is set.

    Raises `ModelError` if it cannot be converted.
    """
    convert = hooks.load(hooks.declaration_of(backend).float16 or hooks.default().float16)
    converted: onnx.ModelProto = convert(model, path, keep_io=keep_io)
    return converted
