"""The model files of candidates: whole models, parts of a model, and the reference in other float types."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx

from qdqspec.arrays import Array
from qdqspec.errors import BackendError, ModelError, PlacementError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.ops import has_floats
from qdqspec.graph.save import save_model
from qdqspec.graph.weights import WeightStore
from qdqspec.graph.wire import Parts
from qdqspec.measurement.profiles import Load, Part
from qdqspec.placement.edit.excerpt import Excerpt, Excerpts, Spans, looks_like_shape
from qdqspec.placement.edit.insert import Inserter
from qdqspec.preparation.auxiliary_runs import half_model
from qdqspec.preparation.cached import FLOAT32_FILE
from qdqspec.preparation.prepare import Prepared
from qdqspec.types import FLOAT32, LatencyEvidence, Placement, ShapeProfile

Nodes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CandidateFiles:
    """Writes placements as model files to one folder. The file of the empty one is the ``reference``: see `plain_file`.

    ``quantized`` is that of the placement with which the user's model is a candidate as given.
    """

    folder: Path
    reference: Path
    insert: Callable[[Placement], Parts]
    quantized: Path | None = None

    def __call__(self, placement: Placement) -> Path:
        """The file of a placement; written once."""
        if not placement.sites:
            return self.reference
        if placement.given and self.quantized is not None:
            return self.quantized
        path = self.folder / f"{placement.digest}.onnx"
        if not path.exists():
            save_model(self.insert(placement), path)
        return path


@dataclass(frozen=True, slots=True)
class _Cut:
    """An extracted part, with the inputs it is timed with."""

    nodes: Nodes
    excerpt: Excerpt
    inserter: Inserter
    loads: tuple[Load, ...]
    profiles: tuple[ShapeProfile, ...]


class PartFiles:
    """Writes parts of a case's model as files to one folder. The last extracted part is cached.

    If the case has several shape profiles, its parts are timed at the same profiles. A part that reads a computed
    shape, or has a shape that cannot be derived from the inputs, uses the first profile only.
    """

    def __init__(self, prepared: Prepared, folder: Path, store: WeightStore) -> None:
        self._prepared = prepared
        self._folder = folder
        self._store = store
        self._last: _Cut | None = None

    def __call__(self, placement: Placement, nodes: Nodes) -> Part:
        """The file of a part with the pairs of a placement in it, and inputs for it.

        Raises `BackendError` if the part cannot be built in isolation, and `PlacementError` for pairs that the spec
        forbids.
        """
        self._prepared.space.permitted(placement)
        digest = hashlib.sha256("\n".join(nodes).encode()).hexdigest()[:12]
        path = self._folder / f"part-{digest}-{placement.digest}.onnx"
        try:
            cut = self._cut(nodes)
            if not path.exists():
                save_model(cut.inserter.insert(cut.excerpt.restricted(placement)).parts, path)
        except (ModelError, PlacementError) as error:
            raise BackendError(f"these nodes cannot be built alone: {error.what}") from None
        return Part(path=path, loads=cut.loads, profiles=cut.profiles)

    @cached_property
    def _excerpts(self) -> Excerpts:
        prepared = self._prepared
        shapes = {name: spec.shape for name, spec in prepared.inputs.items()}
        return Excerpts(prepared.model, shapes, require_path(prepared.given))

    def _cut(self, nodes: Nodes) -> _Cut:
        if self._last is not None and self._last.nodes == nodes:
            return self._last
        loads = self._prepared.loads
        first = self._values(nodes, loads[0])
        spans: tuple[Spans, ...] = ()
        if not any(map(looks_like_shape, first.values())):
            spans = self._excerpts.spans(nodes, self._prepared.shape_ranges)
        excerpt = self._excerpts.cut(nodes, first, spans)
        used = loads if spans else (replace(loads[0], share=1.0),)
        others = (self._values(nodes, load, own) for load, own in zip(used[1:], spans[1:], strict=True))
        self._last = _Cut(
            nodes,
            excerpt,
            Inserter(excerpt.model, self._prepared.numbers, store=self._store),
            tuple(
                replace(load, feeds={name: values[name] for name in excerpt.inputs})
                for load, values in zip(used, (first, *others), strict=True)
            ),
            tuple(
                ShapeProfile(shapes={name: own[name] for name in excerpt.inputs}, weight=load.share)
                for load, own in zip(used, spans, strict=False)  # without spans there are no profiles
            ),
        )
        return self._last

    def _values(self, nodes: Nodes, load: Load, spans: Spans | None = None) -> dict[str, Array]:
        """Values of a part's inputs in a run of the model; random values if they cannot be observed."""
        inputs = self._excerpts.inputs(nodes)
        try:
            return self._prepared.observed(inputs, load.feeds)
        except BackendError:
            return {name: self._random(name, spans) for name in inputs}

    def _random(self, tensor: str, spans: Spans | None) -> Array:
        known = self._excerpts.type_of(tensor)
        if known is None or known[0].kind != "f":
            raise ModelError(f"no values are known of '{tensor}'")
        dtype, shape = known
        shape = spans[tensor].opt if spans else shape
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)


_HALF = "float16"  # a role
_HALF_FILE, _GIVEN_FILE = "reference_float16.onnx", "reference.onnx"


def plain_file(prepared: Prepared, folder: Path) -> Path:
    """The file of a candidate without pairs: the user's model, or its copy in float32, written to a folder."""
    if not prepared.is_converted:
        return require_path(prepared.given)
    return _written(prepared.base, folder / FLOAT32_FILE)


def other_references(prepared: Prepared, folder: Path) -> dict[str, Path]:
    """Files to time beside the placements of a search, by role; written to a folder.

    That is the model in float16, of `half_reference`; and the user's model, as the reference, if its copy in float32
    is the one without pairs.
    """
    found = half_reference(prepared, folder)
    if prepared.is_converted:
        found["reference"] = _written(prepared.given, folder / _GIVEN_FILE)
    return found


def _written(model: Model, path: Path) -> Path:
    if not path.exists():
        save_model(model.proto, path, base=require_path(model).parent)
    return path


def half_reference(prepared: Prepared, folder: Path) -> dict[str, Path]:
    """The model of a case in float16, written to a folder, by its role; empty if not requested or without floats.

    The conversion is a hook of the backend, or of the default one. Inputs and outputs keep their types, so that all
    roles have the same inputs, and casts are inserted at the graph's borders. Outputs are not compared: a model whose
    values exceed the range of float16 has to be converted with data (AutoCast of Model-Optimizer does so). A failed
    conversion is noted, and so is a backend that computes float16 in float32.
    """
    asked, able = prepared.case.tune.float16, prepared.capabilities.computes_in_half
    if asked is False or (asked is None and not able) or not has_floats(prepared.given):
        return {}
    if not able:
        prepared.note_once(
            "float16 was requested, and this backend has few float16 kernels: float32 casts were inserted"
        )
    path = folder / _HALF_FILE
    try:
        given = prepared.given
        proto = half_model(given, require_path(given), backend=prepared.backend.name, keep_io=True)
    except ModelError as error:
        prepared.note_once(f"no float16 reference: {error.what}")
        return {}
    onnx.save(proto, path, save_as_external_data=True, location=f"{_HALF_FILE}.data")
    return {_HALF: path}


def note_float_types(prepared: Prepared, latency: LatencyEvidence) -> None:
    """Add a warning if the model in another float type did not run, or is significantly faster than the tuned model."""
    if why := latency.failures.get(_HALF):
        prepared.note_once(f"the float16 reference did not run: {why}")
    half, tuned = latency.tested.get(_HALF), latency.tested.get("tuned")
    if half is not None and tuned is not None and half.enclosing.high < tuned.enclosing.low:
        prepared.note_once(
            f"the model in float16 is faster than the tuned one: {half.mean.median:.2f} of the reference's time, "
            f"and the tuned one {tuned.mean.median:.2f}; convert it to float16 first, and tune that"
        )
    plain = latency.tested.get(FLOAT32)
    if plain is not None and tuned is not None and plain.enclosing.high < tuned.enclosing.low:
        prepared.note_once(
            f"converted to float32, the model is faster without any pair: {plain.mean.median:.2f} of the reference's "
            f"time; that is a gain of the type alone, and not selected. The model is {FLOAT32_FILE} among the results"
        )
