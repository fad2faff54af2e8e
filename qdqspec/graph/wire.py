"""Reads and builds models in protobuf's wire format, as far as ONNX needs it.

A protobuf message is a sequence of its fields, and a repeated field is one field per element. So a model can
be joined from bytes that were serialized before, at the cost of copying them, and its weights can be written
one by one, without a copy of all of them in memory. Source: protobuf.dev, "Encoding".

ONNX lets a tensor refer to a byte range of a file beside the model. That file may be the model itself, which
holds its weights at known positions: `read_light` reads a model of any size as its graph, and its weights are read on
demand, by any code that supports external data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from qdqspec.graph.protos import Message, copy_fields, is_external, refer, tensors_in_nodes
from qdqspec.graph.weights import bare, external_blocks, external_length

_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
NODE = onnx.GraphProto.NODE_FIELD_NUMBER
INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
INPUT = onnx.GraphProto.INPUT_FIELD_NUMBER
_RAW_DATA = TensorProto.RAW_DATA_FIELD_NUMBER
_NODE_INPUT = onnx.NodeProto.INPUT_FIELD_NUMBER
LAST = 2**29 - 1  # the highest possible field number

Piece: TypeAlias = bytes | TensorProto  # whole fields of a graph in serialized form, or one initializer

_AT_ONCE = 1024  # pieces joined at a time: their memory is reused, while joining all would allocate new pages


def varint(number: int) -> bytes:
    """A number in base 128, the lowest seven bits first."""
    if number < 128:
        return b"%c" % number
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


@lru_cache(maxsize=10_000)
def head(number: int, size: int) -> bytes:
    """The header of a string or message of ``size`` bytes in field ``number``."""
    return varint(number << 3 | 2) + varint(size)


def wire_field(number: int, content: bytes) -> bytes:
    """A string or message as field ``number``."""
    return head(number, len(content)) + content


def serialized(number: int, message: Message | onnx.NodeProto | TensorProto | onnx.ValueInfoProto) -> bytes:
    """A message as field ``number``."""
    return wire_field(number, message.SerializeToString(deterministic=True))


def fields_between(message: Message, first: int, last: int) -> bytes:
    """The fields of a message whose numbers are from ``first`` to ``last``."""
    part = type(message)()
    others = {f.name for f in message.DESCRIPTOR.fields if not first <= f.number <= last}
    copy_fields(message, part, but=others)
    return bytes(part.SerializeToString(deterministic=True))


def node_fields(node: onnx.NodeProto) -> list[bytes]:
    """A node as field of its graph: the header, its inputs, a place for another one, and the rest."""
    inputs = [node_input(name) for name in node.input]
    whole = node.SerializeToString(deterministic=True)
    return [head(NODE, len(whole)), *inputs, b"", whole[sum(map(len, inputs)) :]]


def node_input(name: str) -> bytes:
    """One input of a node."""
    return wire_field(_NODE_INPUT, name.encode())


@dataclass(frozen=True, slots=True)
class PieceRun:
    """A sequence of pieces of a graph: their indexes in a list that many models share, and their total bytes.

    No piece is accessed before it is written.
    """

    stock: Sequence[Piece]
    order: npt.NDArray[np.int64]
    size_bytes: int

    def chunks(self) -> Iterator[bytes]:
        """Joined pieces, some at a time."""
        for start in range(0, len(self.order), _AT_ONCE):
            some = self.order[start : start + _AT_ONCE].tolist()
            yield b"".join(map(self.stock.__getitem__, some))


@dataclass(frozen=True, slots=True)
class Parts:
    """A model in the order of its file: the bytes before its graph, the graph, and the bytes after it.

    ``apart`` is whether each tensor with external data is a separate piece.
    """

    before: bytes
    graph: tuple[Piece | PieceRun, ...]
    after: bytes
    apart: bool = False

    def proto(self) -> onnx.ModelProto:
        """The model that the bytes encode."""
        model = onnx.ModelProto()
        model.MergeFromString(self.before)
        model.graph.SetInParent()
        for piece in self.graph:
            if isinstance(piece, TensorProto):
                model.graph.initializer.append(piece)
            else:
                model.graph.MergeFromString(b"".join(_chunks(piece)))
        model.MergeFromString(self.after)
        return model

    def tensors(self) -> Iterator[TensorProto]:
        """The initializers that are separate pieces."""
        return (piece for piece in self.graph if isinstance(piece, TensorProto))

    def chunks(self, base: Path | None = None) -> Iterator[bytes]:
        """The file, some pieces at a time. With ``base``, external data in that folder is included, block by block."""
        yield self.before + head(_GRAPH, sum(_size(piece, base) for piece in self.graph))
        for piece in self.graph:
            yield from _chunks(piece, base)
        yield self.after


def _chunks(piece: Piece | PieceRun, base: Path | None = None) -> Iterator[bytes]:
    if isinstance(piece, PieceRun):
        yield from piece.chunks()
    elif isinstance(piece, bytes):
        yield piece
    elif base is None or not is_external(piece):
        yield serialized(INITIALIZER, piece)
    else:
        first, last = _around_data(piece)
        yield head(INITIALIZER, len(first) + external_length(piece) + len(last)) + first
        yield from external_blocks(piece, base)
        yield last


def _size(piece: Piece | PieceRun, base: Path | None) -> int:
    if isinstance(piece, PieceRun):
        return piece.size_bytes
    if isinstance(piece, bytes):
        return len(piece)
    size: int = piece.ByteSize()
    if base is not None and is_external(piece):
        size = sum(map(len, _around_data(piece))) + external_length(piece)
    return len(head(INITIALIZER, size)) + size


def _around_data(tensor: TensorProto) -> tuple[bytes, bytes]:
    """The fields of a tensor before and after the bytes of its external data, where these are included."""
    own = bare(tensor)
    first = fields_between(own, 0, _RAW_DATA - 1) + head(_RAW_DATA, external_length(tensor))
    return first, fields_between(own, _RAW_DATA + 1, LAST)


def parts_of(proto: onnx.ModelProto, initializers: Iterable[TensorProto] | None = None) -> Parts:
    """A model in parts; no weight is copied. Other ``initializers`` than its own may be given."""
    before, after = around_graph(proto)
    tensors = proto.graph.initializer if initializers is None else initializers
    nodes = [serialized(NODE, node) for node in proto.graph.node]
    first = b"".join([*nodes, fields_between(proto.graph, NODE + 1, INITIALIZER - 1)])
    last = fields_between(proto.graph, INITIALIZER + 1, LAST)
    inner = tensors_in_nodes(proto.graph.node)
    return Parts(before, (first, *tensors, last), after, apart=not any(map(is_external, inner)))


def around_graph(proto: onnx.ModelProto) -> tuple[bytes, bytes]:
    """The fields of a model before its graph, and those after it."""
    return fields_between(proto, 0, _GRAPH - 1), fields_between(proto, _GRAPH + 1, LAST)


LARGE = 64 * 2**20  # bytes of a model file from which its weights stay on disk
_WEIGHT = 2**16  # bytes of an initializer from which it stays on disk


class _Field(NamedTuple):
    """One field: its number, its start, the start of its content, and its end."""

    number: int
    start: int
    content: int
    end: int


def read_light(path: Path) -> onnx.ModelProto:
    """A model whose large initializers, if they are raw bytes, refer to ``path`` itself.

    Raises `ValueError` if the bytes are not a message, and protobuf's error if they are not a model.
    """
    proto = onnx.ModelProto()
    with path.open("rb") as file:
        for field in _fields(file, 0, path.stat().st_size):
            if field.number == _GRAPH:
                _read_graph(file, field, proto.graph)
            else:
                proto.MergeFromString(_bytes(file, field.start, field.end))
    return proto


def _read_graph(file: BinaryIO, field: _Field, graph: onnx.GraphProto) -> None:
    graph.SetInParent()
    begin = field.content  # start of the fields skipped and not yet read
    for inner in _fields(file, field.content, field.end):
        if inner.number == INITIALIZER and inner.end - inner.content >= _WEIGHT:
            graph.MergeFromString(_bytes(file, begin, inner.start))
            graph.initializer.append(_tensor(file, inner))
            begin = inner.end
    graph.MergeFromString(_bytes(file, begin, field.end))


def _tensor(file: BinaryIO, field: _Field) -> TensorProto:
    tensor, data = TensorProto(), None
    for inner in _fields(file, field.content, field.end):
        if inner.number == _RAW_DATA and inner.end - inner.content >= _WEIGHT:
            data = inner
        else:
            tensor.MergeFromString(_bytes(file, inner.start, inner.end))
    if data is not None:
        refer(tensor, Path(file.name).name, data.content, data.end - data.content)
    return tensor


def _fields(file: BinaryIO, start: int, end: int) -> Iterator[_Field]:
    """The fields between two positions of a file. Only their headers are read."""
    while start < end:
        file.seek(start)
        window = file.read(min(24, end - start))  # a tag and a length have at most ten bytes each
        tag, at = _varint(window, 0)
        number, kind = tag >> 3, tag & 7
        if kind == 2:
            size, at = _varint(window, at)
        elif kind == 0:
            size = _varint(window, at)[1] - at
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {start}")
        content = start + at
        if content + size > end:
            raise ValueError(f"field {number} at byte {start} ends behind its message")
        yield _Field(number, start, content, content + size)
        start = content + size


def _varint(window: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(at, min(at + 10, len(window))):
        value |= (window[place] & 127) << shift
        if window[place] < 128:
            return value, place + 1
        shift += 7
    raise ValueError("a number that does not end")


def _bytes(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
