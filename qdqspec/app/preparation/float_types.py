"""The model of a case in other float types, to time beside its placements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from qdqspec._core.config import hooks
from qdqspec.app.preparation.cached import FLOAT32_FILE, REFERENCE
from qdqspec.app.preparation.candidates import write_model
from qdqspec.errors import ModelError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.ops import has_floats
from qdqspec.types import FLOAT32, LatencyEvidence

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

_HALF = "float16"  # a role
_HALF_FILE = "reference_float16.onnx"


def other_references(prepared: Prepared, folder: Path) -> dict[str, Path]:
    """Files to time beside the placements of a search, by role; written to a folder.

    That is the model in float16, of `half_reference`; and the user's model, as the reference, if its copy in float32
    is the one without pairs.
    """
    found = half_reference(prepared, folder)
    if prepared.is_converted:
        found["reference"] = write_model(prepared.given, folder / REFERENCE)
    return found


def half_reference(prepared: Prepared, folder: Path) -> dict[str, Path]:
    """The model of a case in float16, written to a folder, by its role; empty if not requested or without floats.

    The conversion is a hook of the backend, or of the default one. Inputs and outputs keep their types, so that all
    roles have the same inputs. Outputs are not compared: a model whose values exceed the range of float16 has to be
    converted with data (AutoCast of Model-Optimizer does so). A failed conversion is noted, and so is a backend that
    computes float16 in float32.
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
    """Write a model in float16 to a file; inputs and outputs too, unless ``keep_io`` is set.

    Raises `ModelError` if it cannot be converted.
    """
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
