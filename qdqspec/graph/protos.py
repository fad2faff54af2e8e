"""Reads, changes and copies ONNX messages: models, graphs, nodes, tensors.

Protobuf offers only deep copies, and a deep copy of a model copies its weights. The copies made here share
nothing with their source but contain only the requested fields.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from math import prod
from typing import Any, TypeAlias, TypeVar, cast

import onnx
from onnx import TensorProto, external_data_helper

DEFAULT_DOMAINS = ("", "ai.onnx")  # of ONNX's own operators
CONTRIBUTED = "com.microsoft"  # the domain of operators that optimizers write
IR_WITH_FREE_INITIALIZERS = 4  # before, each initializer had to be a graph input as well

Message: TypeAlias = onnx.ModelProto | onnx.GraphProto
MessageT = TypeVar("MessageT", onnx.NodeProto, TensorProto, onnx.ModelProto, onnx.FunctionProto)
ValueT = TypeVar("ValueT")
_SMALL = 1024  # elements: constants that inference and adapters of operators may need (axes, shapes, bounds)
_TYPES = onnx.AttributeProto
# attributes of Constant: the field with the value, and its type
_CONSTANTS = {
    "value_float": ("f", TensorProto.FLOAT),
    "value_floats": ("floats", TensorProto.FLOAT),
    "value_int": ("i", TensorProto.INT64),
    "value_ints": ("ints", TensorProto.INT64),
}
# attributes that hold neither tensors nor graphs
_PLAIN = frozenset({_TYPES.INT, _TYPES.FLOAT, _TYPES.STRING, _TYPES.INTS, _TYPES.FLOATS, _TYPES.STRINGS})


def copy_fields(source: Message, target: Message, *, but: Iterable[str] = ()) -> None:
    """Write each set field of ``source``, except those named, into the empty message ``target``."""
    for field, value in source.ListFields():
        if field.name in but:
            continue
        if field.is_repeated:
            getattr(target, field.name).extend(value)
        elif field.message_type:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def copy_model(proto: onnx.ModelProto, *, but: Iterable[str] = ()) -> onnx.ModelProto:
    """A copy of a model whose graph lacks the fields named, such as ``initializer``."""
    made = onnx.ModelProto()
    copy_fields(proto, made, but={"graph"})
    made.graph.SetInParent()
    copy_fields(proto.graph, made.graph, but=but)
    return made


def without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model with big initializers turned into typed inputs: its weights take no memory."""
    light = copy_model(proto, but={"initializer"})
    declared = {given.name for given in proto.graph.input}
    for tensor in proto.graph.initializer:
        if prod(tensor.dims) <= _SMALL and not is_external(tensor):
            light.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            light.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return light


def opset_of(proto: onnx.ModelProto) -> int:
    """The version of the default operator set; 1 if none is imported, as in ONNX."""
    return max((int(o.version) for o in proto.opset_import if o.domain in DEFAULT_DOMAINS), default=1)


def free_initializers(proto: onnx.ModelProto) -> None:
    """Raise the IR version to at least 4, where initializers need not be graph inputs. Changes ``proto``.

    Inputs that have an initializer are removed then: from IR version 4 on, a caller may replace them, so that a runtime
    would no longer fold them or fuse the operators that read them.
    """
    if proto.ir_version < IR_WITH_FREE_INITIALIZERS:
        proto.ir_version = IR_WITH_FREE_INITIALIZERS
        constants = {tensor.name for tensor in proto.graph.initializer}
        refill(proto.graph.input, [i for i in proto.graph.input if i.name not in constants])


def copied(message: MessageT) -> MessageT:
    """A deep copy of a message: a node, a tensor or a model with its weights."""
    made = type(message)()
    made.CopyFrom(message)
    return made


def refill(field: Any, values: Iterable[object]) -> None:
    """Replace the content of a repeated field (protobuf's containers have no common public type)."""
    kept = list(values)
    del field[:]
    field.extend(kept)


def attribute_of(node: onnx.NodeProto, name: str, default: ValueT) -> ValueT:
    """The value of an attribute, which is of the type of its default, or the default."""
    for attribute in node.attribute[:]:  # a copy as a list: iterating over a protobuf field is slow
        if attribute.name == name:
            return cast("ValueT", onnx.helper.get_attribute_value(attribute))
    return default


def padded_inputs(node: onnx.NodeProto, count: int) -> tuple[str, ...]:
    """The first ``count`` inputs, with empty names for inputs that are omitted at the end."""
    return (*node.input, *[""] * count)[:count]


def trimmed_inputs(inputs: Iterable[str], least: int = 0) -> list[str]:
    """The inputs without those that are omitted at the end, at ``least`` so many."""
    kept = list(inputs)
    while len(kept) > least and not kept[-1]:
        kept.pop()
    return kept


def graphs_inside(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of a control-flow node."""
    for attribute in node.attribute[:]:  # see `attribute_of`
        if attribute.type not in _PLAIN:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def names_read_inside(node: onnx.NodeProto) -> set[str]:
    """Names that the bodies of a node read or return, including those made inside."""
    read: set[str] = set()
    for body in graphs_inside(node):
        for graph in all_graphs(body):
            read.update(name for inner in graph.node for name in inner.input if name)
            read.update(output.name for output in graph.output)
    return read


def numbered_name(first: str, taken: Container[str]) -> str:
    """The name, or if it is in ``taken`` with the first free number: ``x~1``."""
    variants = chain([first], (f"{first}~{number}" for number in count(1)))
    return next(name for name in variants if name not in taken)


def free_name(first: str, taken: set[str]) -> str:
    """The name of `numbered_name`, which is added to ``taken``."""
    name = numbered_name(first, taken)
    taken.add(name)
    return name


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Each name of a tensor or node of a graph, without those of its bodies."""
    ports = (*graph.input, *graph.initializer, *graph.output, *graph.value_info)
    inside = (name for node in graph.node for name in (node.name, *node.input, *node.output))
    return {*inside, *(named.name for named in ports)}


def rename_tensors(node: onnx.NodeProto, now: Callable[[str], str]) -> None:
    """Rename the tensors that a node reads and makes, and the outer tensors that its bodies read."""
    refill(node.input, map(now, node.input))
    refill(node.output, map(now, node.output))
    for body in graphs_inside(node):
        for graph in all_graphs(body):
            for inner in graph.node:
                refill(inner.input, map(now, inner.input))
            for output in graph.output:
                output.name = now(output.name)


def without_unread(
    proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], unread: Iterable[str], read: Iterable[str] = ()
) -> onnx.ModelProto:
    """A copy with these nodes, without makers of ``unread`` tensors that no node reads, and what only these need.

    Tensors that are ``read`` by others than nodes stay, as graph outputs do.
    """
    gone, needed = {*unread}, {*read, *(output.name for output in proto.graph.output)}
    kept = list[onnx.NodeProto]()
    for node in reversed(nodes):
        if gone.isdisjoint(node.output) or not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update((*node.input, *names_read_inside(node)))
        else:
            gone.update((*node.input, *node.output))
    gone -= needed
    smaller = copy_model(proto, but={"node", "initializer", "value_info"})
    smaller.graph.node.extend(reversed(kept))
    smaller.graph.initializer.extend(t for t in proto.graph.initializer if t.name not in gone)
    smaller.graph.value_info.extend(v for v in proto.graph.value_info if v.name not in gone)
    return smaller


def metadata(message: onnx.NodeProto | onnx.ModelProto, key: str) -> str | None:
    """A value in the metadata of a node or model; ``None`` if there is none."""
    return next((str(entry.value) for entry in message.metadata_props if entry.key == key), None)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """This graph and all bodies below it."""
    yield graph
    for node in graph.node:
        for body in graphs_inside(node):
            yield from all_graphs(body)


def values_of_constants(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, TensorProto]]:
    """The tensors that ``Constant`` nodes make, with their values; those of strings and sparse ones are left out."""
    for node in nodes:
        if node.op_type != "Constant" or node.domain not in DEFAULT_DOMAINS:
            continue
        for attribute in node.attribute:
            if attribute.name == "value":
                yield node.output[0], attribute.t
            elif attribute.name in _CONSTANTS:
                field, kind = _CONSTANTS[attribute.name]
                value = getattr(attribute, field)
                dims = [len(value)] if field.endswith("s") else []
                yield node.output[0], onnx.helper.make_tensor("", kind, dims, value if dims else [value])


def constants_of(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    """The initializers, and the outputs of Constant nodes."""
    return {t.name: t for t in graph.initializer} | dict(values_of_constants(graph.node))


def with_value(node: onnx.NodeProto, value: TensorProto) -> onnx.NodeProto:
    """A ``Constant`` node with this value instead."""
    changed = copied(node)
    if all(attribute.name != "value" for attribute in changed.attribute):
        refill(changed.attribute, [onnx.AttributeProto(name="value", type=_TYPES.TENSOR)])
    next(attribute for attribute in changed.attribute if attribute.name == "value").t.CopyFrom(value)
    return changed


def replace_values(graph: onnx.GraphProto, new: Mapping[str, TensorProto]) -> None:
    """Give initializers and ``Constant`` nodes these values, by the names of their tensors. Changes ``graph``."""
    for tensor in graph.initializer:
        if tensor.name in new:
            tensor.CopyFrom(new[tensor.name])
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] in new:
            node.CopyFrom(with_value(node, new[node.output[0]]))


def is_external(tensor: TensorProto) -> bool:
    """Whether the tensor's bytes are in a file beside the model."""
    return bool(external_data_helper.uses_external_data(tensor))


def tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    """All tensors of a model: initializers and attribute values, also in bodies and functions."""
    yield from proto.graph.initializer
    for holder in (proto.graph, *proto.functions):
        for node in holder.node:
            yield from _tensors_of(node)


def _tensors_of(node: onnx.NodeProto) -> Iterator[TensorProto]:
    """Attribute values of a node, and all tensors of its bodies."""
    for attribute in node.attribute[:]:  # see `attribute_of`
        if attribute.type not in _PLAIN:
            yield from ([attribute.t] if attribute.HasField("t") else attribute.tensors)
    for graph in graphs_inside(node):
        yield from graph.initializer
        for inner in graph.node:
            yield from _tensors_of(inner)


def map_tensors(proto: onnx.ModelProto, change: Callable[[TensorProto], TensorProto]) -> onnx.ModelProto:
    """A copy in which ``change`` is applied to each tensor; it returns its argument for no change."""
    copied = copy_model(proto, but={"initializer"})
    inner = [*tensors(copied)]
    copied.graph.initializer.extend(change(tensor) for tensor in proto.graph.initializer)
    for tensor in inner:
        changed = change(tensor)
        if changed is not tensor:
            tensor.CopyFrom(changed)
    return copied


def size_of(tensor: TensorProto) -> int:
    """Bytes of a tensor's elements; sub-byte types are counted as one byte each."""
    if tensor.data_type == TensorProto.STRING:
        return sum(len(text) for text in tensor.string_data)
    return int(prod(tensor.dims)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
