"""Writes parts of a model with their pairs and inputs, for the bench to time in isolation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from qdqspec.backends.base import Array
from qdqspec.errors import BackendError, ModelError, PlacementError
from qdqspec.graph.save import save_model
from qdqspec.graph.weights import WeightStore
from qdqspec.measurement.profiles import Load, Part
from qdqspec.placement.excerpt import Excerpt, Excerpts, Spans, looks_like_shape
from qdqspec.placement.insert import Inserter
from qdqspec.session.prepare import Prepared, require_path
from qdqspec.types import Placement, ShapeProfile

Nodes = tuple[str, ...]


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
        path = self._folder / f"part-{_digest(nodes)}-{placement.digest}.onnx"
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
        if self._last is None or self._last.nodes != nodes:
            self._last = self._made(nodes)
        return self._last

    def _made(self, nodes: Nodes) -> _Cut:
        loads = self._prepared.loads
        first = self._values(nodes, loads[0])
        spans = self._spans(nodes, first)
        excerpt = self._excerpts.cut(nodes, first, spans)
        used = loads if spans else (replace(loads[0], share=1.0),)
        others = (self._values(nodes, load, own) for load, own in zip(used[1:], spans[1:], strict=True))
        return _Cut(
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

    def _spans(self, nodes: Nodes, values: Mapping[str, Array]) -> tuple[Spans, ...]:
        if any(map(looks_like_shape, values.values())):
            return ()
        return self._excerpts.spans(nodes, self._prepared.ranges)

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
            raise ModelError(f"nothing is known of the values of '{tensor}'")
        dtype, shape = known
        shape = spans[tensor].opt if spans else shape
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def _digest(nodes: Nodes) -> str:
    return hashlib.sha256("\n".join(nodes).encode()).hexdigest()[:12]
