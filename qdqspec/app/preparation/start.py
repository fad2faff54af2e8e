"""What a search starts from: the float form and placements of quantized models, and earlier searches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec._core.units import count_text, names_text
from qdqspec.errors import ConfigError, StateError
from qdqspec.graph import Model, OwnCopy, is_quantized, load_model
from qdqspec.graph.trt import is_pair_op
from qdqspec.qdq import (
    PatternCache,
    SchemeFile,
    import_placement,
    strip_qdq,
)
from qdqspec.search import read_journal
from qdqspec.types import Placement

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared


class FloatForm(OwnCopy):
    """A copy of a ``quantized`` model without its pairs, which are ``imported`` with their numbers."""

    def __init__(self, quantized: Model, imported: SchemeFile, notes: Iterable[str]) -> None:
        self.quantized = quantized
        self.imported = imported
        count = count_text(len(imported.placement.sites), "tensor")
        note = (
            f"the model is given quantized ({count}): the reference is its float form, a copy without Q/DQ, and the "
            "model as given is a candidate; if you have the original float model, tune that with --start-from this one"
        )
        super().__init__(
            quantized,
            strip_qdq(quantized).proto,
            sha256=hashlib.sha256(f"{quantized.sha256} float form".encode()).hexdigest(),
            fixed=quantized.fixed,
            notes=[note, *notes],
        )


def with_float_form(model: Model) -> Model:
    """The model, or its float form if it has pairs that a placement expresses."""
    if not (is_quantized(model) or any(is_pair_op(node.proto) for node in model.nodes)):
        return model
    imported = import_placement(model)
    return FloatForm(model, imported, imported.notes) if imported.placement.sites else model


def float_form_of(model: Model) -> FloatForm | None:
    """The float form that a model is, or a copy of; ``None`` for a model that was given in float."""
    while not isinstance(model, FloatForm):
        if not isinstance(model, OwnCopy):
            return None
        model = model.origin
    return model


def warm_starts(prepared: Prepared) -> tuple[Placement, ...]:
    """The placements of this model in the files of ``tune.start_from``, each once; a file without one is noted.

    Raises for a file that is damaged or of another backend.
    """
    found: dict[str, Placement] = {}
    for path in prepared.case.tune.start_from:
        starts = list(_placements_in(path, prepared))
        if not starts:
            prepared.note_once(f"{path.name} contains no placement for this model")
        found |= {placement.digest: placement for placement in starts}
    return tuple(found.values())


def _placements_in(path: Path, prepared: Prepared, most: int = 2) -> Iterable[Placement]:
    """The parts of the placements in a file that the space has; other pairs, except biases, are noted.

    Placements without such a part are left out. Of a journal the ``most`` best placements, confirmed or else raced:
    each costs a build.
    """
    space, backend = prepared.space, prepared.backend.target
    match path.suffix.lower():
        case ".yaml" | ".yml":
            try:
                return PatternCache.read(path).warm_starts(space, backend, prepared.resources.device.key)
            except StateError as error:
                raise StateError(error.what, where=error.where or path, cure=error.cure) from None
        case ".json":
            scheme = SchemeFile.read(path)
            _require_backend("scheme", scheme.backend, path, backend)
            placements: Iterable[Placement] = [scheme.placement]
        case ".jsonl":
            header, trials = read_journal(path)
            _require_backend("journal", str(header.get("backend")), path, backend)
            confirmed = [trial for trial in trials if trial.phase == "confirm" and trial.ok]
            raced = confirmed or [trial for trial in trials if trial.incumbent]
            ranked = sorted(raced, key=lambda trial: (trial.ratio or 1.0, trial.number))
            placements = islice(dict.fromkeys(trial.placement for trial in ranked), most)
        case ".onnx":
            found, notes = import_placement(load_model(path), space.model).placement_for(space.model)
            for line in notes:
                prepared.note_once(f"{path.name}: {line}")
            placements = [found]
        case _:
            raise ConfigError(
                "tune.start_from takes pattern caches (.yaml), journals (.jsonl), schemes (.json) and Q/DQ models "
                "(.onnx)",
                where=path,
                cure="name a file that a tuning run has left, or a quantized model",
            )
    starts = []
    for placement in placements:
        own, lost = space.project(placement)
        if own.sites:
            starts.append(own)
        if own.sites and lost:
            why = "the search has no labels with these pairs, so that the candidate is without them"
            prepared.note_once(f"{path.name}: {names_text(lost)}: {why}")
    return starts


def _require_backend(what: str, backend: str, path: Path, here: str) -> None:
    if backend != here:
        raise StateError(
            f"the {what} was made on {backend}, not on {here}: speed differs between backends",
            where=path,
            cure=f"start from a {path.name} that a run on {here} has left",
        )
