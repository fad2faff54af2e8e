"""Writes the corrections that a search found to a file, so that a resumed search has the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from qdqspec._core.codec import from_data
from qdqspec._core.plain_json import content_sum, read_json
from qdqspec.accuracy.corrections.find import FoundCorrections
from qdqspec.graph.save import write_text
from qdqspec.qdq.edit.equalize import EQUALIZATIONS
from qdqspec.qdq.quantize.ranges import TensorRange
from qdqspec.types import CorrectionGain


def write_found(path: Path, run: Mapping[str, object], found: FoundCorrections) -> None:
    """Write corrections with their gains; ``run`` describes model, data and rules."""
    content: dict[str, Any] = {
        "gains": [asdict(gain) for gain in found.gains],
        "untried": list(found.untried),
        "equalized": [change.record for change in found.equalized],
        "ranges": {tensor: [span.low, span.high] for tensor, span in found.ranges.items()},
        "biases": [[*key, shift.tolist()] for key, shift in found.biases.items()],
    }
    write_text(path, json.dumps({"run": content_sum(run), "sum": content_sum(content), **content}))


def read_found(path: Path, run: Mapping[str, object]) -> FoundCorrections | None:
    """The corrections in a file, without numbers; ``None`` if it is missing, damaged, or of another run."""
    try:
        content = read_json(path, most_bytes=1 << 30)
        if content.pop("run") != content_sum(run) or content.pop("sum") != content_sum(content):
            return None
        return FoundCorrections(
            ranges={tensor: TensorRange(low, high) for tensor, (low, high) in content["ranges"].items()},
            biases={
                (tensor, name, axis): np.array(b, np.float32) for tensor, name, axis, b in content["biases"]
            },
            gains=tuple(from_data(CorrectionGain, gain) for gain in content["gains"]),
            untried=tuple(content["untried"]),
            equalized=EQUALIZATIONS.validate_python(content["equalized"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
