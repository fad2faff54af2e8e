"""Runs of a model beside those that are timed: on the backend, or by the runtime that computes as ONNX defines it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from qdqspec._core import hooks
from qdqspec._core.arrays import Array, Feed, Reduction
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec._core.units import count_text
from qdqspec.accuracy.compare import noise_power, signal_power, sqnr_db
from qdqspec.accuracy.rehearsal import Runtime
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.open_engines import engines_at_once
from qdqspec.errors import BackendError, QdqspecError
from qdqspec.graph.definition import as_defined
from qdqspec.graph.given import random_nodes
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.observe import observe
from qdqspec.graph.storage import save_model
from qdqspec.types import DEFAULT_MIN_SQNR_DB, DEFINED_DB, EXACT_DB, DefinitionEvidence

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

ARITHMETIC = DEFAULT_BACKEND  # the backend that computes a model as ONNX defines it
SAMPLES = 4  # of the data, on which the given model is compared with its definition


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


_RANDOM = "random inputs may not suit this model: give it real ones (inputs.calibration, or --calibration)"
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


def open_observer(prepared: Prepared, opened: ExitStack, proto: onnx.ModelProto) -> Observer:
    """Build ``proto``, an observer of the model of a case, which runs until ``opened`` is closed.

    It runs on the backend itself if that returns outputs fast enough; else on the reference runtime, with the backend
    as fallback for models that this cannot run, such as those with plugins. Raises `BackendError` if neither builds it.
    """
    given, backend, options = prepared.given, prepared.backend, replace(prepared.options, hashed=False)
    cure = _RANDOM if prepared.calibration is None else None
    path = opened.enter_context(TemporaryFolder()) / "observer.onnx"
    save_model(proto, path, base=require_path(given).parent)

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
    prepared.note_once(
        f"calibrated on {backend.name} itself, since {ARITHMETIC} cannot run the model: {refusal}"
    )
    return observer


@contextmanager
def _reported_for(given: Model, path: Path, cure: str | None = None) -> Iterator[None]:
    """Errors of an observer's file name the model that it observes."""
    try:
        yield
    except BackendError as error:
        what = error.what.replace(str(path), given.where)
        raise BackendError(what, where=given.where, cure=error.cure or cure) from None


# ---- the definition of a model ------------------------------------------------------------------


class Definition:
    """A model as ONNX defines it: integer operators in float, built by `ARITHMETIC` without optimization."""

    def __init__(self, model: Model, backend: Backend, options: BuildOptions) -> None:
        self.model = model
        self.runtime: Backend = backend if backend.name == ARITHMETIC else Isolated(ARITHMETIC)
        self._options = unfused(options)
        self._folder = TemporaryFolder()
        proto, own = as_defined(model), require_path(model)
        self.path = own  # of the model itself if it has no integer operators
        if proto is not model.proto:
            self.path = self._folder.path / own.name
            save_model(proto, self.path, base=own.parent)

    def build(self) -> Engine:
        """An engine of it. Raises `BackendError` if the runtime lacks one of its operators."""
        return self.runtime.build(self.path, self._options)

    def inner(self, opened: ExitStack, source: Path, names: Sequence[str], feed: Feed) -> Mapping[str, Array]:
        """The values of inner tensors of a model, computed node by node on one input."""
        observer = observe(Model(onnx.load(str(source), load_external_data=False), path=source), names)
        path = opened.enter_context(TemporaryFolder()) / "observer.onnx"
        save_model(observer.proto, path, base=source.parent)
        engine = opened.enter_context(closing(self.runtime.build(path, self._options)))
        return observer.seen(engine.run(feed))


def compared_with_definition(
    model: Model, feeds: Iterable[Feed], backend: Backend, options: BuildOptions
) -> DefinitionEvidence | None:
    """Compare the model as the backend runs it with its definition, on the first samples.

    ``None`` where they cannot be compared: one of them does not run, or no output is a float tensor, or it is random.
    """
    if not backend.capabilities(options).runs or random_nodes(model):
        return None
    samples = list(islice(feeds, SAMPLES))
    definition = Definition(model, backend, options)
    try:
        expected = _outputs(definition.build, samples)
        seen = _outputs(lambda: backend.build(require_path(model), options), samples)
    except BackendError:  # the caller reports a model that does not run
        return None
    by_output = {
        name: _sqnr_db([outputs[name] for outputs in expected], [outputs.get(name) for outputs in seen])
        for name, value in (expected[0].items() if expected else ())
        if np.issubdtype(value.dtype, np.floating)
    }
    if not by_output:
        return None
    output = min(by_output, key=by_output.__getitem__)
    found = DefinitionEvidence(sqnr_db=by_output[output], output=output, samples=len(samples))
    return found if found.holds else replace(found, node=_likely_node(definition, backend, samples[0]))


def definition_warning(found: DefinitionEvidence, backend: str, data: str, *, is_quantized: bool) -> str:
    """The warning of a model that the backend computes otherwise than ONNX defines it."""
    advice = (
        "Do not rely on its outputs here: reduce the runtime's optimizations (--qdq-backend-option), or report it to "
        "the authors of the runtime"
    )
    if is_quantized:
        advice = (
            "Do not rely on its outputs here: tune it on this processor, from its float form (qdqspec tune)"
        )
        if found.sqnr_db >= DEFAULT_MIN_SQNR_DB:
            advice = "Values that are rounded to another step can cause a difference of this size"
    return (
        f"{difference_text(found, backend, 'the given model', data)}. All outputs are compared with the definition, "
        f"which {ARITHMETIC} computes without optimization. {advice}"
    )


def difference_text(found: DefinitionEvidence, backend: str, model: str, data: str) -> str:
    """The difference of a model's run from its definition, in words."""
    node = f", first at {found.node}" if found.node else ""
    return (
        f"{backend} does not compute {model} as ONNX defines it: {found.sqnr_db:.1f} dB at output '{found.output}' on "
        f"{count_text(found.samples, 'sample')} of {data} data{node}"
    )


def _outputs(build: Callable[[], Engine], samples: Sequence[Feed]) -> list[Mapping[str, Array]]:
    with closing(build()) as engine:
        return [engine.run(feed) for feed in samples]


def _sqnr_db(expected: Sequence[Array], seen: Sequence[Array | None]) -> float:
    """Of one output over all samples; an output that is zero in all of them is equal."""
    signal = sum(map(signal_power, expected))
    noise = sum(noise_power(one, other) for one, other in zip(expected, seen, strict=True))
    found = sqnr_db(signal, noise) if signal else EXACT_DB
    return float(np.clip(found, -EXACT_DB, EXACT_DB))


def _likely_node(definition: Definition, backend: Backend, feed: Feed) -> str:
    """The first node whose output differs; empty for a runtime whose graph cannot be written.

    The graph that the runtime makes of the model is run node by node, and compared where it has tensors of the model.
    """
    model = definition.model
    write = hooks.declaration_of(backend.name).optimizers.get(f"{backend.name}-all")
    if write is None:
        return ""
    try:
        with ExitStack() as opened:
            folder = opened.enter_context(TemporaryFolder())
            optimized: Path = hooks.load(write)(require_path(model), folder)
            graph = onnx.load(str(optimized), load_external_data=False).graph
            names = [name for node in graph.node for name in node.output if name in model.producer]
            expected = definition.inner(opened, definition.path, names, feed)
            seen = definition.inner(opened, optimized, names, feed)
    except QdqspecError:
        return ""
    for name in names:
        is_same_shape = name in expected and name in seen and expected[name].shape == seen[name].shape
        if is_same_shape and _sqnr_db([expected[name]], [seen[name]]) < DEFINED_DB:
            node = model.producer[name]
            return f"{node.op_type} '{node.name}'"
    return ""
