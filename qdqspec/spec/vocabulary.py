"""The closed words of a spec: formats, axes, backends, and the grammar of ids.

Number formats and calibration methods are spelled here again, because the rooms that compute with
them import numpy, which collection must not. A test holds both lists together.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

# What a Q/DQ pair can be made of so far. A format joins `quantize.formats` and this line.
Format: TypeAlias = Literal[
    "int8", "uint8", "int16", "uint16", "fp8", "int4", "uint4", "nvfp4", "mxfp8"
]  # fmt: skip
Activations: TypeAlias = Literal["auto", "int8", "uint8", "int16", "uint16", "fp8"]
Method: TypeAlias = Literal["max", "percentile", "entropy", "mse", "mean"]
Correction: TypeAlias = Literal["ranges", "equalization", "bits", "rounding", "bias"]
Granularity: TypeAlias = Literal["per-channel", "per-tensor"]
Preset: TypeAlias = Literal["quick", "default", "extensive"]

# The order of an id's parts, whatever the order in the file: a reordered matrix keeps its baselines.
AXES = ("quant", "batch", "calibration", "weights", "activations", "strategy", "preset")

# Known by name even where this version, or this machine, has no such backend: such a case is skipped.
BACKENDS = ("onnxruntime", "tensorrt", "trtexec", "fake")
TARGETS = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt-10", "tensorrt-11")  # of these backends

MAX_CASES = 256  # of one spec
MAX_COMBINATIONS = 4096  # looked at before exclude, so that no matrix takes forever

_ID = re.compile(r"[a-z0-9][a-z0-9._-]*")


def is_id(text: str) -> bool:
    """Whether the text can be part of a test id: pytest 9.2 loses brackets, xdist splits at ``@``."""
    return _ID.fullmatch(text) is not None


def slug(text: str) -> str:
    """The text as part of an id: lower case, everything else a dash; empty where nothing is left."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")
