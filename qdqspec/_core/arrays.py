"""Arrays that modules exchange: types, declared shapes, reductions to fewer values, frames between processes.

A frame is the length of a header (4 bytes, little-endian), the header in JSON, and the raw bytes of the arrays in the
order of its ``arrays``. Pickle is not used: a broken or hostile child can at worst cause a wrong array or a rejected
frame, never run code.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.errors import BackendError

Array: TypeAlias = npt.NDArray[np.generic]
Floats: TypeAlias = npt.NDArray[np.float64]
Floats32: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, ...]
Feed: TypeAlias = Mapping[str, Array]  # by input
Reduction: TypeAlias = Literal["extremes", "spaced"]

MOST_SPACED = 1 << 17  # values of one tensor in one sample that a histogram counts
LOST_SHARE = 1 / 512  # of the largest magnitude: smaller values round to zero in 8 bits


def as_real(values: Array) -> Array:
    """Values of type bfloat16, which numpy lacks, converted to float32 (exact); others unchanged."""
    return values.astype(np.float32) if values.dtype.name == "bfloat16" else values


def extremes(values: Array) -> Array:
    """The smallest and the largest value; NaN twice if one is NaN; nothing of an empty array.

    A third value follows if some values are below a quarter of the largest magnitude: one of at least `LOST_SHARE` of
    the largest magnitude, or else the largest of them. It shows whether a mask is far beyond all other values.
    """
    if not values.size:
        return values
    low, high, flat = values.min(), values.max(), values.reshape(-1)
    largest = max(-float(low), float(high))
    inner: Array = flat[:0]
    for some in (evenly_spaced(values, 4096), flat):  # a few first
        rest = some[np.abs(some) < largest / 4]
        inner = rest[np.abs(rest).argmax() :][:1] if rest.size else rest
        if (np.abs(inner) >= LOST_SHARE * largest).any():
            break
    return np.array([low, high, *inner], values.dtype)


def evenly_spaced(values: Array, most: int = MOST_SPACED) -> Array:
    """At most ``most`` values at equal distances that share no factor with a dimension: from all channels and rows."""
    step = max(1, -(-values.size // most))
    while any(math.gcd(step, dim) > 1 for dim in values.shape):
        step += 1
    return values.reshape(-1)[::step]


REDUCTIONS: Mapping[Reduction, Callable[[Array], Array]] = {"extremes": extremes, "spaced": evenly_spaced}


def allows(declared: Sequence[int | None], shape: Sequence[int | None]) -> bool:
    """Whether a shape agrees with a declaration, in which ``None`` is any size."""
    return len(declared) == len(shape) and all(d in (None, s) for d, s in zip(declared, shape, strict=True))


def shape_text(declared: Sequence[int | None]) -> str:
    """``[1, ?, 3]``: a question mark for each unknown size."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in declared) + "]"


def is_faithful(given: Array, cast: Array) -> bool:
    """Whether the cast is valid: floats may be rounded and be infinite, not overflow; others keep their value."""
    if np.issubdtype(cast.dtype, np.integer) or cast.dtype == np.bool_:
        return bool((given == cast).all())
    return bool((np.isfinite(cast) | np.isinf(given)).all())


# ---- frames --------------------------------------------------------------------------------------

Header: TypeAlias = dict[str, Any]

_LENGTH = struct.Struct("<I")
_HEADER_LIMIT = 64 << 20  # bytes; a longer header is not a valid message


class WireClosedError(Exception):
    """The connection is closed: the other process ended, or closed it."""


class FrameStream:
    """Whole frames over one connected socket. ``timeout`` is in seconds for the whole frame; ``None`` waits forever."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(
        self, header: Header, arrays: Mapping[str, Array] | None = None, timeout: float | None = None
    ) -> None:
        """Send one frame. Raises `WireClosedError`, `TimeoutError`, or `BackendError` for an unsupported dtype."""
        arrays = arrays or {}
        for name, array in arrays.items():
            if not is_transferable(array):
                raise BackendError(
                    f"tensor '{name}' holds {array.dtype.name} values, and only numbers and booleans can be sent to an "
                    "engine",
                    cure="feed numeric tensors, or cut the text part off the model",
                )
        shapes = [[name, array.dtype.name, array.shape] for name, array in arrays.items()]
        text = json.dumps({**header, "arrays": shapes}).encode()
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(_LENGTH.pack(len(text)) + text)
            for array in arrays.values():
                if array.size:
                    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
                    self._socket.sendall(native.reshape(-1).view(np.uint8).data)
        except (ConnectionError, BrokenPipeError) as error:
            raise WireClosedError from error

    def receive(self, timeout: float | None = None) -> tuple[Header, dict[str, Array]]:
        """Wait for one frame. Raises `WireClosedError` or `TimeoutError`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > _HEADER_LIMIT:
            raise WireClosedError(f"a header of {length} bytes")
        try:
            header = json.loads(bytes(self._exactly(length, deadline)))
        except ValueError as error:
            raise WireClosedError("a garbled header") from error
        arrays = {}
        for name, dtype_name, shape in header["arrays"]:
            try:
                dtype: np.dtype[np.generic] = np.dtype(dtype_name)
            except TypeError:
                import ml_dtypes  # bfloat16, float8 and int4, which numpy does not define itself

                dtype = np.dtype(getattr(ml_dtypes, dtype_name))
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(self._exactly(size, deadline), dtype=dtype).reshape(shape)
        return header, arrays

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _exactly(self, size: int, deadline: float | None) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            self._socket.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            try:
                count = self._socket.recv_into(view)
            except ConnectionError as error:
                raise WireClosedError from error
            if not count:
                raise WireClosedError
            view = view[count:]
        return buffer


def is_transferable(value: object) -> bool:
    """Whether a value is a tensor of numbers. Text, sequences and maps are not transferred."""
    if not isinstance(value, np.ndarray | np.generic):
        return False
    kind, module = value.dtype.kind, value.dtype.type.__module__
    return kind in "biufc" or (kind == "V" and module == "ml_dtypes")
