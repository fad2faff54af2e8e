"""The model files of candidates: whole models, and parts of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.app.preparation.cached import FLOAT32_FILE
from qdqspec.errors import BackendError, ModelError, PlacementError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.save import save_model
from qdqspec.graph.weights import WeightStore
from qdqspec.graph.wire import Parts
from qdqspec.qdq.edit.excerpt import Excerpt, Excerpts
from qdqspec.qdq.edit.insert import Inserter
from qdqspec.timing.profiles import Load, Part
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

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


class PartFiles:
    """Writes parts of a case's model as files to one folder, for the inputs of its first shape profile.

    The last extracted part is cached.
    """

    def __init__(self, prepared: Prepared, folder: Path, store: WeightStore) -> None:
        self._prepared = prepared
        self._folder = folder
        self._store = store
        self._last: tuple[Nodes, Excerpt, Inserter, Load] | None = None

    def __call__(self, placement: Placement, nodes: Nodes) -> Part:
        """The file of a part with the pairs of a placement in it, and inputs for it.

        Raises `BackendError` if the part cannot be built in isolation, and `PlacementError` for pairs that the spec
        forbids.
        """
        self._prepared.space.permitted(placement)
        digest = hashlib.sha256("\n".join(nodes).encode()).hexdigest()[:12]
        path = self._folder / f"part-{digest}-{placement.digest}.onnx"
        try:
            excerpt, inserter, load = self._cut(nodes)
            if not path.exists():
                save_model(inserter.insert(excerpt.restricted(placement)).parts, path)
        except (ModelError, PlacementError) as error:
            raise BackendError(f"these nodes cannot be built alone: {error.what}") from None
        return Part(path=path, loads=(load,))

    @cached_property
    def _excerpts(self) -> Excerpts:
        prepared = self._prepared
        shapes = {name: spec.shape for name, spec in prepared.inputs.items()}
        return Excerpts(prepared.model, shapes, require_path(prepared.given))

    def _cut(self, nodes: Nodes) -> tuple[Excerpt, Inserter, Load]:
        if self._last is None or self._last[0] != nodes:
            first = self._prepared.loads[0]
            values = self._prepared.observed(self._excerpts.inputs(nodes), first.feeds)
            excerpt = self._excerpts.cut(nodes, values)
            load = replace(first, feeds={name: values[name] for name in excerpt.inputs}, share=1.0)
            inserter = Inserter(excerpt.model, self._prepared.numbers, store=self._store)
            self._last = nodes, excerpt, inserter, load
        return self._last[1:]


def plain_file(prepared: Prepared, folder: Path) -> Path:
    """The file of a candidate without pairs: the user's model, or its copy in float32, written to a folder."""
    if not prepared.is_converted:
        return require_path(prepared.given)
    return write_model(prepared.base, folder / FLOAT32_FILE)


def write_model(model: Model, path: Path) -> Path:
    """Write a model to a file, unless that exists."""
    if not path.exists():
        save_model(model.proto, path, base=require_path(model).parent)
    return path
