"""The shapes and types of a model's inputs in one case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx

from qdqspec._core.arrays import Array, Shape, allows, shape_text
from qdqspec._core.registry import did_you_mean
from qdqspec.errors import ModelError, SpecError
from qdqspec.graph import Model, Node
from qdqspec.types import Inputs, InputShape, ShapeProfile

_LARGEST = 1 << 31  # bytes of an input, which is created and sent whole
_SAME_VALUES = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
_NO_NUMBERS = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
_NO_TENSORS = {
    "sequence_type": "is a sequence",
    "optional_type": "is optional",
    "map_type": "is a map",
    "sparse_tensor_type": "is a sparse tensor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The numpy dtype and the full shape, batch included, of one input of a case.

    ``ranges``: shapes that samples of data may have too; the case is timed at ``shape``. ``own`` are the dimensions of
    the model, ``None`` for dynamic ones. ``rows`` is the size of the smallest constant table that its values index.
    """

    dtype: np.dtype[np.generic]
    shape: Shape
    rows: int | None = None
    ranges: tuple[InputShape, ...] = ()
    own: tuple[int | None, ...] | None = None

    def is_stacked(self, sample: Shape) -> bool:
        """Whether a sample has the shape of the input without its first axis, so that samples make a batch."""
        return len(sample) == len(self.shape) - 1

    def takes(self, sample: Shape) -> bool:
        """Whether a sample, with or without the first axis, may be an input of this case."""
        first = 1 if self.is_stacked(sample) else 0
        return sample == self.shape[first:] or any(
            len(sample) == len(span.min) - first
            and all(
                low <= size <= high
                for low, size, high in zip(span.min[first:], sample, span.max[first:], strict=True)
            )
            for span in self.ranges
        )


def resolve_shapes(model: Model, inputs: Inputs, profile: int = 0) -> dict[str, Shape]:
    """The static shape of each model input, for one profile of a case. Raises like `resolve_spans`."""
    return {name: span.opt for name, span in resolve_spans(model, inputs, profile).items()}


def resolve_spans(model: Model, inputs: Inputs, profile: int = 0) -> dict[str, InputShape]:
    """The range of shapes of each model input, for one profile of a case, given by its index in the spec.

    Declared shapes come first, then the model's own static dimensions. A dimension with a name (``batch``) has the size
    that a declared shape gives it. ``inputs.batch`` replaces each dynamic leading dimension, which is else 1 for an
    input of rank two or more. Raises `ModelError` for other dynamic dimensions, and for shapes that contradict the
    model; `SpecError` for declared names that are not inputs.
    """
    declared, batch = inputs.profiles[profile].shapes, inputs.batch
    require_inputs(model, declared)
    own = {name: _dims_of(model, name, declared.get(name)) for name in model.inputs}
    first = {name: dims[0] for name, dims in own.items() if dims}
    if batch is not None and all(isinstance(dim, int) and dim != batch for dim in first.values()):
        fixed = ", ".join(f"'{name}' at {dim}" for name, dim in first.items())
        raise ModelError(
            f"batch {batch} is asked for, but the model fixes the first dimension of {fixed or 'no input'}",
            where=model.where,
            cure="export the model with a dynamic batch, or take `batch` out of the matrix",
        )
    axes = {name: [*zip(span.min, span.opt, span.max, strict=True)] for name, span in declared.items()}
    named = [pair for name, known in axes.items() for pair in zip(own[name], known, strict=False)]
    named += [(dims[0], (1, 1, 1)) for dims in own.values() if len(dims) > 1]
    sizes = {dim: size for dim, size in reversed(named) if isinstance(dim, str)}  # the first one counts
    found: dict[str, InputShape] = {}
    unknown: dict[str, list[int | None]] = {}
    for name, dims in own.items():
        each: list[tuple[int, ...]] = [
            (dim,) * 3 if isinstance(dim, int) else sizes.get(dim or "", ()) for dim in dims
        ]
        each = [*axes[name]] if name in axes else each
        if dims and each and not isinstance(dims[0], int) and (batch or (len(dims) > 1 and not each[0])):
            each[0] = (batch or 1,) * 3
        if () in each:
            unknown[name] = [size[1] if size else None for size in each]
            continue
        low, shape, high = zip(*each, strict=True) if each else ((), (), ())
        _require_fit(model, name, dims, shape)
        found[name] = InputShape(min=low, opt=shape, max=high)
    if unknown:
        raise _unknown_sizes(model, unknown)
    return found


def _dims_of(model: Model, name: str, declared: InputShape | None) -> tuple[int | str | None, ...]:
    """The dimensions of an input of the model; unknown ones as many as are declared, if its rank is unknown."""
    _dtype(model, name)
    if model.shape(name) is not None:
        return named_dims(model, name)
    if declared is not None:
        return (None,) * len(declared.opt)
    cure = f"declare it in the spec: inputs: {{shapes: {{{name}: <a full shape>}}}}"
    raise ModelError(f"input '{name}' has no known rank", where=model.where, cure=cure)


def _require_fit(model: Model, name: str, dims: Sequence[int | str | None], shape: Shape) -> None:
    takes = tuple(dim if isinstance(dim, int) else None for dim in dims)
    if not allows(takes, shape):
        raise ModelError(
            f"input '{name}' is declared with shape {list(shape)}, but the model has {shape_text(takes)}",
            where=model.where,
            cure="declare in `inputs.shapes` (--shapes) a shape that the model accepts",
        )
    size = prod(shape) * _dtype(model, name).itemsize
    if size > _LARGEST:
        raise ModelError(
            f"input '{name}' of shape {list(shape)} takes {size:,} bytes, more than {_LARGEST:,}",
            where=model.where,
            cure="declare a smaller shape, or export the model with one",
        )


def require_inputs(model: Model, names: Iterable[str], key: str = "`inputs.shapes` (--shapes)") -> None:
    """Raise `SpecError` if a key of a spec names an input that the model does not have."""
    if unknown := [name for name in names if name not in model.inputs]:
        near = did_you_mean(unknown[0], model.inputs)
        raise SpecError(
            f"{key} names '{unknown[0]}', which is no input of the model{near}",
            where=model.where,
            cure=f"its inputs: {', '.join(model.inputs)}",
        )


def shape_profiles(model: Model, inputs: Inputs) -> tuple[ShapeProfile, ...]:
    """The profiles of a case including its batch, for backends that must know shapes before they build.

    Dynamic inputs that are not declared have the shapes that `resolve_spans` gives them.
    """
    found = []
    for number, profile in enumerate(inputs.profiles):
        spans = dict(profile.shapes)
        with suppress(ModelError, SpecError):  # reported where the shapes are needed
            for name, span in resolve_spans(model, inputs, number).items():
                if name in spans or None in (model.shape(name) or ()):
                    spans[name] = span
        found.append(replace(profile, shapes=spans))
    return tuple(found)


def resized(feeds: Mapping[str, Array], shapes: Mapping[str, Shape]) -> dict[str, Array]:
    """The same values at other shapes of the same rank: repeated along each axis, and cut. So they stay valid."""
    found: dict[str, Array] = {}
    for name, shape in shapes.items():
        value = feeds[name]
        for axis, size in enumerate(shape if value.size else ()):
            value = np.take(value, np.arange(size) % value.shape[axis], axis=axis)
        found[name] = value if value.size else np.zeros(shape, value.dtype)
    return found


def shapes_text(shapes: Mapping[str, Shape]) -> str:
    """Shapes as text: ``ids 1x8, mask 1x8``."""
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items())


def input_specs(model: Model, inputs: Inputs) -> dict[str, InputSpec]:
    """Dtype and shapes of each model input in a case. Raises like `resolve_shapes`."""
    found, profiles = {}, [*zip(inputs.profiles, shape_profiles(model, inputs), strict=True)]
    for name, shape in resolve_shapes(model, inputs).items():
        rows = [
            model.constants[node.inputs[0]].dims[node.number("axis", 0)]
            for node in lookups(model, name)
            if node.inputs[0] in model.constants and not node.scope  # a body may not run
        ]
        found[name] = InputSpec(
            dtype=_dtype(model, name),
            shape=shape,
            rows=min(rows, default=None),
            ranges=tuple(
                declared.shapes.get(name, each.shapes[name])
                for declared, each in profiles
                if name in each.shapes
            ),
            own=model.shape(name),
        )
    return found


def lookups(model: Model, name: str) -> Iterator[Node]:
    """The Gather nodes that an input gives indices to."""
    tensors, seen = [name], {name}
    while tensors:
        for consumer in model.consumers.get(tensors.pop(), ()):
            node = model.by_name[consumer.node]
            if node.op_type == "Gather" and consumer.input == 1:
                yield node
            elif node.op_type in _SAME_VALUES and consumer.input == 0 and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                tensors.append(node.outputs[0])


def named_dims(model: Model, name: str) -> tuple[int | str | None, ...]:
    """The dimensions of an input: sizes, names of dynamic ones, or ``None``."""
    port = next(value for value in model.proto.graph.input if value.name == name)
    dims = port.type.tensor_type.shape.dim
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or None
        for dim in dims
    )


def _unknown_sizes(model: Model, open_inputs: Mapping[str, Sequence[int | None]]) -> ModelError:
    name, *others = open_inputs
    also = f" (also {', '.join(repr(other) for other in others)})" if others else ""
    sizes = {name: ["?" if dim is None else str(dim) for dim in dims] for name, dims in open_inputs.items()}
    spec = ", ".join(f"{name}: [{', '.join(dims)}]" for name, dims in sizes.items())
    words = ",".join(f"{name}:{'x'.join(dims)}" for name, dims in sizes.items())
    them, that = ("them", "those shapes") if others else ("it", "that shape")
    return ModelError(
        f"dimension {open_inputs[name].index(None)} of input '{name}' is dynamic and no shape is declared for it{also}",
        where=model.where,
        cure=f"declare {them}, inputs: {{shapes: {{{spec}}}}} in a spec or --shapes {words}, or give calibration data "
        f"of {that}",
    )


def _dtype(model: Model, name: str) -> np.dtype[np.generic]:
    """The type of an input. Raises `ModelError` if it cannot be fed from arrays."""
    elem_type = model.elem_type(name)
    kinds = (value.type for value in model.proto.graph.input if value.name == name)
    kind = next((kind.WhichOneof("value") for kind in kinds), None)
    if kind == "tensor_type" and elem_type is not None and elem_type not in _NO_NUMBERS:
        return onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    what = "holds strings" if elem_type == onnx.TensorProto.STRING else _NO_TENSORS.get(kind or "")
    raise ModelError(
        f"input '{name}' {what or 'has no element type'}, and only tensors of numbers can be fed",
        where=model.where,
        cure="cut the part that reads it off the model",
    )
