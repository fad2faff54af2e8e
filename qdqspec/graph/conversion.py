"""Conversions of a whole model that keep what it computes: another opset, float32 in place of float16, declared types.

onnx's version converter keeps the meaning of a model but not its bytes: it drops node metadata, re-encodes
initializers and writes inferred shapes into the graph. These changes are undone here, so that the converted
model differs from the original only where an operator's definition changed. Big weights are not passed to the
converter, which makes it fast and independent of the 2 GB limit.

Runtimes without integer kernels for pairs of float16 tensors fuse the pairs of a model converted to float32. Each
float16 number is a float32 number, so that weights keep their values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper, version_converter

from qdqspec.errors import ModelError
from qdqspec.graph.check import sort_nodes, type_problem
from qdqspec.graph.flat import bodies_of, defined_in, unique_node_names
from qdqspec.graph.model import CONVERTED_FROM, Model
from qdqspec.graph.ops import is_default
from qdqspec.graph.protos import (
    CONTRIBUTED,
    IR_WITH_FREE_INITIALIZERS,
    all_graphs,
    copy_model,
    free_initializers,
    free_name,
    map_tensors,
    opset_of,
    refill,
    rename_tensors,
    without_weights,
)
from qdqspec.graph.storage import array_of
from qdqspec.graph.unify import assumed

REAL_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}
# attributes of operators that hold the type of a result, or of the computation
_TYPES = frozenset({"dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "to"})


def raise_opset(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """The same model at default opset ``version`` or above, as a new proto.

    The IR version is at least 4, as by `free_initializers`. Raises `ModelError` with both versions and the reason if
    the converter fails.
    """
    if opset_of(proto) >= version:
        raised = copy_model(proto)
        free_initializers(raised)
        return raised
    light = without_weights(proto)
    # else the converter does not see initializers that are not inputs
    light.ir_version = max(light.ir_version, IR_WITH_FREE_INITIALIZERS)
    try:
        raised = version_converter.convert_version(light, version)
    except Exception as error:  # noqa: BLE001 - the C++ converter raises RuntimeError and its own classes
        # "/project/onnx/version_converter/convert.cc:101: f: Assertion `x` failed: why"
        why = str(error).strip().partition("failed: ")[2] or str(error).strip() or type(error).__name__
        if why == "unordered_map::at":  # onnx before 1.23
            why = "onnx converts no operator of one of its names"
        raise ModelError(
            f"the opset cannot be raised from {opset_of(proto)} to {version}: {why.splitlines()[0][:300]}",
            cure=f"export the model with opset {version}, or choose a number format that needs none",
        ) from None
    raised.ir_version = proto.ir_version
    refill(raised.metadata_props, proto.metadata_props)
    refill(raised.functions, proto.functions)
    _put_back_graph(proto.graph, raised.graph)
    free_initializers(raised)
    return raised


def _put_back_graph(original: onnx.GraphProto, raised: onnx.GraphProto) -> None:
    """Undo the converter's changes other than those of operators."""
    known = {t.name for t in original.initializer}
    added = [t for t in raised.initializer if t.name not in known]
    refill(raised.initializer, [*original.initializer, *added])
    refill(raised.input, original.input)
    refill(raised.output, original.output)
    refill(raised.value_info, original.value_info)
    refill(raised.metadata_props, original.metadata_props)
    before = {n.output[0]: n for n in original.node if n.output}
    defined, now_defined = {*defined_in(original)}, {*defined_in(raised)}
    renamed: dict[str, str] = {}  # results of replaced operators, as of Upsample, which a kept node reads
    for node in raised.node:
        source = before.get(node.output[0]) if node.output else None
        if source is not None and source.op_type == node.op_type:
            pairs = zip(node.input, source.input, strict=False)
            gone = {new: old for new, old in pairs if old in defined - now_defined}
            renamed |= {new: old for new, old in gone.items() if new in now_defined - defined}
            refill(node.metadata_props, source.metadata_props)
            bodies = dict(bodies_of(source))
            for name, graph in bodies_of(node):
                _put_back_graph(bodies[name], graph)
    for node in raised.node if renamed else ():
        rename_tensors(node, lambda name: renamed.get(name, name))


def convert_by(
    tool: Callable[[onnx.ModelProto], onnx.ModelProto], proto: onnx.ModelProto, path: Path
) -> onnx.ModelProto:
    """The model of a file as a tool of another package converts it: nodes have their unique names, and are in order."""
    for node, name in zip(proto.graph.node, [*unique_node_names(proto.graph.node)], strict=True):
        node.name = name
    converted = tool(proto)
    sort_nodes(converted, path)
    return converted


def with_types(model: Model, dtype: str) -> Model:
    """The model, or one that declares ``dtype`` for the tensors of the main graph whose type is unknown.

    These are results of operators of other domains, as of plugins, and of ONNX's operators that read them. A
    tensor that an operator would not accept in this type stays unknown. ``dtype`` is a key of `REAL_TYPES`.
    """
    elem_type = REAL_TYPES[dtype]
    known = {name: found.elem_type for name, found in model.types.items() if found.elem_type}
    main = {name for node in model.nodes if not node.scope for name in (*node.inputs, *node.outputs)}
    fitting = assumed([node.proto for node in model.nodes], model.opset, known, elem_type)
    names = [name for name in fitting if name in main]
    if not names:
        return model
    copied = copy_model(model.proto)
    old = {info.name: info for info in (*copied.graph.value_info, *copied.graph.output)}
    for name in names:
        info = old[name] if name in old else copied.graph.value_info.add(name=name)
        info.type.tensor_type.elem_type = elem_type
    return Model(copied, path=model.path, sha256=model.sha256)


# ---- float16 -------------------------------------------------------------------------------------


def with_integer_kernels(model: Model, *, quantizes_half: bool) -> tuple[Model, str]:
    """The model that pairs are inserted into, and a note for the user if it computes in float16.

    Unless the backend ``quantizes_half``, it has integer kernels for pairs of float32 tensors only.
    """
    if quantizes_half or not model.float16_nodes:
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


def in_float32(model: Model) -> Model:
    """The model with float32 in place of float16, in bodies too. Graph inputs and outputs keep their types.

    A Cast follows each float16 input ``x``, and makes ``x/float32``, which the nodes read instead; an output is made
    by a Cast alike. All other names stay. A model that does not compute in float16 is returned unchanged. Raises
    `ModelError` if an operator is not known, or the result is not valid.
    """
    if not model.float16_nodes:
        return model
    for node in model.float16_nodes:
        if not (is_default(node) or node.domain == CONTRIBUTED or node.domain.startswith("ai.onnx.")):
            raise ModelError(
                f"node '{node.name}' of operator {node.domain}:{node.op_type} computes in float16, and it is not "
                "known whether it computes in float32",
                where=model.where,
            )
    fed = {port.name for port in model.proto.graph.input}
    defaults = fed & model.initializers.keys()  # a default value keeps the type of its input

    def converted(tensor: TensorProto) -> TensorProto:
        if tensor.data_type != TensorProto.FLOAT16 or tensor.name in defaults:
            return tensor
        return numpy_helper.from_array(array_of(tensor, model.folder).astype(np.float32), tensor.name)

    proto = map_tensors(model.proto, converted)
    graphs = [*all_graphs(proto.graph)]
    for graph in graphs:
        inner = () if graph is proto.graph else (*graph.input, *graph.output)
        for value in (*graph.value_info, *inner):
            _convert_type(value.type)
    for holder in (*graphs, *proto.functions):
        for attribute in (attribute for node in holder.node for attribute in node.attribute):
            if attribute.name in _TYPES and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
    _add_casts(proto, {name for node in model.nodes for name in (node.name, *node.inputs, *node.outputs)})
    proto.metadata_props.add(key=CONVERTED_FROM, value="float16")
    problem = type_problem(proto)
    if problem and not type_problem(model.proto):
        raise ModelError(f"the model is not valid in float32: {problem}", where=model.where)
    return Model(proto, path=model.path)


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
