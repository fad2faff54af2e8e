"""Reads model files field by field, in protobuf's wire format, as far as ONNX needs it.

A protobuf message is a sequence of its fields, and a repeated field is one field per element. Source: protobuf.dev,
"Encoding".

ONNX lets a tensor refer to a byte range of a file beside the model. That file may be the model itself, which
holds its weights at known positions: `read_light` reads a model of any size as its graph, and its weights are read on
demand, by any code that supports external data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import onnx
from onnx import TensorProto

from qdqspec.graph.protos import refer

_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW_DATA = TensorProto.RAW_DATA_FIELD_NUMBER
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
