"""The shapes and types of a model's inputs in one case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx

from qdqspec._core.arrays import Array, Shape
from qdqspec._core.registry import did_you_mean
from qdqspec.errors import ModelError, SpecError
from qdqspec.graph.model import Model, Node, allows, shape_text
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
    """The static shape of each model input, for one profile of a case, given by its index in the spec.

    Declared shapes come first, then the model's own static dimensions. ``inputs.batch`` replaces each dynamic
    leading dimension, which is else 1 for an input of rank two or more. Raises `ModelError` for other dynamic
    dimensions, and for shapes that contradict the model; `SpecError` for declared names that are not inputs.
    """
    declared, batch = inputs.profiles[profile].opt(), inputs.batch
    require_inputs(model, inputs, profile)
    for name in model.inputs:
        _require_numbers(model, name)
    own = {name: _own_shape(model, name, declared.get(name)) for name in model.inputs}
    _check_batch(model, own, batch)
    wanted = {}
    for name, dims in own.items():
        wanted[name] = list(declared.get(name, dims))
        if batch is not None and dims and dims[0] is None:
            wanted[name][0] = batch
        elif name not in declared and len(dims) > 1 and dims[0] is None:
            wanted[name][0] = 1
    _require_sizes(model, wanted)
    return {
        name: _allowed(model, name, own[name], tuple(dim for dim in dims if dim is not None))
        for name, dims in wanted.items()
    }


def with_named_dimensions(model: Model, inputs: Inputs) -> Inputs:
    """The inputs of a case, with shapes of inputs whose dimensions all have the name of one that is known.

    A named dimension (``batch``) has one size in all inputs: that of an input whose shape is declared, else 1 if it is
    the leading dimension of an input of rank two or more.
    """
    named = {name: named_dims(model, name) for name in model.inputs if model.shape(name)}
    return replace(inputs, profiles=tuple(_with_named(profile, named) for profile in inputs.profiles))


def require_inputs(model: Model, inputs: Inputs, profile: int = 0) -> None:
    """Raise `SpecError` if a profile names an input that the model does not have."""
    declared = inputs.profiles[profile].shapes
    if unknown := [name for name in declared if name not in model.inputs]:
        near = did_you_mean(unknown[0], model.inputs)
        raise SpecError(
            f"`inputs.shapes` (--shapes) names '{unknown[0]}', which is no input of the model{near}",
            where=model.where,
            cure=f"its inputs: {', '.join(model.inputs)}",
        )


def shape_profiles(model: Model, inputs: Inputs) -> tuple[ShapeProfile, ...]:
    """The profiles of a case including its batch, for backends that must know shapes before they build.

    Inputs of which only the leading dimension is dynamic have the shape that `resolve_shapes` gives them.
    """
    if inputs.batch is None:
        return tuple(_completed(model, inputs, number) for number in range(len(inputs.profiles)))
    own = resolve_shapes(model, inputs)
    fixed = {name: InputShape.of(shape) for name, shape in own.items()}
    found = []
    for profile in inputs.profiles:  # declared ranges with the first dimension as resolved
        declared = {
            name: _each(lambda dims, first=own[name][:1]: (*first, *dims[1:]), span)
            for name, span in profile.shapes.items()
            if name in own
        }
        found.append(replace(profile, shapes={**fixed, **declared}))
    return tuple(found)


def _completed(model: Model, inputs: Inputs, number: int) -> ShapeProfile:
    """A profile with shapes of the dynamic inputs that it does not have, unless one has to be declared."""
    profile = inputs.profiles[number]
    dynamic = {name for name in model.inputs if None in (model.shape(name) or ())} - profile.shapes.keys()
    try:
        found = resolve_shapes(model, inputs, number) if dynamic else {}
    except (ModelError, SpecError):
        return profile  # reported where the shapes are needed
    more = {name: InputShape.of(shape) for name, shape in found.items() if name in dynamic}
    return replace(profile, shapes={**more, **profile.shapes}) if more else profile


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


def input_specs(
    model: Model, shapes: Mapping[str, Shape], profiles: Sequence[ShapeProfile] = ()
) -> dict[str, InputSpec]:
    """Dtype and shapes of each model input. Raises `ModelError` for an input that is not a numeric tensor."""
    return {
        name: InputSpec(
            dtype=_dtype(model, name),
            shape=tuple(shapes[name]),
            rows=_rows(model, name),
            ranges=tuple(profile.shapes[name] for profile in profiles if name in profile.shapes),
            own=model.shape(name),
        )
        for name in model.inputs
    }


def _rows(model: Model, name: str) -> int | None:
    """The rows of the smallest constant table; without those in bodies, which may not run."""
    found = [
        model.constants[node.inputs[0]].dims[node.number("axis", 0)]
        for node in lookups(model, name)
        if node.inputs[0] in model.constants and not node.scope
    ]
    return min(found, default=None)


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
    return tuple(dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in dims)


def _with_named(profile: ShapeProfile, named: Mapping[str, tuple[int | str | None, ...]]) -> ShapeProfile:
    spans: dict[int | str | None, InputShape] = {}  # of one dimension, by its name
    for name, span in profile.shapes.items():
        for axis, dim in enumerate(named.get(name, ())[: len(span.opt)]):
            if isinstance(dim, str):
                spans.setdefault(dim, _each(lambda dims, axis=axis: dims[axis : axis + 1], span))
    declared = set(spans)
    for dims in named.values():
        if len(dims) > 1 and isinstance(dims[0], str):
            spans.setdefault(dims[0], InputShape.of((1,)))
    spans |= {dim: InputShape.of((dim,)) for dims in named.values() for dim in dims if isinstance(dim, int)}
    found = {
        name: _each(lambda *ones: sum(ones, ()), *(spans[dim] for dim in dims))
        for name, dims in named.items()
        if name not in profile.shapes
        and all(dim in spans for dim in dims)
        and (declared.intersection(dims) or (len(dims) == 1 and isinstance(dims[0], str)))
    }
    return replace(profile, shapes={**profile.shapes, **found}) if found else profile


def _each(change: Callable[..., Shape], *spans: InputShape) -> InputShape:
    """The smallest, usual and largest shape, each changed from those of the spans."""
    return InputShape(
        min=change(*(span.min for span in spans)),
        opt=change(*(span.opt for span in spans)),
        max=change(*(span.max for span in spans)),
    )


def _own_shape(model: Model, name: str, declared: Shape | None) -> tuple[int | None, ...]:
    own = model.shape(name)
    if own is not None:
        return tuple(None if dim is not None and dim < 0 else dim for dim in own)
    if declared is not None:
        return (None,) * len(declared)
    cure = f"declare it in the spec: inputs: {{shapes: {{{name}: <a full shape>}}}}"
    raise ModelError(f"input '{name}' has no known rank", where=model.where, cure=cure)


def _check_batch(model: Model, own: Mapping[str, tuple[int | None, ...]], batch: int | None) -> None:
    """Verify that a batch applies to an input: one with a dynamic first dimension, or with that value."""
    first = {name: shape[0] for name, shape in own.items() if shape}
    if batch is None or any(dim in (None, batch) for dim in first.values()):
        return
    fixed = ", ".join(f"'{name}' at {dim}" for name, dim in first.items())
    raise ModelError(
        f"batch {batch} is asked for, but the model fixes the first dimension of {fixed or 'no input'}",
        where=model.where,
        cure="export the model with a dynamic batch, or take `batch` out of the matrix",
    )


def _require_sizes(model: Model, wanted: Mapping[str, Sequence[int | None]]) -> None:
    """Raise `ModelError` that names all inputs of which a dimension is not known."""
    open_inputs = {name: dims for name, dims in wanted.items() if None in dims}
    if not open_inputs:
        return
    name, *others = open_inputs
    also = f" (also {', '.join(repr(other) for other in others)})" if others else ""
    sizes = {name: ["?" if dim is None else str(dim) for dim in dims] for name, dims in open_inputs.items()}
    spec = ", ".join(f"{name}: [{', '.join(dims)}]" for name, dims in sizes.items())
    words = ",".join(f"{name}:{'x'.join(dims)}" for name, dims in sizes.items())
    them, that = ("them", "those shapes") if others else ("it", "that shape")
    raise ModelError(
        f"dimension {open_inputs[name].index(None)} of input '{name}' is dynamic and no shape is declared for it{also}",
        where=model.where,
        cure=f"declare {them}, inputs: {{shapes: {{{spec}}}}} in a spec or --shapes {words}, or give calibration data "
        f"of {that}",
    )


def _allowed(model: Model, name: str, own: tuple[int | None, ...], shape: Shape) -> Shape:
    """The shape. Raises `ModelError` if the model does not take it, or if the array would be too large."""
    if not allows(own, shape):
        raise ModelError(
            f"input '{name}' is declared with shape {list(shape)}, but the model has {shape_text(own)}",
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
    return shape


def _dtype(model: Model, name: str) -> np.dtype[np.generic]:
    return onnx.helper.tensor_dtype_to_np_dtype(_require_numbers(model, name))


def _require_numbers(model: Model, name: str) -> int:
    """The element type of an input. Raises `ModelError` if it cannot be fed from arrays."""
    elem_type = model.elem_type(name)
    kinds = (value.type for value in model.proto.graph.input if value.name == name)
    kind = next((kind.WhichOneof("value") for kind in kinds), None)
    if kind == "tensor_type" and elem_type is not None and elem_type not in _NO_NUMBERS:
        return elem_type
    what = "holds strings" if elem_type == onnx.TensorProto.STRING else _NO_TENSORS.get(kind or "")
    raise ModelError(
        f"input '{name}' {what or 'has no element type'}, and only tensors of numbers can be fed",
        where=model.where,
        cure="cut the part that reads it off the model",
    )
