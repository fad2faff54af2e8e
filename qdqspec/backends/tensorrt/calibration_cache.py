"""Reads calibration caches, the file format of TensorRT's calibrators and ModelOpt.

A line with the TensorRT version and the calibrator, then for each tensor its name and, in hexadecimal, the bits of a
float32: the largest magnitude over 127.
"""

from __future__ import annotations

import re
import struct

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
