"""Declarations of tensors: graph outputs whose shape differs from the computed one, types that a model lacks.

A runtime may accept a model with a wrong shape and only warn in its log; a run with preallocated outputs, as for
timing, then fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from qdqspec.graph.model import Model
from qdqspec.graph.protos import copy_model, without_weights
from qdqspec.graph.unify import assumed

REAL_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}


def unconfirmed_outputs(model: Model) -> tuple[str, ...]:
    """Outputs whose declared shape does not follow from the model and may be wrong."""
    light = without_weights(model.proto)
    for output in light.graph.output:
        output.type.tensor_type.ClearField("shape")
    known = Model(light)
    return tuple(
        output.name
        for output in model.proto.graph.output
        if (declared := _read_declared(output)) is not None
        and ((shape := known.shape(output.name)) is None or not allows(declared, shape))
    )


def contradictions(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """For each output whose shape differs from the declared one: both, in words."""
    found = {}
    for output in model.proto.graph.output:
        declared, shape = _read_declared(output), shapes.get(output.name)
        if declared is not None and shape is not None and not allows(declared, shape):
            found[output.name] = f"{shape_text(declared)} is declared, {list(shape)} is computed"
    return found


def redeclared(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """A copy with outputs of the ranks of ``shapes``; a dimension with another declared size is unknown."""
    copied = copy_model(proto)
    for output in copied.graph.output:
        if output.name not in shapes:
            continue
        shape, before = shapes[output.name], onnx.TensorShapeProto()
        before.CopyFrom(output.type.tensor_type.shape)
        same_rank = len(before.dim) == len(shape)
        output.type.tensor_type.ClearField("shape")
        output.type.tensor_type.shape.SetInParent()
        for number, size in enumerate(shape):
            dim = output.type.tensor_type.shape.dim.add()
            if same_rank and before.dim[number].dim_value in (0, size):
                dim.CopyFrom(before.dim[number])
    return copied


def with_types(model: Model, dtype: str) -> Model:
    """The model, or one that declares ``dtype`` for the tensors of the main graph whose type is unknown.

    These are results of operators of other domains, as of plugins, and of ONNX's operators that read them. A
    tensor that an operator would not accept in this type stays unknown. ``dtype`` is a key of `REAL_TYPES`.
    """
    elem_type = REAL_TYPES[dtype]
    known = {name: found.elem_type for name, found in model.types.items() if found.elem_type}
    main = {name for node in model.nodes if not node.scope for name in (*node.inputs, *node.outputs)}
    names = [
        name
        for name in assumed([node.proto for node in model.nodes], model.opset, known, elem_type)
        if name in main
    ]
    if not names:
        return model
    copied = copy_model(model.proto)
    old = {info.name: info for info in (*copied.graph.value_info, *copied.graph.output)}
    for name in names:
        info = old[name] if name in old else copied.graph.value_info.add(name=name)
        info.type.tensor_type.elem_type = elem_type
    return Model(copied, path=model.path, sha256=model.sha256)


def _read_declared(output: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    kind = output.type.tensor_type
    if not output.type.HasField("tensor_type") or not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in kind.shape.dim)


def allows(declared: Sequence[int | None], shape: Sequence[int | None]) -> bool:
    """Whether a shape agrees with a declaration, in which ``None`` is any size."""
    return len(declared) == len(shape) and all(d in (None, s) for d, s in zip(declared, shape, strict=True))


def shape_text(declared: Sequence[int | None]) -> str:
    """``[1, ?, 3]``: a question mark for each unknown size."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in declared) + "]"
