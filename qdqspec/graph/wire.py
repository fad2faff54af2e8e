"""Reads and writes model files field by field, in protobuf's wire format, as far as ONNX needs it.

A protobuf message is a sequence of its fields, and a repeated field is one field per element. So weights
are written one by one, without a copy of all of them in memory, and bytes of two graphs in sequence are one graph with
the nodes of both. Source: protobuf.dev, "Encoding".

ONNX lets a tensor refer to a byte range of a file beside the model. That file may be the model itself, which
holds its weights at known positions: `read_light` reads a model of any size as its graph, and its weights are read on
demand, by any code that supports external data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import onnx
from onnx import TensorProto

from qdqspec.graph.protos import Message, copied, copy_fields, copy_model, is_external, refer
from qdqspec.graph.weights import bare, external_blocks, external_length

_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW_DATA = TensorProto.RAW_DATA_FIELD_NUMBER
_LAST = 2**29 - 1  # the highest possible field number


@dataclass(frozen=True)
class Parts:
    """A model in two parts: its last initializers, ``weights``, which several models can share, and the ``rest``."""

    rest: onnx.ModelProto
    weights: Sequence[TensorProto]

    @classmethod
    def of(cls, proto: onnx.ModelProto) -> Parts:
        """A model in parts; no weight is copied."""
        return cls(copy_model(proto, but={"initializer"}), list(proto.graph.initializer))

    def proto(self) -> onnx.ModelProto:
        """The model as one message, with copies of the weights."""
        model = copied(self.rest)
        model.graph.initializer.extend(self.weights)
        return model

    def size(self, base: Path | None = None) -> int:
        """The bytes of the graph. With ``base``, external data of the weights is included."""
        return len(self._graph) + sum(_measure_field(tensor, base) for tensor in self.weights)

    def chunks(self, base: Path | None = None) -> Iterator[bytes]:
        """The bytes of the model's file. With ``base``, external data in that folder is included, block by block."""
        last = _serialize_fields(self.rest.graph, _INITIALIZER + 1, _LAST)
        yield _serialize_fields(self.rest, 0, _GRAPH - 1) + _write_head(_GRAPH, self.size(base))
        yield self._graph[: len(self._graph) - len(last)]
        for tensor in self.weights:
            yield from _write_tensor(tensor, base)
        yield last + _serialize_fields(self.rest, _GRAPH + 1, _LAST)

    @cached_property
    def _graph(self) -> bytes:
        """The graph of the rest: of tens of thousands of nodes, its size takes as long as its bytes."""
        return bytes(self.rest.graph.SerializeToString(deterministic=True))


def _write_tensor(tensor: TensorProto, base: Path | None) -> Iterator[bytes]:
    """A tensor as field of a graph."""
    if base is None or not is_external(tensor):
        content = tensor.SerializeToString(deterministic=True)
        yield _write_head(_INITIALIZER, len(content)) + content
    else:
        first, last = _split_around_data(tensor)
        yield _write_head(_INITIALIZER, len(first) + external_length(tensor) + len(last)) + first
        yield from external_blocks(tensor, base)
        yield last


def _measure_field(tensor: TensorProto, base: Path | None) -> int:
    """The number of bytes of a tensor as field of a graph."""
    size: int = tensor.ByteSize()
    if base is not None and is_external(tensor):
        size = sum(map(len, _split_around_data(tensor))) + external_length(tensor)
    return len(_write_head(_INITIALIZER, size)) + size


def _split_around_data(tensor: TensorProto) -> tuple[bytes, bytes]:
    """The fields of a tensor before and after the bytes of its external data, where these are included."""
    own = bare(tensor)
    first = _serialize_fields(own, 0, _RAW_DATA - 1) + _write_head(_RAW_DATA, external_length(tensor))
    return first, _serialize_fields(own, _RAW_DATA + 1, _LAST)


def _serialize_fields(message: Message, first: int, last: int) -> bytes:
    """The fields of a message whose numbers are from ``first`` to ``last``."""
    part = type(message)()
    others = {f.name for f in message.DESCRIPTOR.fields if not first <= f.number <= last}
    copy_fields(message, part, but=others)
    return bytes(part.SerializeToString(deterministic=True))


@lru_cache(maxsize=10_000)
def _write_head(number: int, size: int) -> bytes:
    """The header of a string or message of ``size`` bytes in field ``number``."""
    return _encode(number << 3 | 2) + _encode(size)


def _encode(number: int) -> bytes:
    """A number in base 128, the lowest seven bits first."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


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
        for field in _read_fields(file, 0, path.stat().st_size):
            if field.number == _GRAPH:
                _read_graph(file, field, proto.graph)
            else:
                proto.MergeFromString(_read_bytes(file, field.start, field.end))
    return proto


def _read_graph(file: BinaryIO, field: _Field, graph: onnx.GraphProto) -> None:
    graph.SetInParent()
    begin = field.content  # start of the fields skipped and not yet read
    for inner in _read_fields(file, field.content, field.end):
        if inner.number == _INITIALIZER and inner.end - inner.content >= _WEIGHT:
            graph.MergeFromString(_read_bytes(file, begin, inner.start))
            graph.initializer.append(_read_tensor(file, inner))
            begin = inner.end
    graph.MergeFromString(_read_bytes(file, begin, field.end))


def _read_tensor(file: BinaryIO, field: _Field) -> TensorProto:
    tensor, data = TensorProto(), None
    for inner in _read_fields(file, field.content, field.end):
        if inner.number == _RAW_DATA and inner.end - inner.content >= _WEIGHT:
            data = inner
        else:
            tensor.MergeFromString(_read_bytes(file, inner.start, inner.end))
    if data is not None:
        refer(tensor, Path(file.name).name, data.content, data.end - data.content)
    return tensor


def _read_fields(file: BinaryIO, start: int, end: int) -> Iterator[_Field]:
    """The fields between two positions of a file. Only their headers are read."""
    while start < end:
        file.seek(start)
        window = file.read(min(24, end - start))  # a tag and a length have at most ten bytes each
        tag, at = _read_varint(window, 0)
        number, kind = tag >> 3, tag & 7
        if kind == 2:
            size, at = _read_varint(window, at)
        elif kind == 0:
            size = _read_varint(window, at)[1] - at
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {start}")
        content = start + at
        if content + size > end:
            raise ValueError(f"field {number} at byte {start} ends behind its message")
        yield _Field(number, start, content, content + size)
        start = content + size


def _read_varint(window: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(at, min(at + 10, len(window))):
        value |= (window[place] & 127) << shift
        if window[place] < 128:
            return value, place + 1
        shift += 7
    raise ValueError("a number that does not end")


def _read_bytes(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
