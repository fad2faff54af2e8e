"""Validates a model file before other modules rely on it.

The model's own statements are verified: names must be text, external data must be beside it and as long as
declared, and local functions must not expand to an unreasonable size. Then ONNX's own checker runs. It comes
last because it, and shape inference after it, follow calls of functions by recursion in native code.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, shape_inference

from qdqspec.errors import ModelError
from qdqspec.graph.protos import (
    DEFAULT_DOMAINS,
    all_graphs,
    graphs_inside,
    is_external,
    map_tensors,
    names_read_inside,
    opset_of,
    refill,
    tensors,
    without_weights,
)

MOST_CALLS = 1_000_000  # nodes to which all calls of local functions may expand
DEEPEST_CALLS = 100  # nesting depth of function calls

# Bits of an element, by name, for types that numpy stores in one byte each.
_NARROW = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
# Operators that ONNX Runtime also has in the default domain, in operator sets in which ONNX has none of that name. Its
# optimizer writes them.
_OF_RUNTIME = ("LayerNormalization", "SimplifiedLayerNormalization")
_RUNTIME_DOMAIN = "com.microsoft"
_AGAIN = "export the model again"
_UNTYPED = re.compile(r"instead is null|(?:inferred|declared)=0\b")  # by protobuf's number of no type
_INLINE = "export the model without local functions, or with fewer"


def sort_nodes(proto: onnx.ModelProto, path: Path) -> bool:
    """Move each node behind the nodes whose outputs it or its bodies read, as ONNX requires; whether any was moved.

    ONNX Runtime loads models in another order, and tools write them. Raises `ModelError` for a cycle.
    """
    inside = (body for function in proto.functions for node in function.node for body in graphs_inside(node))
    graphs = [*all_graphs(proto.graph), *(graph for body in inside for graph in all_graphs(body))]
    was_moved = False
    for holder in reversed((*proto.functions, *graphs)):  # the bodies of a node before the node
        nodes = holder.node[:]
        makers = {
            name: number for number, node in reversed([*enumerate(nodes)]) for name in node.output if name
        }
        read = ((*node.input, *names_read_inside(node)) for node in nodes)
        reads = [{makers[name] for name in names if name in makers} for names in read]
        if all(max(makers_read, default=-1) < number for number, makers_read in enumerate(reads)):
            continue
        try:
            order = [*TopologicalSorter(dict(enumerate(reads))).static_order()]
        except CycleError as error:
            names = [nodes[number].name or nodes[number].op_type for number in error.args[1][:5]]
            what = (
                f"the model is not valid ONNX: nodes need their own results: {' > '.join(map(repr, names))}"
            )
            raise ModelError(
                what, where=path, cure="remove this cycle, or make it the body of a Loop"
            ) from None
        refill(holder.node, [nodes[number] for number in order])
        was_moved = True
    return was_moved


def check_model(proto: onnx.ModelProto, path: Path) -> None:
    """Raise `ModelError` naming the file and the first problem of the model."""
    if not proto.graph.node:
        raise ModelError("the model has no nodes", where=path, cure=_AGAIN)
    # protobuf returns names that are not UTF-8 as bytes
    bad = next((text for text in _list_texts(proto) if not isinstance(text, str)), None)
    if bad is not None:
        raise ModelError(f"a name in the model is not text: {bad!r:.60}", where=path, cure=_AGAIN)
    _check_calls(proto, path)
    for tensor in tensors(proto):
        _check_type(tensor, path)
        if is_external(tensor):
            _check_data(tensor, path)
        elif tensor.HasField("raw_data"):
            _check_length(len(tensor.raw_data), tensor, path)
    # The checker sees a copy: it would read weights whose length is already verified, and it rejects outputs without a
    # declared shape and a runtime's operators, which runtimes accept and exporters write.
    checked = map_tensors(proto, lambda tensor: _without_data(tensor) if is_external(tensor) else tensor)
    for end in (*checked.graph.input, *checked.graph.output):
        if end.type.HasField("tensor_type"):
            end.type.tensor_type.shape.SetInParent()
    for node in (nodes := _runtime_nodes(checked)):
        node.domain = _RUNTIME_DOMAIN
    if nodes and all(imported.domain != _RUNTIME_DOMAIN for imported in checked.opset_import):
        checked.opset_import.add(domain=_RUNTIME_DOMAIN, version=1)
    try:
        onnx.checker.check_model(checked)
    except Exception as error:  # noqa: BLE001 - any C++ exception, also with messages that are not UTF-8
        raise _invalid(first_line(error), path) from None


def type_problem(proto: onnx.ModelProto) -> str:
    """The first problem in types and shapes that ONNX's checker finds beyond `check_model`; empty if there is none.

    It is the strict inference of ``onnx.checker.check_model(..., full_check=True)``, on a copy without big weights. It
    knows no types of results of operators that are not ONNX's: types that are missing behind these are no problem.
    """
    try:
        shape_inference.infer_shapes(without_weights(proto), check_type=True, strict_mode=True)
    except Exception as error:  # noqa: BLE001 - see `check_model`
        text = " ".join(str(error).split()) or type(error).__name__
        return "" if _UNTYPED.search(text) and _has_foreign_nodes(proto) else text
    return ""


def _has_foreign_nodes(proto: onnx.ModelProto) -> bool:
    """Whether the model has operators that are neither ONNX's nor functions of it."""
    known = {function.domain for function in proto.functions} | set(DEFAULT_DOMAINS)
    nodes = (node for graph in all_graphs(proto.graph) for node in graph.node)
    return any(
        node.domain not in known and not onnx.defs.has(node.op_type, domain=node.domain) for node in nodes
    )


def external_files(proto: onnx.ModelProto, path: Path) -> list[Path]:
    """The files beside a model that hold weights; each is verified to exist beside it."""
    files = {_place(tensor, path)[0] for tensor in tensors(proto) if is_external(tensor)}
    return sorted(files - {path})


def first_line(error: Exception) -> str:
    """The first line of a native exception's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _invalid(what: str, path: Path) -> ModelError:
    return ModelError(f"the model is not valid ONNX: {what}", where=path, cure=_AGAIN)


def _without_data(tensor: TensorProto) -> TensorProto:
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0], raw_data=b"")


def _runtime_nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of the default domain whose operator is not ONNX's in the model's operator set, but a runtime's."""
    names = {name for name in _OF_RUNTIME if not onnx.defs.has(name, opset_of(proto))}
    nodes = (node for graph in all_graphs(proto.graph) for node in graph.node) if names else ()
    return [node for node in nodes if node.op_type in names and node.domain in DEFAULT_DOMAINS]


def _list_texts(message: Any) -> Iterator[str]:
    """All texts in a message, without the values of tensors and attributes."""
    if isinstance(message, TensorProto):
        yield message.name
        yield from (text for entry in message.external_data for text in (entry.key, entry.value))
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            yield from value if field.is_repeated else (value,)
        elif field.type == field.TYPE_MESSAGE:
            for part in value if field.is_repeated else (value,):
                yield from _list_texts(part)


# ---- local functions -----------------------------------------------------------------------------


def _check_calls(proto: onnx.ModelProto, path: Path) -> None:
    """Limit the expansion of local functions: calling each other twice, thirty deep, gives 10**9 nodes."""
    called = {(f.domain, f.name): _calls(f.node) for f in proto.functions}
    sizes: dict[tuple[str, str], int] = {}
    depths: dict[tuple[str, str], int] = {}
    try:
        order = [*TopologicalSorter(called).static_order()]
    except CycleError:
        raise ModelError("its local functions call themselves", where=path, cure=_AGAIN) from None
    for name in order:
        sizes[name] = sum(sizes[inner] for inner in called.get(name, ())) if name in called else 1
        depths[name] = max((1 + depths[inner] for inner in called.get(name, ())), default=0)
    if max(depths.values(), default=0) > DEEPEST_CALLS:
        what = f"its local functions call each other more than {DEEPEST_CALLS} deep"
        raise ModelError(what, where=path, cure=_INLINE)
    total = sum(sizes.get(name, 1) for name in _calls(proto.graph.node)) if called else 0
    if total > MOST_CALLS:
        raise ModelError(f"its local functions expand to {total:,} nodes", where=path, cure=_INLINE)


def _calls(nodes: Collection[onnx.NodeProto]) -> list[tuple[str, str]]:
    """The functions that nodes call, including the nodes in their bodies."""
    graphs = (graph for node in nodes for body in graphs_inside(node) for graph in all_graphs(body))
    return [(node.domain, node.op_type) for node in chain(nodes, *(graph.node for graph in graphs))]


# ---- tensors -------------------------------------------------------------------------------------


def _check_type(tensor: TensorProto, path: Path) -> None:
    what = ""
    if tensor.data_type not in {*TensorProto.DataType.values()} - {TensorProto.UNDEFINED}:
        what = f"the unknown type {tensor.data_type}"
    elif tensor.data_type == TensorProto.STRING and is_external(tensor):
        what = "text in external data"
    elif any(dim < 0 for dim in tensor.dims):
        what = f"dimensions {list(tensor.dims)[:8]}"
    if what:
        raise _invalid(f"tensor '{tensor.name}' has {what}", path)


def _place(tensor: TensorProto, path: Path) -> tuple[Path, dict[str, str]]:
    """The file with a tensor's bytes, which is beside the model, and the other entries of its location."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = entries.get("location", "")
    file = path.parent / name
    try:
        # Large tensors of the model's own file are read from there too, and it may be a link to another folder.
        inside = name == path.name or file.resolve().is_relative_to(path.parent.resolve())
        is_file = inside and stat.S_ISREG(file.stat().st_mode)
    except FileNotFoundError:
        is_file = False
    except (OSError, ValueError, RuntimeError):  # too long, with a zero byte, or a cycle of links
        what = f"its external data {name!r:.60} is no name of a file"
        raise ModelError(what, where=path, cure=_AGAIN) from None
    if not inside:
        what = f"its external data '{name}' lies outside the model's folder"
        raise ModelError(what, where=path, cure="move it beside the model")
    if Path(name).is_absolute():
        what = f"its external data '{name}' is named by an absolute path, which runtimes refuse"
        cure = f"save the model again, with location '{file.resolve().relative_to(path.parent.resolve())}'"
        raise ModelError(what, where=path, cure=cure)
    if not is_file:
        raise ModelError(f"its external data '{name}' is missing", where=path, cure=f"put the file at {file}")
    return file, entries


def _check_data(tensor: TensorProto, path: Path) -> None:
    """Verify that a tensor's file has the bytes that its shape needs."""
    file, entries = _place(tensor, path)
    numbers: dict[str, int] = {}
    for key in entries.keys() & {"offset", "length"}:
        text = entries[key]
        if not (text.isascii() and text.isdecimal() and len(text) <= 18):
            raise _invalid(f"the {key} of tensor '{tensor.name}' is {text!r:.40}", path)
        numbers[key] = int(text)
    if "length" in numbers:
        _check_length(numbers["length"], tensor, path)
    offset, needed = numbers.get("offset", 0), _needed(tensor)
    if offset + needed > file.stat().st_size:
        raise ModelError(
            f"the external data of tensor '{tensor.name}' ends before its {needed} bytes from {offset} on",
            where=file,
            cure="copy the file again",
        )


def _check_length(length: int, tensor: TensorProto, path: Path) -> None:
    if tensor.data_type != TensorProto.STRING and length != (needed := _needed(tensor)):
        raise _invalid(f"tensor '{tensor.name}' has {length} bytes, and its shape needs {needed}", path)


def _needed(tensor: TensorProto) -> int:
    """Bytes of a tensor; elements may be narrower than a byte."""
    bits = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * 8
    bits = _NARROW.get(TensorProto.DataType.Name(tensor.data_type), bits)
    return -(-int(prod(tensor.dims)) * bits // 8)
