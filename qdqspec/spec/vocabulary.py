"""Closed sets of words in a spec: formats and axes, and the grammar of ids.

Number formats are repeated here, because the package that computes with them imports numpy, which collection must not.
A test compares both lists.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

# Formats of Q/DQ pairs. A format is added to `quantize.formats` and to this line.
Format: TypeAlias = Literal[
    "int8", "uint8", "int16", "uint16", "fp8", "int8_b16", "int8_b32", "int8_b64", "int8_b128", "int8_b256",
    "int4", "uint4", "nvfp4", "mxfp8",
]  # fmt: skip
Activations: TypeAlias = Literal["auto", "int8", "uint8", "int16", "uint16", "fp8"]
Method: TypeAlias = Literal["max", "percentile", "entropy", "mse", "mean"]
Correction: TypeAlias = Literal["equalization", "ranges", "margins", "bits", "bias", "rounding"]
LabelKind: TypeAlias = Literal["in+out", "in-only", "dynamic"]
Granularity: TypeAlias = Literal["per-channel", "per-tensor"]
RealType: TypeAlias = Literal["float32", "float16", "bfloat16"]
Preset: TypeAlias = Literal["quick", "default", "extensive"]

# The order of an id's parts, independent of the order in the file: a reordered matrix keeps its baselines.
AXES = ("quant", "batch", "calibration", "weights", "activations", "strategy", "preset", "backend")

MAX_CASES = 256  # of one spec
MAX_COMBINATIONS = 4096  # before exclude, so that expansion is fast

_ID = re.compile(r"[a-z0-9][a-z0-9._-]*")


def is_id(text: str) -> bool:
    """Whether the text can be part of a test id: pytest 9.2 loses brackets, xdist splits at ``@``."""
    return _ID.fullmatch(text) is not None


def slug(text: str) -> str:
    """The text as part of an id: lower case, other characters as dashes; may be empty."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")
