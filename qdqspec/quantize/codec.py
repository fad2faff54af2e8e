"""Arrays as text: bytes in the order of memory, compressed with zlib, in base64."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import numpy.typing as npt


def packed(values: npt.NDArray[np.generic]) -> str:
    """The values as text."""
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode("ascii")


def unpacked(text: str, dtype: np.dtype[np.generic], size: int) -> npt.NDArray[np.generic]:
    """The ``size`` values of a text of `packed`; raises `ValueError` if it is damaged or holds another number."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), size * dtype.itemsize + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) != size * dtype.itemsize or not unpacker.eof:
        raise ValueError(f"the text does not hold {size} values")
    return np.frombuffer(data, dtype)
