"""Runs of a model outside the search: with the arithmetic of ONNX, by observers, in builds that show fusions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx

from qdqspec.arrays import Array, Feed, Reduction
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.config import hooks
from qdqspec.config.settings import DEFAULT_BACKEND
from qdqspec.errors import BackendError, ModelError, StateError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.ops import has_floats
from qdqspec.graph.save import save_model
from qdqspec.graph.wire import Parts
from qdqspec.measurement.engines import engines_at_once
from qdqspec.regions.search import groups_of
from qdqspec.rehearsal import Runtime
from qdqspec.temporary import TemporaryFolder

ARITHMETIC = DEFAULT_BACKEND  # the backend that computes a model as ONNX defines it


def is_arithmetic(backend: Backend) -> bool:
    """Whether a backend is the runtime that computes rehearsals too."""
    return backend.name == ARITHMETIC


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
    if backend is None or not is_arithmetic(backend):
        backend = opened.enter_context(Isolated(ARITHMETIC))
    fast = replace(options, extra={**options.extra, **hooks.default().optimized}, hashed=False)
    return Runtime(
        exact=partial(backend.build, options=unfused(options)),
        fast=partial(backend.build, options=fast),
        processes=engines_at_once(options.threads),
    )


def half_model(model: Model, path: Path, *, backend: str, keep_io: bool = False) -> onnx.ModelProto:
    """The model of a file in float16; inputs and outputs too, unless ``keep_io`` is set.

    Raises `ModelError` if it cannot be converted.
    """
    convert = hooks.load(hooks.declaration_of(backend).float16 or hooks.default().float16)
    converted: onnx.ModelProto = convert(model, path, keep_io=keep_io)
    return converted


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
    parts: Parts,
    given: Model,
    backend: Backend,
    options: BuildOptions,
    *,
    note: Callable[[str], None],
    cure: str | None = None,
) -> Observer:
    """Build an observer of ``given``, which runs until ``opened`` is closed.

    It runs on the backend itself if that returns outputs fast enough; else on the reference runtime, with the backend
    as fallback for models that this cannot run, such as those with plugins. Raises `BackendError` if neither builds it.
    """
    path = opened.enter_context(TemporaryFolder()) / "observer.onnx"
    save_model(parts, path, base=require_path(given).parent)
    options = replace(options, hashed=False)
    observes = backend.capabilities(options).observes
    first = backend if observes else opened.enter_context(Isolated(ARITHMETIC))
    try:
        with _reported_for(given, path):
            engine = first.build(path, options)
    except BackendError as refusal:
        if observes:
            raise
        engine = _build_after_refusal(refusal, path, given, backend, options)
        note(f"calibrated on {backend.name} itself, since {ARITHMETIC} cannot run the model: {refusal.what}")
    return Observer(opened.enter_context(closing(engine)), path, given, cure)


def _build_after_refusal(
    refusal: BackendError, path: Path, given: Model, backend: Backend, options: BuildOptions
) -> Engine:
    """Build an observer on the backend, although each additional output costs memory and prevents fusion."""
    try:
        with _reported_for(given, path):
            return backend.build(path, options)
    except BackendError as error:
        raise BackendError(
            f"no range can be found for its activations: {ARITHMETIC} cannot run it ({refusal.what}), nor can "
            f"{backend.name} with activations for outputs ({error.what})",
            where=given.where,
            cure=_CURE,
        ) from None


@contextmanager
def _reported_for(given: Model, path: Path, cure: str | None = None) -> Iterator[None]:
    """Errors of an observer's file name the model that it observes."""
    try:
        yield
    except BackendError as error:
        what = error.what.replace(str(path), given.where)
        raise BackendError(what, where=given.where, cure=error.cure or cure) from None


Groups: TypeAlias = tuple[tuple[str, ...], ...]


def fused_groups(
    model: Model, backend: Backend, options: BuildOptions, feed: Feed, note: Callable[[str], None]
) -> Groups:
    """The nodes of each kernel in one build; of the model in float16 if kernels of pairs fuse like those of float16."""

    def groups(path: Path, feed: Feed) -> Groups:
        with closing(backend.build(path, options)) as engine:
            engine.bind(feed)
            return groups_of(engine.layers())

    path = require_path(model)
    if not (backend.capabilities(options).fuses_in_half and has_floats(model)):
        return groups(path, feed)
    halves = {name: v.astype(np.float16) if v.dtype == np.float32 else v for name, v in feed.items()}
    try:
        with TemporaryFolder() as folder:
            onnx.save(
                half_model(model, path, backend=backend.name),
                folder / "half.onnx",
                save_as_external_data=True,
            )
            return groups(folder / "half.onnx", halves)
    except (ModelError, BackendError) as error:
        note(f"fusions were read from a build of the given model, not of its float16 form: {error.what}")
        return groups(path, feed)


def groups_of_file(path: Path, model: Model) -> Groups:
    """The nodes of each kernel in a file of the user that a runtime's tool exported.

    Raises `StateError` if it cannot be read or belongs to another model.
    """
    refusal, advice = None, ""
    for read in hooks.readers("exported"):
        try:
            found = read([path], model)
        except BackendError as error:
            refusal = refusal or error
            continue
        advice = advice or found.advice
        groups = groups_of(found.layers)
        if known := tuple(group for group in groups if not model.by_name.keys().isdisjoint(group)):
            return known
    if refusal is not None and not advice:
        raise StateError(refusal.what, where=path, cure=refusal.cure)
    raise StateError(f"no layer in it names a node of {model.where}", where=path, cure=advice or None)
