"""Protocol frames between qdqspec and its worker processes: a JSON header, then the raw bytes of arrays.

A frame is the length of the header (4 bytes, little-endian), the header, and the arrays in the order of its ``arrays``.

Pickle is not used: a broken or hostile child can at worst cause a wrong array or a rejected frame, never run code.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec.errors import BackendError

Header: TypeAlias = dict[str, Any]

_LENGTH = struct.Struct("<I")
_NUMERIC_KINDS = "biufc"
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
        shapes = [[name, _name(array.dtype), array.shape] for name, array in arrays.items()]
        text = json.dumps({**header, "arrays": shapes}).encode()
        self._socket.settimeout(timeout)
        try:
            parts = (_bytes_of(array) for array in arrays.values() if array.size)
            self._socket.sendall(_LENGTH.pack(len(text)) + text)
            for part in parts:
                self._socket.sendall(part)
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
            dtype = _dtype(dtype_name)
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
    return kind in _NUMERIC_KINDS or (kind == "V" and module == "ml_dtypes")


@cache
def _name(dtype: np.dtype[np.generic]) -> str:
    """The name of a dtype in a frame: ``float32``, ``bfloat16``. Numpy composes it anew at each access."""
    return dtype.name


def _dtype(name: str) -> np.dtype[np.generic]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16, float8 and int4, which numpy does not define itself

        dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def _bytes_of(array: Array) -> memoryview:
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    return native.reshape(-1).view(np.uint8).data
