"""The words after ``tensorrt.`` in configuration. May import floor 0 only.

- ``tensorrt.opt-level``: builder optimization level, 1 to 5 (TensorRT's own default, 3).
- ``tensorrt.workspace``: MiB that kernels may use as scratch memory (all there is).
- ``tensorrt.avg-timing``: how often the builder times each kernel it considers (8, as trtexec).
- ``tensorrt.max-tactics``: how many kernels it considers a layer at most (TensorRT's own default).
- ``tensorrt.tiling``: ``none``, ``fast``, ``moderate`` or ``full`` (none).
- ``tensorrt.aux-streams``: how many streams an engine may use besides its own (TensorRT's own default).
- ``tensorrt.tf32``, ``tensorrt.sparse``: switches (on, off).
- ``tensorrt.hardware``: what else the engine must run on: ``none``, ``ampere-plus`` or
  ``same-compute-capability`` (none). ``tensorrt.version-compatible``: whether in later versions, too (off).
- ``tensorrt.build-route``: TensorRT 11's compiler knobs, as it writes them (those of the run's first build).
- ``tensorrt.plugins``: plugin libraries, separated as in PATH. The command line gives them, never a spec.
- ``tensorrt.cuda-graph``: whether runs are timed as CUDA graphs where that is possible (on).
- ``tensorrt.warmup-ms``: how long an engine that stood still is run before it is timed (100).
- ``tensorrt.verbose``: whether TensorRT's whole log goes to the build's (off).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean

PREFIX = "tensorrt."
Tiling: TypeAlias = Literal["none", "fast", "moderate", "full"]
Hardware: TypeAlias = Literal["none", "ampere-plus", "same-compute-capability"]

# Asked for by habit; in a strongly typed network the model itself says all types, and TensorRT 11 knows no other.
_PRECISIONS = frozenset({"fp16", "bf16", "int8", "fp8", "int4", "fp4", "best"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtOptions:
    """How to build and time; the module says what each word means. ``None`` leaves it to TensorRT."""

    opt_level: int | None = None
    workspace: int | None = None
    avg_timing: int = 8
    max_tactics: int | None = None
    tiling: Tiling | None = None
    aux_streams: int | None = None
    tf32: bool = True
    sparse: bool = False
    hardware: Hardware = "none"
    version_compatible: bool = False
    build_route: str | None = None
    plugins: tuple[Path, ...] = ()
    cuda_graph: bool = True
    warmup_ms: int = 100
    verbose: bool = False


def options_from(extra: Mapping[str, str]) -> TensorRtOptions:
    """Read the words that begin with ``tensorrt.``; raise `ConfigError` for an unknown or unreadable one."""
    known = {field.name.replace("_", "-"): field.name for field in fields(TensorRtOptions)}
    values: dict[str, Any] = {}
    for word, text in extra.items():
        if not word.startswith(PREFIX):
            continue
        name = word.removeprefix(PREFIX)
        if name not in known:
            raise _unknown(name, tuple(known))
        try:
            values[known[name]] = _READERS[name](text.strip())
        except ValueError as error:
            raise ConfigError(f"'{text}' does not fit {word}: {error}") from None
    return TensorRtOptions(**values)


def _unknown(name: str, known: tuple[str, ...]) -> ConfigError:
    if name in _PRECISIONS:
        return ConfigError(
            f"{PREFIX}{name} cannot be set: networks are built strongly typed, in the types the model has",
            cure="convert the model itself to that type, for example to float16",
        )
    near = did_you_mean(PREFIX + name, [PREFIX + word for word in known])
    return ConfigError(f"unknown option '{PREFIX}{name}'{near}", cure=f"known: {', '.join(known)}")


def _whole(least: int, most: int | None = None, why: str = "") -> Callable[[str], int]:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        fits = re.fullmatch(r"\d{1,12}", text, re.ASCII)
        if not fits or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(f"a whole number {bounds} is expected{why}")
        return int(text)

    return read


def _switch(text: str) -> bool:
    words = {
        "1": True,
        "true": True,
        "on": True,
        "yes": True,
        "0": False,
        "false": False,
        "off": False,
        "no": False,
    }
    if text.lower() not in words:
        raise ValueError("on or off is expected")
    return words[text.lower()]


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"one of {', '.join(known)} is expected{did_you_mean(text, known)}")
        return text

    return read


def _libraries(text: str) -> tuple[Path, ...]:
    paths = tuple(Path(part).expanduser().absolute() for part in text.split(os.pathsep) if part)
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"there is no file {missing[0]}")
    return paths


_READERS: Mapping[str, Callable[[str], Any]] = {
    "opt-level": _whole(1, 5, " (0 takes the first kernel that works and does not use the timing cache)"),
    "workspace": _whole(1),
    "avg-timing": _whole(1),
    "max-tactics": _whole(1),
    "tiling": _one_of("none", "fast", "moderate", "full"),
    "aux-streams": _whole(0),
    "tf32": _switch,
    "sparse": _switch,
    "hardware": _one_of("none", "ampere-plus", "same-compute-capability"),
    "version-compatible": _switch,
    "build-route": str,
    "plugins": _libraries,
    "cuda-graph": _switch,
    "warmup-ms": _whole(0),
    "verbose": _switch,
}
