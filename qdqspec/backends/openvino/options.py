"""The options of OpenVINO, ``openvino.WORD=VALUE``.

OpenVINO's own properties are not passed on: one of them (``CACHE_DIR``) makes it load compiled models from a folder,
and others change the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qdqspec.config.declared import declare, option
from qdqspec.config.values import LIBRARIES, one_of

CPU = "cpu"

_PINNED = ("qdqspec sets it, so that times of different runs are comparable", "leave it out")
_THREADS = ("the number of threads is an option of the run", "give --threads")

_REFUSED = {
    "cache-dir": (
        "OpenVINO would load compiled models from that folder, and builds would not be measured",
        "leave it out; qdqspec keeps its own cache of results",
    ),
    "inference-precision-hint": _PINNED,
    "num-streams": _PINNED,
    "inference-num-threads": _THREADS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoOptions:
    """The options after ``openvino.`` in the configuration."""

    device: str = option(
        one_of(CPU, "gpu", "npu"),
        "The kind of device that runs the models; the index of a GPU is given with --device.",
        CPU,
    )
    plugins: tuple[Path, ...] = option(
        LIBRARIES,
        "OpenVINO extension libraries with custom operators.",
        (),
        shown="",
        in_files=False,
        flag="plugin",
    )


OPTIONS = declare("openvino", OpenVinoOptions, _REFUSED)


def options_from(extra: Mapping[str, str]) -> OpenVinoOptions:
    """Read the options that begin with ``openvino.``; raise `ConfigError` for an unknown or invalid one."""
    return OpenVinoOptions(**OPTIONS.read(extra))
