"""Writes parts of a model, with their pairs and inputs, for the bench to time alone. Part of the session."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from qdqspec.backends.base import Array
from qdqspec.errors import BackendError, ModelError, PlacementError
from qdqspec.graph.save import save_model
from qdqspec.graph.weights import WeightStore
from qdqspec.placement.excerpt import Excerpt, Excerpts
from qdqspec.placement.insert import Inserter
from qdqspec.session.prepare import Prepared, require_path
from qdqspec.types import Placement

Nodes = tuple[str, ...]


class PartFiles:
    """Parts of the model of a case, as files in one folder. The last part cut is remembered."""

    def __init__(self, prepared: Prepared, folder: Path, store: WeightStore) -> None:
        self._prepared = prepared
        self._folder = folder
        self._store = store
        self._last: tuple[Nodes, Excerpt, Inserter, Mapping[str, Array]] | None = None

    def __call__(self, placement: Placement, nodes: Nodes) -> tuple[Path, Mapping[str, Array]]:
        """The file of a part with the pairs that a placement gives it, and inputs for it.

        Raises `BackendError` where the part cannot stand alone.
        """
        path = self._folder / f"part-{_digest(nodes)}-{placement.digest}.onnx"
        try:
            excerpt, inserter, feeds = self._part(nodes)
            if not path.exists():
                save_model(inserter.insert(excerpt.restricted(placement)).parts, path)
        except (ModelError, PlacementError) as error:
            raise BackendError(f"these nodes cannot be built alone: {error.what}") from None
        return path, feeds

    @cached_property
    def _excerpts(self) -> Excerpts:
        prepared = self._prepared
        shapes = {name: spec.shape for name, spec in prepared.inputs.items()}
        return Excerpts(prepared.model, shapes, require_path(prepared.given))

    def _part(self, nodes: Nodes) -> tuple[Excerpt, Inserter, Mapping[str, Array]]:
        if self._last is None or self._last[0] != nodes:
            values = self._values(nodes)
            excerpt = self._excerpts.cut(nodes, values)
            inserter = Inserter(excerpt.model, self._prepared.numbers, store=self._store)
            self._last = nodes, excerpt, inserter, {name: values[name] for name in excerpt.inputs}
        return self._last[1:]

    def _values(self, nodes: Nodes) -> dict[str, Array]:
        """What the inputs of a part hold in a run of the model, or random values where that cannot be seen."""
        inputs = self._excerpts.inputs(nodes)
        try:
            return self._prepared.observed(inputs)
        except BackendError:
            return {name: self._random(name) for name in inputs}

    def _random(self, tensor: str) -> Array:
        known = self._excerpts.type_of(tensor)
        if known is None or known[0].kind != "f":
            raise ModelError(f"nothing is known of the values of '{tensor}'")
        dtype, shape = known
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def _digest(nodes: Nodes) -> str:
    return hashlib.sha256("\n".join(nodes).encode()).hexdigest()[:12]
