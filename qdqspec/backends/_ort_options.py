"""The words after ``onnxruntime.`` in configuration. May import floor 0.

``optimization`` is how far ONNX Runtime rewrites a model before it runs it: ``all`` (as shipped), ``extended``,
``basic``, or ``off``, where every QuantizeLinear and DequantizeLinear is computed as the ONNX standard defines it
and everything between them in floating point. ``plugins`` are libraries of custom operators, separated as in PATH;
the command line gives them, never a spec.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean

PREFIX = "onnxruntime."
OPTIMIZATION = f"{PREFIX}optimization"
PLUGINS = f"{PREFIX}plugins"
_PROVIDERS = frozenset({f"{PREFIX}provider", f"{PREFIX}providers"})  # asked for, and not offered
AS_DEFINED = "off"  # of `OPTIMIZATION`
FULL = "all"

LEVELS = {
    FULL: "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    AS_DEFINED: "ORT_DISABLE_ALL",
}


def level_from(extra: Mapping[str, str]) -> str:
    """A key of `LEVELS`; raises `ConfigError` for an unknown word or value."""
    for word in extra:
        if word in _PROVIDERS:
            raise ConfigError(
                f"{word} cannot be set: the CPU provider is the one whose kernels qdqspec knows",
                cure="for TensorRT take --backend tensorrt or trtexec; see docs/tensorrt.md for the other providers",
            )
        if word.startswith(PREFIX) and word not in (OPTIMIZATION, PLUGINS):
            near = did_you_mean(word, [OPTIMIZATION])
            raise ConfigError(f"unknown option '{word}'{near}", cure=f"known: {OPTIMIZATION}")
    asked = extra.get(OPTIMIZATION, FULL).strip()
    if asked not in LEVELS:
        near = did_you_mean(asked, list(LEVELS))
        raise ConfigError(
            f"'{asked}' does not fit {OPTIMIZATION}{near}", cure=f"one of {', '.join(LEVELS)} is expected"
        )
    return asked


def libraries_from(extra: Mapping[str, str]) -> tuple[Path, ...]:
    """The libraries of custom operators to load."""
    return tuple(Path(text) for text in extra.get(PLUGINS, "").split(os.pathsep) if text)
