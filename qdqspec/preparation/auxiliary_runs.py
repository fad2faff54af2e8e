"""Runs of a model outside the search: with the arithmetic of ONNX, by observers, in builds that show fusions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
from pydantic import BaseModel

from qdqspec.arrays import Array, Feed, Reduction
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.config import hooks
from qdqspec.config.settings import DEFAULT_BACKEND
from qdqspec.errors import BackendError, ModelError, StateError
from qdqspec.files import write_whole
from qdqspec.graph.model import Model
from qdqspec.graph.ops import has_floats
from qdqspec.graph.save import save_model
from qdqspec.graph.wire import Parts
from qdqspec.measurement.engines import engines_at_once
from qdqspec.measurement.isolate import Isolated
from qdqspec.plain_json import read_json
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

    Several engines run at once (`engines_at_once`).

    ``backend`` is used if it is that runtime already.
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


@dataclass
class Observing:
    """Runs a model with inner tensors as outputs, for calibration.

    It runs on the backend itself if that returns outputs fast enough (``alone``); else on the reference runtime, with
    the backend as fallback for models that this cannot run, such as those with plugins.
    """

    given: Model
    backend: Backend
    options: BuildOptions
    alone: bool
    note: Callable[[str], None]

    def runner(
        self, observers: ExitStack, observer: Parts, base: Path, cure: str | None = None
    ) -> Callable[[Feed], Mapping[str, Array]]:
        """A function that runs the observer until ``observers`` are closed; ``cure`` is the advice for a failed run.

        Raises `BackendError` if no backend can build it.
        """
        path = observers.enter_context(TemporaryFolder()) / "observer.onnx"
        save_model(observer, path, base=base)
        engine = observers.enter_context(closing(self._built(observers, path)))
        return _ObserverRuns(engine, partial(self._explained, path, cure))

    def _built(self, observers: ExitStack, path: Path) -> Engine:
        if self.alone:
            with self._explained(path):
                return self.backend.build(path, replace(self.options, hashed=False))
        other = observers.enter_context(Isolated(ARITHMETIC))
        try:
            with self._explained(path):
                return other.build(path, replace(self.options, hashed=False))
        except BackendError as error:
            return self._after_all(path, error)

    def _after_all(self, path: Path, refusal: BackendError) -> Engine:
        """Build it on the backend, although each additional output costs memory and prevents fusion."""
        name = self.backend.name
        try:
            with self._explained(path):
                engine = self.backend.build(path, replace(self.options, hashed=False))
        except BackendError as error:
            raise BackendError(
                f"no range can be found for its activations: {ARITHMETIC} cannot run it ({refusal.what}), nor can "
                f"{name} with activations for outputs ({error.what})",
                where=self.given.where,
                cure=_CURE,
            ) from None
        self.note(f"calibrated on {name} itself, since {ARITHMETIC} cannot run the model: {refusal.what}")
        return engine

    @contextmanager
    def _explained(self, observer: Path, cure: str | None = None) -> Iterator[None]:
        """Errors of the observer, reported for the model that it observes."""
        try:
            yield
        except BackendError as error:
            what = error.what.replace(str(observer), self.given.where)
            raise BackendError(what, where=self.given.where, cure=error.cure or cure) from None


@dataclass(frozen=True, slots=True)
class _ObserverRuns:
    """An engine of an observer; ``explained`` is the context of its errors."""

    engine: Engine
    explained: Callable[[], AbstractContextManager[None]]

    def __call__(self, feed: Feed) -> Mapping[str, Array]:
        with self.explained():
            return self.engine.run(feed)

    def reduced(self, feed: Feed, how: Reduction) -> Mapping[str, Array]:
        """The outputs by name, reduced in the process of the engine if it has one of its own."""
        own = getattr(self.engine, "reduced", None)
        with self.explained():
            return self.engine.run(feed) if own is None else own(feed, how)


FUSIONS = "fusion.json"
_MOST_BYTES = 256 << 20

Groups: TypeAlias = tuple[tuple[str, ...], ...]


class _Kept(BaseModel):
    of: dict[str, object]
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class FusionBuild:
    """Determines kernel fusions by one build of a model; in float16 if ``half`` is set and the model is float32."""

    model: Model
    path: Path
    backend: Backend
    options: BuildOptions
    half: bool
    note: Callable[[str], None]

    def groups(self, feeds: Feed) -> Groups:
        """The nodes of each kernel: from an earlier run of the same model and device, else from a new build."""
        known = self._known()
        if known is None:
            known = self._found(feeds)
            self._keep(known)
        return known

    def _found(self, feeds: Feed) -> Groups:
        if not (self.half and has_floats(self.model)):
            return self._built(self.path, feeds)
        halves = {name: v.astype(np.float16) if v.dtype == np.float32 else v for name, v in feeds.items()}
        try:
            with TemporaryFolder() as folder:
                path = folder / "half.onnx"
                half = half_model(self.model, self.path, backend=self.backend.name)
                onnx.save(half, path, save_as_external_data=True)
                return self._built(path, halves)
        except (ModelError, BackendError) as error:
            self.note(
                f"fusions were read from a build of the given model, not of its float16 form: {error.what}"
            )
            return self._built(self.path, feeds)

    def _built(self, path: Path, feeds: Feed) -> Groups:
        with closing(self.backend.build(path, self.options)) as engine:
            engine.bind(feeds)
            return groups_of(engine.layers())

    # ---- kept ---------------------------------------------------------------------------------------

    @property
    def _file(self) -> Path | None:
        return self.options.state and self.options.state / FUSIONS

    @property
    def _of(self) -> dict[str, object]:
        """The key of a saved result; a result with another key is ignored."""
        device = self.backend.device(self.options).key
        return {"model_sha256": self.model.sha256, "device": device, "half": self.half}

    def _known(self) -> Groups | None:
        if self._file is None or not self._file.is_file():
            return None
        try:
            kept = _Kept.model_validate(read_json(self._file, most_bytes=_MOST_BYTES))
        except (OSError, ValueError):
            return None  # damaged: it is determined again
        return kept.groups if kept.of == self._of else None

    def _keep(self, groups: Groups) -> None:
        if self._file is None or not groups:
            return
        text = json.dumps({"of": self._of, "groups": groups}, indent=1)
        write_whole(self._file, text, what="the fusions", make_folder=True)


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
        if known := tuple(
            group for group in groups_of(found.layers) if any(node in model.by_name for node in group)
        ):
            return known
    if refusal is not None and not advice:
        raise StateError(refusal.what, where=path, cure=refusal.cure)
    raise StateError(f"no layer in it names a node of {model.where}", where=path, cure=advice or None)
