"""Ranges of other tools: calibration caches of runtimes, and plain JSON.

The backend of a runtime reads its calibration caches (hook ``ranges``). JSON holds plain numbers: ``{"tensor": 6.0}``
for -6 to 6, or ``{"tensor": [-1.5, 6.0]}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path

from qdqspec.config import hooks
from qdqspec.errors import DataError
from qdqspec.plain_json import parse_json
from qdqspec.quantize.ranges import TensorRange

_MOST_BYTES = 64 << 20
_CURE = 'give a calibration cache of a runtime, or JSON such as {"tensor": 6.0} or {"tensor": [-1.5, 6.0]}'


def given_ranges(
    path: Path, wanted: Collection[str], where: str, note: Callable[[str], None]
) -> dict[str, TensorRange]:
    """The ranges in a file for the wanted tensors; ``note`` receives the names of those without one.

    Raises `DataError` if it cannot be read, or has none of them: it belongs to another model than ``where`` then.
    """
    told = read_ranges(path)
    found = {tensor: told[tensor] for tensor in wanted if tensor in told}
    if wanted and not found:
        raise DataError(
            f"it has a scale for no tensor of {where}", where=path, cure="give that of this model"
        )
    if missing := sorted(set(wanted) - found.keys()):
        note(f"{path.name} has no scale for these, so they stay in floating point: {', '.join(missing)}")
    return found


def read_ranges(path: Path) -> dict[str, TensorRange]:
    """The range of each tensor in a file; raises `DataError` with the line or name that cannot be read."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise DataError("this is no file", where=path, cure=_CURE)
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"it is larger than {_MOST_BYTES >> 20} MiB", where=path, cure=_CURE)
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror}", where=path, cure="check the path") from None
    try:
        caches = (read(data) for read in hooks.readers("ranges"))
        cache = next((found for found in caches if found is not None), None)
        return (
            _of_json(data) if cache is None else {name: _symmetric(*found) for name, found in cache.items()}
        )
    except ValueError as error:
        raise DataError(f"the scales cannot be read: {error}", where=path, cure=_CURE) from None


def _of_json(data: bytes) -> dict[str, TensorRange]:
    told = parse_json(data)
    if not isinstance(told, dict):
        raise ValueError("it is no table of tensors")
    return {name: _range(value, f"'{name:.60}'") for name, value in told.items()}


def _range(value: object, where: str) -> TensorRange:
    if isinstance(value, list) and len(value) == 2:
        low, high = (_number(one, where) for one in value)
        if low > high:
            raise ValueError(f"{where}: {low:g} is above {high:g}")
        return TensorRange(low, high)
    return _symmetric(_number(value, where), where)


def _symmetric(largest: float, where: str) -> TensorRange:
    if not (math.isfinite(largest) and largest >= 0):
        raise ValueError(f"{where}: {largest:g} is no largest magnitude")
    return TensorRange(-largest, largest)


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: {value!r:.30} is no number")
    return float(value)
