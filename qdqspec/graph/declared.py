"""Finds graph outputs whose declared shape differs from the computed one.

ONNX Runtime's ``session.run`` accepts such a model with a warning in its log; a run with preallocated
outputs, as for timing, fails with "Invalid rank for output".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from qdqspec.graph.model import Model, without_weights
from qdqspec.graph.protos import copy_model


def unconfirmed_outputs(model: Model) -> tuple[str, ...]:
    """Outputs whose declared shape does not follow from the model and may be wrong."""
    light = without_weights(model.proto)
    for output in light.graph.output:
        output.type.tensor_type.ClearField("shape")
    known = Model(light)
    return tuple(
        output.name
        for output in model.proto.graph.output
        if (declared := _declared(output)) is not None and not _follows(declared, known.shape(output.name))
    )


def contradictions(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """For each output whose shape differs from the declared one: both, in words."""
    found = {}
    for output in model.proto.graph.output:
        declared, shape = _declared(output), shapes.get(output.name)
        if declared is not None and shape is not None and not _allows(declared, shape):
            found[output.name] = f"{_text(declared)} is declared, {list(shape)} is computed"
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


def _declared(output: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    kind = output.type.tensor_type
    if not output.type.HasField("tensor_type") or not kind.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in kind.shape.dim)


def _follows(declared: Sequence[int | None], known: Sequence[int | None] | None) -> bool:
    return known is not None and _allows(declared, known)


def _allows(declared: Sequence[int | None], shape: Sequence[int | None]) -> bool:
    return len(declared) == len(shape) and all(d in (None, s) for d, s in zip(declared, shape, strict=True))


def _text(declared: Sequence[int | None]) -> str:
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in declared) + "]"
