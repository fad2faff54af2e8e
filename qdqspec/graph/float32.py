"""Converts a float16 model to float32, with casts at its inputs and outputs.

Runtimes without integer kernels for pairs of float16 tensors fuse the pairs of the converted model. Each float16 number
is a float32 number, so that weights keep their values.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper

from qdqspec.errors import ModelError
from qdqspec.graph.check import type_problem
from qdqspec.graph.flat import free_name, unique_node_names
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_constant_node, is_default
from qdqspec.graph.protos import (
    CONTRIBUTED,
    all_graphs,
    map_tensors,
    metadata,
    refill,
    rename_tensors,
)
from qdqspec.graph.weights import array_of

CONVERTED_FROM = "qdqspec.converted_from"  # model metadata: the float type before the conversion to float32
FLOAT16 = "float16"
# attributes of operators that hold the type of a result, or of the computation
_TYPES = frozenset({"dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "to"})


def computes_in_float16(model: Model) -> bool:
    """Whether an operator other than Cast reads or makes a float16 tensor."""
    return next(_find_float16_nodes(model), None) is not None


def is_converted(model: Model) -> bool:
    """Whether a model was converted from float16 by `in_float32`, or derives from one that was."""
    return metadata(model.proto, CONVERTED_FROM) == FLOAT16


def with_integer_kernels(model: Model, *, quantizes_half: bool) -> tuple[Model, str]:
    """The model that pairs are inserted into, and a note for the user if it computes in float16.

    Unless the backend ``quantizes_half``, it has integer kernels for pairs of float32 tensors only.
    """
    if quantizes_half or not computes_in_float16(model):
        return model, ""
    known = (
        "the model computes in float16, and the backend has no integer kernels for pairs of float16 tensors"
    )
    try:
        converted = in_float32(model)
    except ModelError as error:
        return model, f"{known}; it cannot be converted to float32: {error.what}"
    return converted, (
        f"{known}: pairs are inserted into a copy in float32, with casts at its float16 inputs and outputs; times and "
        "outputs are compared with the model as given"
    )


def converted_like(model: Model, other: Model) -> Model:
    """The model, in float32 if ``other`` was converted and this one computes in float16."""
    return in_float32(model) if is_converted(other) and computes_in_float16(model) else model


def in_float32(model: Model) -> Model:
    """The model with float32 in place of float16, in bodies too. Graph inputs and outputs keep their types.

    A Cast follows each float16 input ``x``, and makes ``x/float32``, which the nodes read instead; an output is made
    by a Cast alike. All other names stay. Raises `ModelError` if an operator is not known, or the result is not valid.
    """
    unknown = next((node for node in _find_float16_nodes(model) if not _is_known(node.proto)), None)
    if unknown is not None:
        raise ModelError(
            f"node '{unknown.name}' of operator {unknown.domain}:{unknown.op_type} computes in float16, and it is not "
            "known whether it computes in float32",
            where=model.where,
        )
    base = None if model.path is None else model.path.parent
    fed = {port.name for port in model.proto.graph.input}
    defaults = fed & model.initializers.keys()  # a default value keeps the type of its input

    def converted(tensor: TensorProto) -> TensorProto:
        if tensor.data_type != TensorProto.FLOAT16 or tensor.name in defaults:
            return tensor
        return numpy_helper.from_array(array_of(tensor, base).astype(np.float32), tensor.name)

    proto = map_tensors(model.proto, converted)
    _convert_declarations(proto)
    _add_casts(proto, {name for node in model.nodes for name in (node.name, *node.inputs, *node.outputs)})
    proto.metadata_props.add(key=CONVERTED_FROM, value=FLOAT16)
    problem = type_problem(proto)
    if problem and not type_problem(model.proto):
        raise ModelError(f"the model is not valid in float32: {problem}", where=model.where)
    return Model(proto, path=model.path)


def _find_float16_nodes(model: Model) -> Iterator[Node]:
    for node in model.nodes:
        names = (*node.inputs, *node.outputs)
        is_value = node.is_marker or is_constant_node(node) or (node.op_type == "Cast" and is_default(node))
        if not is_value and any(model.elem_type(name) == TensorProto.FLOAT16 for name in names if name):
            yield node


def _is_known(node: onnx.NodeProto) -> bool:
    return is_default(node) or node.domain == CONTRIBUTED or node.domain.startswith("ai.onnx.")


def _convert_declarations(proto: onnx.ModelProto) -> None:
    """Replace the type in attributes and in the declarations of all tensors but graph inputs and outputs."""
    graphs = [*all_graphs(proto.graph)]
    for graph in graphs:
        inner = () if graph is proto.graph else (*graph.input, *graph.output)
        for value in (*graph.value_info, *inner):
            _convert_type(value.type)
    for holder in (*graphs, *proto.functions):
        for attribute in (attribute for node in holder.node for attribute in node.attribute):
            if attribute.name in _TYPES and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT


def _convert_type(kind: TypeProto) -> None:
    if kind.HasField("sequence_type"):
        _convert_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _convert_type(kind.optional_type.elem_type)
    elif kind.HasField("tensor_type") and kind.tensor_type.elem_type == TensorProto.FLOAT16:
        kind.tensor_type.elem_type = TensorProto.FLOAT


def _add_casts(proto: onnx.ModelProto, taken: set[str]) -> None:
    """Insert a Cast after each float16 graph input and before each float16 graph output."""
    graph, now = proto.graph, dict[str, str]()
    fed = {port.name for port in graph.input}
    casts: dict[int, list[onnx.NodeProto]] = {TensorProto.FLOAT: [], TensorProto.FLOAT16: []}
    for port in (*graph.input, *graph.output):
        changed = TypeProto()
        changed.CopyFrom(port.type)
        _convert_type(changed)
        if changed == port.type or port.name in now:
            continue
        if not port.type.HasField("tensor_type"):
            raise ModelError(f"'{port.name}' is no tensor, and holds float16 tensors")
        inner = now[port.name] = free_name(f"{port.name}/float32", taken)
        kind = TensorProto.FLOAT if port.name in fed else TensorProto.FLOAT16
        ends = [port.name, inner] if port.name in fed else [inner, port.name]
        name = free_name(f"{inner}/Cast", taken)
        casts[kind].append(helper.make_node("Cast", ends[:1], ends[1:], name=name, to=kind))
    # unnamed nodes are numbered, and the numbers would change
    for node, name in zip(graph.node, [*unique_node_names(graph.node)], strict=True):
        node.name = name
        rename_tensors(node, lambda tensor: now.get(tensor, tensor))
    for tensor in graph.initializer:
        tensor.name = tensor.name if tensor.name in fed else now.get(tensor.name, tensor.name)
    refill(graph.value_info, [value for value in graph.value_info if value.name not in now])
    refill(graph.node, [*casts[TensorProto.FLOAT], *graph.node, *casts[TensorProto.FLOAT16]])
