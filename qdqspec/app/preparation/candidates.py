"""The model files that a search builds: whole models, parts of a model, and the model in other float types."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from qdqspec._core import hooks
from qdqspec.app.preparation.cached import FLOAT32_FILE
from qdqspec.errors import BackendError, ModelError, PlacementError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.ops import has_floats
from qdqspec.graph.storage import WeightStore, save_model
from qdqspec.qdq.excerpt import Excerpt, Excerpts
from qdqspec.qdq.insert import Inserter
from qdqspec.timing.race import Load
from qdqspec.types import FLOAT32, LatencyEvidence, Placement

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

Nodes = tuple[str, ...]
_HALF = "float16"  # a role
_HALF_FILE = "reference_float16.onnx"


class CandidateFiles:
    """Writes placements of a case as files to one folder: whole models, and parts. Weights are written once."""

    def __init__(self, prepared: Prepared, folder: Path) -> None:
        self._prepared, self._folder = prepared, folder
        self._store = WeightStore(folder, base=require_path(prepared.given).parent)
        self._inserter = Inserter(prepared.model, prepared.numbers, store=self._store)
        self._plain = plain_file(prepared, folder)
        self._last: tuple[Nodes, Excerpt, Inserter, Load] | None = None

    def whole(self, placement: Placement) -> Path:
        """The file of a placement; without pairs that of the model to compare with, or the user's quantized model."""
        if not placement.sites:
            return self._plain
        if placement.given and self._prepared.quantized is not None:
            return require_path(self._prepared.quantized.quantized)
        path = self._folder / f"{placement.digest}.onnx"
        if not path.exists():
            save_model(self._inserter.insert(self._prepared.space.permitted(placement)).proto, path)
        return path

    def part(self, placement: Placement, nodes: Nodes) -> tuple[Path, Load]:
        """The file of a part with the pairs of a placement in it, and inputs for it of the first shape profile.

        Raises `BackendError` if it cannot be built in isolation, and `PlacementError` for pairs that the spec forbids.
        """
        self._prepared.space.permitted(placement)
        digest = hashlib.sha256("\n".join(nodes).encode()).hexdigest()[:12]
        path = self._folder / f"part-{digest}-{placement.digest}.onnx"
        try:
            excerpt, inserter, load = self._cut(nodes)
            if not path.exists():
                save_model(inserter.insert(excerpt.restricted(placement)).proto, path)
        except (ModelError, PlacementError) as error:
            raise BackendError(f"these nodes cannot be built alone: {error.what}") from None
        return path, load

    @cached_property
    def _excerpts(self) -> Excerpts:
        prepared = self._prepared
        return Excerpts(prepared.model, prepared.shapes, require_path(prepared.given))

    def _cut(self, nodes: Nodes) -> tuple[Excerpt, Inserter, Load]:
        if self._last is None or self._last[0] != nodes:
            first = self._prepared.loads[0]
            tensors = list(self._excerpts.inputs(nodes))
            (values,) = self._prepared.values_of(self._prepared.model, tensors, [first.feeds])
            if missing := [tensor for tensor in tensors if tensor not in values]:
                raise BackendError(f"no run of the model returns '{missing[0]}'")
            excerpt = self._excerpts.cut(nodes, values)
            load = replace(first, feeds={name: values[name] for name in excerpt.inputs}, share=1.0)
            inserter = Inserter(excerpt.model, self._prepared.numbers, store=self._store)
            self._last = nodes, excerpt, inserter, load
        return self._last[1:]


def plain_file(prepared: Prepared, folder: Path) -> Path:
    """The file of a candidate without pairs: the user's model, or its copy in float32, written to a folder."""
    if not prepared.is_converted:
        return require_path(prepared.given)
    return copy_model(prepared.base, folder / FLOAT32_FILE)


def copy_model(model: Model, path: Path) -> Path:
    """Write a model to another file."""
    own = require_path(model)
    save_model(model.proto, path, inputs=[own], base=own.parent)
    return path


def half_reference(prepared: Prepared, folder: Path) -> dict[str, Path]:
    """The model in float16, written to a folder, by its role; empty if not requested or without floats.

    Inputs and outputs keep their types, so that all roles have the same inputs. Outputs are not compared: a model whose
    values exceed the range of float16 has to be converted with data (AutoCast of Model-Optimizer does so).
    """
    given, asked, able = prepared.given, prepared.case.tune.float16, prepared.capabilities.computes_in_half
    if not (able if asked is None else asked) or not has_floats(given):
        return {}
    if not able:
        prepared.note_once(
            "float16 was requested, and this backend has few float16 kernels: float32 casts were inserted"
        )
    try:
        return {_HALF: write_half(given, folder / _HALF_FILE, prepared.backend.name, keep_io=True)}
    except ModelError as error:
        prepared.note_once(f"no float16 reference: {error.what}")
        return {}


def write_half(model: Model, path: Path, backend: str, *, keep_io: bool = False) -> Path:
    """Write a model in float16, by a hook of the backend; raises `ModelError` if it cannot be converted."""
    convert = hooks.load(hooks.declaration_of(backend).float16 or hooks.default().float16)
    proto = convert(model, require_path(model), keep_io=keep_io)
    onnx.save(proto, path, save_as_external_data=True, location=f"{path.name}.data")
    return path


def note_float_types(prepared: Prepared, latency: LatencyEvidence) -> None:
    """Add a warning if the model in another float type did not run, or is significantly faster than the tuned model."""
    if why := latency.failures.get(_HALF):
        prepared.note_once(f"the float16 reference did not run: {why}")
    tuned = latency.tested.get("tuned")
    faster = {
        role: f"{latency.tested[role].mean.median:.2f} of the reference's time"
        for role in (_HALF, FLOAT32)
        if tuned and role in latency.tested and latency.tested[role].enclosing.high < tuned.enclosing.low
    }
    if tuned and _HALF in faster:
        prepared.note_once(
            f"the model in float16 is faster than the tuned one: {faster[_HALF]}, and the tuned one "
            f"{tuned.mean.median:.2f}; convert it to float16 first, and tune that"
        )
    if FLOAT32 in faster:
        prepared.note_once(
            f"converted to float32, the model is faster without any pair: {faster[FLOAT32]}; that is a gain of the "
            f"type alone, and not selected. The model is {FLOAT32_FILE} among the results"
        )
