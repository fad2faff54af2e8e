"""Reads files of TensorRT's tools: ``trtexec``'s exports of an engine, and calibration caches.

Of an engine these are ``--exportLayerInfo``, ``--exportProfile`` and ``--exportTimes``. Beside NAME.graph.json, the
files NAME.profile.json, NAME.times.json and NAME.profile.metadata.json are found, the names that TensorRT's engine
explorer gives them.
"""

from __future__ import annotations

import re
import statistics
import struct
from collections.abc import Sequence
from pathlib import Path

from qdqspec._core.records import parse_json
from qdqspec.backends.base import Exported
from qdqspec.backends.tensorrt.layers import parse_layers, read_times
from qdqspec.errors import BackendError, StateError
from qdqspec.graph import Model

_GRAPH = ".graph.json"
_MOST_BYTES = 256 << 20  # of a file that is read whole
_EXPORT = (
    "export it from an engine of this model: trtexec --profilingVerbosity=detailed --exportLayerInfo=FILE"
)


def read_exported(files: Sequence[Path], model: Model | None = None) -> Exported:
    """Layers and times of an engine from its layer information, and optionally its profile and its times.

    With ``model``, layers are named after its nodes. Raises `StateError` for a file that cannot be read, and
    `BackendError` for one in another format.
    """
    graph = files[0]
    profile, times = (*files[1:3], None, None)[:2]
    text = _text_of(graph)
    profile = profile or _beside(graph, ".profile.json")
    timed = _text_of(profile) if profile is not None else None
    try:
        layers = parse_layers(text, timed, model=model)
    except BackendError as error:
        raise BackendError(error.what, where=graph, cure=error.cure or _EXPORT) from None
    if not layers:
        raise BackendError("TensorRT's layer information has no layers", where=graph, cure=_EXPORT)
    total = _end_to_end(graph, times)
    return Exported(layers=layers, has_times=timed is not None, end_to_end_ms=total, advice=_EXPORT)


def _end_to_end(graph: Path, times: Path | None) -> float | None:
    """The median GPU compute time, from exported times or from the summary kept by engine-explorer."""
    times = times or _beside(graph, ".times.json")
    if times is not None:
        found = read_times(_text_of(times))
        return statistics.median(found) if found else None
    kept = _beside(graph, ".profile.metadata.json")
    if kept is None:
        return None
    try:
        summary = parse_json(_text_of(kept).encode())
    except ValueError as error:
        raise StateError(f"this is not JSON: {error}", where=kept, cure="write it anew") from None
    try:
        return float(summary["performance_summary"]["GPU Compute Time"][3])  # min, max, mean, median, 99 %
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _beside(graph: Path, suffix: str) -> Path | None:
    if not graph.name.endswith(_GRAPH):
        return None
    path = graph.with_name(graph.name.removesuffix(_GRAPH) + suffix)
    return path if path.is_file() else None


def _text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise StateError("it is no file", where=path, cure=_EXPORT)
        if path.stat().st_size > _MOST_BYTES:
            raise StateError(f"it is larger than {_MOST_BYTES >> 20} MiB", where=path, cure=_EXPORT)
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise StateError(f"it cannot be read: {error.strerror}", where=path, cure=_EXPORT) from None


# ---- calibration caches, the file format of TensorRT's calibrators and ModelOpt ------------------

# A line with the TensorRT version and the calibrator, then for each tensor its name and, in hexadecimal, the bits of a
# float32: the largest magnitude over 127.
_START = b"TRT-"
_HEADER = re.compile(r"TRT-\d+-\w+")
_LINE = re.compile(r"(?P<name>.+?)\s*:\s*(?P<bits>[0-9a-fA-F]{8})")
_STEPS = 127  # of int8, the format of the caches; other formats use the range


def read_magnitudes(data: bytes) -> dict[str, tuple[float, str]] | None:
    """The largest magnitude of each tensor, with its line; ``None`` if it is no calibration cache.

    Raises ``ValueError`` for a line that cannot be read.
    """
    if not data.startswith(_START):
        return None
    header, *lines = data.decode("utf-8", "strict").split("\n")
    if _HEADER.fullmatch(header.strip()) is None:
        raise ValueError(f"line 1 is no header of a calibration cache: {header!r:.60}")
    found: dict[str, tuple[float, str]] = {}
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number} is not 'tensor: 3c010a14': {line!r:.60}")
        (scale,) = struct.unpack("!f", bytes.fromhex(match["bits"]))
        found[match["name"]] = _STEPS * scale, f"line {number}"
    return found
