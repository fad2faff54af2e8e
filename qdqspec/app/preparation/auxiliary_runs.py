"""Runs of a model beside those that are timed: on the backend, or by the runtime that computes as ONNX defines it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from qdqspec._core.arrays import Array, Feed, Reduction
from qdqspec._core.config import hooks
from qdqspec._core.config.settings import DEFAULT_BACKEND
from qdqspec._core.temporary import TemporaryFolder
from qdqspec.accuracy.rehearsal import Runtime
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.open_engines import engines_at_once
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.save import save_model

ARITHMETIC = DEFAULT_BACKEND  # the backend that computes a model as ONNX defines it


def unfused(options: BuildOptions) -> BuildOptions:
    """Options for a build by `ARITHMETIC` that computes every pair and fuses nothing."""
    return replace(options, extra={**options.extra, **hooks.default().as_defined}, hashed=False)


def runner(backend: Backend, options: BuildOptions) -> Callable[[Path], Engine]:
    """Builds models to compare outputs: on the backend, or, while the function lives, as ONNX defines them."""
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


_CURE = (
    "give the library of its operators with --qdq-plugin (--plugin on the command line), or a scale for each "
    "activation in a calibration cache: inputs.scales"
)


@dataclass(frozen=True, slots=True)
class Observer:
    """An engine of a model with inner tensors as outputs. Its errors are reported for the model that it observes."""

    engine: Engine
    path: Path
    given: Model
    cure: str | None = None  # the advice for a failed run

    def __call__(self, feed: Feed) -> Mapping[str, Array]:
        """The outputs by name."""
        with _reported_for(self.given, self.path, self.cure):
            return self.engine.run(feed)

    def reduced(self, feed: Feed, how: Reduction) -> Mapping[str, Array]:
        """The outputs by name, reduced in the process of the engine if it has one of its own."""
        own = getattr(self.engine, "reduced", None)
        with _reported_for(self.given, self.path, self.cure):
            return self.engine.run(feed) if own is None else own(feed, how)


def open_observer(
    opened: ExitStack,
    proto: onnx.ModelProto,
    given: Model,
    backend: Backend,
    options: BuildOptions,
    *,
    note: Callable[[str], None],
    cure: str | None = None,
) -> Observer:
    """Build ``proto``, an observer of ``given``, which runs until ``opened`` is closed.

    It runs on the backend itself if that returns outputs fast enough; else on the reference runtime, with the backend
    as fallback for models that this cannot run, such as those with plugins. Raises `BackendError` if neither builds it.
    """
    path = opened.enter_context(TemporaryFolder()) / "observer.onnx"
    save_model(proto, path, base=require_path(given).parent)
    options = replace(options, hashed=False)

    def build(runtime: Backend) -> Observer:
        with _reported_for(given, path):
            engine = opened.enter_context(closing(runtime.build(path, options)))
        return Observer(engine, path, given, cure)

    if backend.capabilities(options).observes:
        return build(backend)
    try:
        return build(opened.enter_context(Isolated(ARITHMETIC)))
    except BackendError as error:
        refusal = error.what
    try:  # although each additional output costs memory and prevents fusion
        observer = build(backend)
    except BackendError as error:
        raise BackendError(
            f"no range can be found for its activations: {ARITHMETIC} cannot run it ({refusal}), nor can "
            f"{backend.name} with activations for outputs ({error.what})",
            where=given.where,
            cure=_CURE,
        ) from None
    note(f"calibrated on {backend.name} itself, since {ARITHMETIC} cannot run the model: {refusal}")
    return observer


@contextmanager
def _reported_for(given: Model, path: Path, cure: str | None = None) -> Iterator[None]:
    """Errors of an observer's file name the model that it observes."""
    try:
        yield
    except BackendError as error:
        what = error.what.replace(str(path), given.where)
        raise BackendError(what, where=given.where, cure=error.cure or cure) from None
