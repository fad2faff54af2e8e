"""Writes the corrections that a search found to a file, so that a resumed search has the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from qdqspec.codec import from_data
from qdqspec.corrections.find import FoundCorrections
from qdqspec.graph.model import Model
from qdqspec.graph.save import write_text
from qdqspec.placement.edit.equalize import EQUALIZATIONS, misfit_of
from qdqspec.plain_json import content_sum, read_json
from qdqspec.quantize.corrections import Corrections, WeightKey, WeightNumbers, packed, unpacked
from qdqspec.quantize.formats import number_format
from qdqspec.quantize.ranges import TensorRange
from qdqspec.types import CorrectionGain

_MOST_BYTES = 1 << 30


def write_found(path: Path, run: Mapping[str, object], found: FoundCorrections) -> None:
    """Write corrections with their gains; ``run`` describes model, data and rules."""
    known = found.corrections
    content: dict[str, Any] = {
        "gains": [asdict(gain) for gain in found.gains],
        "untried": list(found.untried),
        "equalized": [change.record for change in found.equalized],
        "ranges": {tensor: [span.low, span.high] for tensor, span in known.ranges.items()},
        "weights": [
            [*key, own.scale.tolist(), "" if own.integers is None else packed(own.integers)]
            for key, own in known.weights.items()
        ],
        "biases": [[*key, shift.tolist()] for key, shift in known.biases.items()],
    }
    write_text(path, json.dumps({"run": content_sum(run), "sum": content_sum(content), **content}))


def read_found(path: Path, run: Mapping[str, object], model: Model) -> FoundCorrections | None:
    """The corrections in a file, without numbers; ``None`` if it is missing, damaged, or of another run or model."""
    try:
        content = read_json(path, most_bytes=_MOST_BYTES)
        if content.pop("run") != content_sum(run) or content.pop("sum") != content_sum(content):
            return None
        return _found(content, model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _found(content: Mapping[str, Any], model: Model) -> FoundCorrections | None:
    equalized = EQUALIZATIONS.validate_python(content["equalized"])
    if misfit_of(model, equalized) is not None:
        return None
    weights: dict[WeightKey, WeightNumbers] = {}
    for tensor, name, axis, scale, text in content["weights"]:
        shape = tuple(model.constants[tensor].dims)
        integers = unpacked(text, number_format(name).dtype, prod(shape)).reshape(shape) if text else None
        weights[tensor, name, axis] = WeightNumbers(scale=np.array(scale, np.float32), integers=integers)
    return FoundCorrections(
        corrections=Corrections(
            ranges={tensor: TensorRange(low, high) for tensor, (low, high) in content["ranges"].items()},
            weights=weights,
            biases={
                (tensor, name, axis): np.array(b, np.float32) for tensor, name, axis, b in content["biases"]
            },
        ),
        gains=tuple(from_data(CorrectionGain, gain) for gain in content["gains"]),
        untried=tuple(content.get("untried", ())),
        equalized=equalized,
    )
