"""A file of weights, written once, that many model files refer to.

A search writes dozens of candidates of one model. Their weights are in one file beside them, as ONNX external
data, so that a candidate takes a few kilobytes, independent of the size of the weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

from qdqspec._core.arrays import Array
from qdqspec._core.files import unwritable
from qdqspec.errors import ModelError
from qdqspec.graph.protos import is_external, refer, size_of

# Shape inference reads shapes and axes, and that of a runtime may fail if these are external data ("Cannot parse
# data from external tensors"). They are 32 or 64 bits wide, and weights never are.
_INLINE = frozenset({TensorProto.STRING, TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})

WEIGHTS = "weights.bin"  # default name of the file
_ALIGNMENT = 64  # bytes: a cache line, and wide enough for any vector load from a memory map


class WeightStore:
    """A file of tensor bytes in ``folder`` that models saved there refer to. It only grows.

    Equal bytes are stored once. A file of an earlier run is kept, since models may refer to it, and bytes at
    its beginning that equal those to write are not written again. ``base`` is the folder that external data
    of the tensors given is relative to. Only one writer at a time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        base: Path | None = None,
        threshold_bytes: int = 1024,
        file_name: str = WEIGHTS,
    ) -> None:
        self.path = folder / file_name
        self._base = base
        self._threshold = threshold_bytes
        self._places: dict[bytes, int] = {}  # offsets by digest of the bytes
        self._cursor = 0
        try:
            self.path.touch()
        except OSError as error:
            raise unwritable("the weights' file", self.path, error) from None

    def externalize(self, tensor: TensorProto) -> TensorProto:
        """The same tensor with its bytes in the file; small ones and those of shape types are returned inline.

        External data elsewhere is copied. Raises `OutputError` if it cannot be written.
        """
        if tensor.data_type in _INLINE or size_of(tensor) < self._threshold:
            return with_own_bytes(tensor, self._base)
        data = tensor_bytes(tensor, self._base)
        digest = hashlib.blake2b(data, digest_size=20).digest()
        if digest not in self._places:
            try:
                self._places[digest] = self._write(data)
            except OSError as error:
                raise unwritable("the weights' file", self.path, error) from None
        return refer(_bare(tensor), self.path.name, self._places[digest], len(data))

    def _write(self, data: bytes) -> int:
        with self.path.open("r+b") as file:
            file.seek(self._cursor)
            if file.read(len(data)) != data:
                self._cursor = _align(file.seek(0, 2))
                file.seek(self._cursor)
                file.write(data)
        offset, self._cursor = self._cursor, _align(self._cursor + len(data))
        return offset


def tensor_bytes(tensor: TensorProto, base: Path | None = None) -> bytes:
    """A tensor's elements in ONNX's raw format; external ones are read from the folder ``base``."""
    if is_external(tensor):
        return _external_bytes(tensor, base)
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def with_own_bytes(tensor: TensorProto, base: Path | None) -> TensorProto:
    """The same tensor with its bytes included; external ones are read from the folder ``base``."""
    if not is_external(tensor):
        return tensor
    own = _bare(tensor)
    own.raw_data = _external_bytes(tensor, base)
    return own


def array_of(tensor: TensorProto, base: Path | None) -> Array:
    """A tensor's value, which must not be changed; external data is read from the folder ``base``, without copies."""
    if is_external(tensor):
        kind = tensor_dtype_to_np_dtype(tensor.data_type)
        if kind.isbuiltin == 1:  # numpy's own types; others may have several elements in a byte
            return np.frombuffer(_external_bytes(tensor, base), kind).reshape(tensor.dims)
    return numpy_helper.to_array(with_own_bytes(tensor, base))


def external_length(tensor: TensorProto) -> int:
    """The number of bytes of a tensor's external data."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return int(entries["length"]) if "length" in entries else size_of(tensor)


def _external_bytes(tensor: TensorProto, base: Path | None) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path, length = (base or Path()) / entries["location"], external_length(tensor)
    try:
        with path.open("rb") as file:
            file.seek(int(entries.get("offset", 0)))
            found: bytes = file.read(length)
    except OSError as error:
        raise ModelError(
            f"the external data of tensor '{tensor.name}' cannot be read: {error.strerror}",
            where=path,
            cure="put the file back beside its model",
        ) from None
    if len(found) < length:
        raise ModelError(
            f"the external data of tensor '{tensor.name}' ends after {len(found)} of {length} bytes",
            where=path,
            cure="copy the file again",
        )
    return found


def _bare(tensor: TensorProto) -> TensorProto:
    """The tensor without its values."""
    found = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    if tensor.HasField("doc_string"):
        found.doc_string = tensor.doc_string
    found.metadata_props.extend(tensor.metadata_props)
    return found


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
