"""Model files: read without their weights, written atomically, and a file of weights that many models refer to.

A search writes dozens of candidates of one model. Their weights are in one file beside them, as ONNX external data, so
that a candidate takes a few kilobytes. ONNX also lets a tensor refer to bytes of the model file itself: `read_light`
reads a model of any size as its graph, and its weights are read on demand, by any code that supports external data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

from qdqspec._core.arrays import Array
from qdqspec._core.files import PartialFolder, explained, refuse_overwriting, require_space, unwritable
from qdqspec.errors import ModelError
from qdqspec.graph.protos import copy_model, is_external, map_tensors, size_of, tensors

INLINE_LIMIT = 1_900_000_000  # bytes of a model: protobuf is limited to 2 GiB
LARGEST = 2**31  # bytes of a model file that protobuf reads
LARGE = 64 * 2**20  # bytes of a model file from which its weights stay on disk
WEIGHTS = "weights.bin"  # default name of a file of weights
_ALIGNMENT = 64  # bytes: a cache line, and wide enough for any vector load from a memory map
_LEFT_IN_FILE = 2**16  # bytes of an initializer from which `read_light` leaves it in the file

# Shape inference reads shapes and axes, and that of a runtime may fail if these are external data ("Cannot parse
# data from external tensors"). They are 32 or 64 bits wide, and weights never are.
_INLINE = frozenset({TensorProto.STRING, TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})


def save_model(
    model: onnx.ModelProto,
    path: Path,
    *,
    inputs: Sequence[Path] = (),
    base: Path | None = None,
    limit_bytes: int = INLINE_LIMIT,
) -> None:
    """Write a model atomically.

    ``inputs`` are files of the user that must not be overwritten. With ``base``, external data is read from
    that folder and included; without it, references are kept. A model of ``limit_bytes`` or more
    keeps its weights in ``<name>.data`` beside it. Raises `OutputError` if it cannot be written.
    """
    path = Path(path).absolute()
    data = path.with_name(path.name + ".data")
    refuse_overwriting(path, inputs)
    outside = [t for t in tensors(model) if is_external(t)] if base is not None else []
    # tensor by tensor: protobuf computes no size above 2 GiB
    size = sum(map(external_length, outside)) + sum(tensor.ByteSize() for tensor in tensors(model))
    is_large = size >= limit_bytes
    if is_large:
        entries = (entry for tensor in outside for entry in tensor.external_data)
        names = {entry.value for entry in entries if entry.key == "location"}
        refuse_overwriting(data, (*inputs, *((base or Path()) / name for name in sorted(names))))
    require_space(path)
    with explained("the file", path), PartialFolder(path.parent) as folder:
        if is_large:
            store = WeightStore(folder, base=base, file_name=data.name)
            model = map_tensors(
                model, lambda t: t if base is None and is_external(t) else store.externalize(t)
            )
        elif outside:
            model = map_tensors(model, lambda t: with_own_bytes(t, base))
        with (folder / path.name).open("wb") as file:
            file.write(model.SerializeToString(deterministic=True))
        if (folder / data.name).exists():
            # An old model must never be read with new weights: for a moment no model exists.
            path.unlink(missing_ok=True)
            (folder / data.name).replace(data)
        (folder / path.name).replace(path)


# ---- weights beside a model ----------------------------------------------------------------------


class WeightStore:
    """A file of tensor bytes in ``folder`` that models saved there refer to. It only grows.

    Equal bytes of one type are stored once: TensorRT's parser refuses tensors of two types in one place. A file of
    an earlier run is kept, since models may refer to it, and bytes at its beginning that equal those to write are
    not written again. ``base`` is the folder that external data of the tensors given is relative to. Only one
    writer at a time.
    """

    def __init__(
        self, folder: Path, *, base: Path | None = None, threshold_bytes: int = 1024, file_name: str = WEIGHTS
    ) -> None:
        self.path = folder / file_name
        self._base = base
        self._threshold = threshold_bytes
        self._places: dict[tuple[int, bytes], int] = {}  # offsets by type and digest of the bytes
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
        key = tensor.data_type, hashlib.blake2b(data, digest_size=20).digest()
        if key not in self._places:
            try:
                with self.path.open("r+b") as file:
                    file.seek(self._cursor)
                    if file.read(len(data)) != data:
                        self._cursor = _align(file.seek(0, 2))
                        file.seek(self._cursor)
                        file.write(data)
            except OSError as error:
                raise unwritable("the weights' file", self.path, error) from None
            self._places[key] = self._cursor
            self._cursor = _align(self._cursor + len(data))
        return _refer(_bare(tensor), self.path.name, self._places[key], len(data))


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


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


def _refer(tensor: TensorProto, location: str, offset: int, length: int) -> TensorProto:
    """Let a tensor without values refer to bytes of a file; returns the tensor."""
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


# ---- a model without its weights -----------------------------------------------------------------


def read_light(path: Path) -> onnx.ModelProto:
    """A model whose large initializers, if they are raw bytes, refer to ``path`` itself.

    All weights are in memory until this returns.
    """
    whole = onnx.load(str(path), load_external_data=False)
    light = copy_model(whole, but={"initializer"})
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        end = 0
        for tensor in whole.graph.initializer:
            values = b"" if is_external(tensor) else tensor.raw_data
            if len(values) >= _LEFT_IN_FILE and (start := data.find(values, end)) >= 0:
                end = start + len(values)
                tensor = _refer(_bare(tensor), path.name, start, len(values))
            light.graph.initializer.append(tensor)
    return light
