"""The options of TensorRT for RTX, ``tensorrt-rtx.WORD=VALUE``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qdqspec._core.options import ValueType, declare, option
from qdqspec._core.registry import did_you_mean
from qdqspec.backends.tensorrt.options import TimingOptions

# The compute capabilities that version 1.7 builds for ahead of time, as its API names them.
CAPABILITIES = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")
DEFAULT = ("SM86", "SM89", "SM120")


def _capabilities(value: object) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(re.split(r"[,\s]+", str(value).strip().upper())))
    if unknown := [name for name in names if name not in CAPABILITIES]:
        near = did_you_mean(unknown[0], CAPABILITIES)
        raise ValueError(f"'{unknown[0]}' is none of {', '.join(CAPABILITIES)}{near}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class RtxOptions(TimingOptions):
    """Options of building and timing."""

    for_: tuple[str, ...] = option(
        ValueType(expects="compute capabilities, separated by commas", read=_capabilities),
        "GPUs that engines are built for, by compute capability. With it they do not run here.",
        (),
        shown=f"the GPU here; without one {','.join(DEFAULT)}",
    )


_NO_EFFECT = (
    "TensorRT for RTX accepts it without an effect (measured with 1.7.1.116)",
    "leave it out: its compiler chooses kernels without timing them",
)
_NOT_BUILT = (
    "TensorRT for RTX has no library for it (libnvinfer_lean), or ignores it (measured with 1.7.1.116)",
    "name the GPUs with tensorrt-rtx.for=SM86,SM89",
)
OPTIONS = declare(
    "tensorrt-rtx",
    RtxOptions,
    refused={
        **dict.fromkeys(
            (
                "opt-level", "workspace", "avg-timing", "max-tactics", "tiling", "tf32", "sparse", "timing-cache",
                "build-route", "aux-streams",
            ),
            _NO_EFFECT,
        ),
        **dict.fromkeys(("version-compatible", "hardware"), _NOT_BUILT),
    },
)  # fmt: skip


def compute_capability(name: str) -> tuple[int, int]:
    """``SM89`` as (8, 9), ``SM120`` as (12, 0)."""
    digits = name.removeprefix("SM")
    return int(digits[:-1]), int(digits[-1])
