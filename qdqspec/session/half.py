"""The reference in float16, timed for comparison: the alternative to quantization.

The conversion is a hook of the backend, or of the default one. Inputs and outputs keep their types, so that all roles
have the same inputs, and casts are inserted at the graph's borders. Outputs are not compared: a model whose values
exceed the range of float16 has to be converted with data (AutoCast of Model-Optimizer does so).
"""

from __future__ import annotations

from pathlib import Path

import onnx

from qdqspec.errors import ModelError
from qdqspec.graph.ops import has_floats
from qdqspec.session.prepare import Prepared, require_path
from qdqspec.session.runtimes import half_model
from qdqspec.types import Consumer, LatencyEvidence, Placement, Site

ROLE = "float16"
FILE = "reference_float16.onnx"


def half_reference(prepared: Prepared, folder: Path) -> Path | None:
    """The model of a case in float16, written to a folder; ``None`` if it is not requested or the model has no floats.

    A failed conversion is noted, and so is a backend that computes float16 in float32.
    """
    asked, able = prepared.case.tune.float16, prepared.capabilities.computes_in_half
    if asked is False or (asked is None and not able) or not has_floats(prepared.given):
        return None
    if not able:
        prepared.note_once(
            "float16 is asked for, and this backend has few kernels of it: casts to float32 stand around"
        )
    path = folder / FILE
    try:
        proto = half_model(
            prepared.given, require_path(prepared.given), backend=prepared.backend_name, keep_io=True
        )
    except ModelError as error:
        prepared.note_once(f"no float16 reference: {error.what}")
        return None
    onnx.save(proto, path, save_as_external_data=True, location=f"{FILE}.data")
    return path


def stand_in(path: Path) -> Placement:
    """A placement that represents a file in a bench; equal files share their builds."""
    return Placement(sites=frozenset({Site(tensor=str(path), consumers=(Consumer("", 0),), format="")}))


def note_half(prepared: Prepared, latency: LatencyEvidence) -> None:
    """Add a warning if the float16 model did not run, or is significantly faster than the tuned model."""
    if why := latency.failures.get(ROLE):
        prepared.note_once(f"the float16 reference did not run: {why}")
    half, tuned = latency.ratios.get(ROLE), latency.ratios.get("tuned")
    if half is not None and tuned is not None and half.high < tuned.low:
        prepared.note_once(
            f"the model in float16 is faster than the tuned one: {half.median:.2f} of the reference's time, "
            f"and the tuned one {tuned.median:.2f}; convert it to float16 first, and tune that"
        )
