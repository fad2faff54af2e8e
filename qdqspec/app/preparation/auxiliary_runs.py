"""Runs of a model by the runtime that computes it as ONNX defines it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from qdqspec._core.config import hooks
from qdqspec._core.config.settings import DEFAULT_BACKEND
from qdqspec.accuracy.rehearsal import Runtime
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.open_engines import engines_at_once

ARITHMETIC = DEFAULT_BACKEND  # the backend that computes a model as ONNX defines it


def unfused(options: BuildOptions) -> BuildOptions:
    """Options for a build by `ARITHMETIC` that computes every pair and fuses nothing."""
    return replace(options, extra={**options.extra, **hooks.default().as_defined}, hashed=False)


def runner(backend: Backend, options: BuildOptions) -> Callable[[Path], Engine]:
    """Builds models to compare their outputs: on the backend, or as ONNX defines them where it cannot run.

    In the second case engines live as long as the function.
    """
    if backend.capabilities(options).runs:
        return partial(backend.build, options=options)
    return partial(Isolated(ARITHMETIC).build, options=unfused(options))


def reference_runtime(opened: ExitStack, options: BuildOptions, backend: Backend | None = None) -> Runtime:
    """The runtime `ARITHMETIC`, with each engine in a process of its own until ``opened`` is closed.

    Several engines run at once (`engines_at_once`). ``backend`` is used if it is that runtime already.
    """
    if backend is None or backend.name != ARITHMETIC:
        backend = opened.enter_context(Isolated(ARITHMETIC))
    fast = replace(options, extra={**options.extra, **hooks.default().optimized}, hashed=False)
    return Runtime(
        exact=partial(backend.build, options=unfused(options)),
        fast=partial(backend.build, options=fast),
        processes=engines_at_once(options.threads),
    )
