"""The options of OpenVINO, ``openvino.WORD=VALUE``.

OpenVINO's own properties are not passed on: one of them (``CACHE_DIR``) makes it load compiled models from a folder,
and others change the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qdqspec.config.declared import LIBRARIES, BackendOption, BackendOptions, one_of

CPU = "cpu"
_DEVICES = (CPU, "gpu", "npu")

_PINNED = ("qdqspec sets it, so that times of different runs are comparable", "leave it out")
_THREADS = ("the number of threads is an option of the run", "give --threads")

OPTIONS = BackendOptions(
    backend="openvino",
    options=(
        BackendOption(
            word="device",
            type=one_of(*_DEVICES),
            in_files=True,
            help="The kind of device that runs the models; the index of a GPU is given with --device.",
            default=CPU,
        ),
        BackendOption(
            word="plugins",
            type=LIBRARIES,
            in_files=False,
            help="OpenVINO extension libraries with custom operators.",
            flag="plugin",
        ),
    ),
    refused={
        "cache-dir": (
            "OpenVINO would load compiled models from that folder, and builds would not be measured",
            "leave it out; qdqspec keeps its own cache of results",
        ),
        "inference-precision-hint": _PINNED,
        "num-streams": _PINNED,
        "inference-num-threads": _THREADS,
    },
)


def device_from(extra: Mapping[str, str]) -> str:
    """``cpu``, ``gpu`` or ``npu``; raises `ConfigError` for an unknown option or value."""
    return str(OPTIONS.read(extra).get("device", CPU))


def libraries_from(extra: Mapping[str, str]) -> tuple[Path, ...]:
    """The extension libraries to load."""
    libraries: tuple[Path, ...] = OPTIONS.read(extra).get("plugins", ())
    return libraries
