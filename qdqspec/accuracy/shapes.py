"""The shapes and types of a model's inputs in one case, and the domain in which a search looks for inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import onnx

from qdqspec._core.arrays import Array, Shape
from qdqspec._core.registry import did_you_mean
from qdqspec.errors import ModelError, SpecError
from qdqspec.graph import Model, Node, allows, shape_text
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
    require_inputs(model, declared)
    own: dict[str, tuple[int | None, ...]] = {}
    for name in model.inputs:
        _dtype(model, name)
        if (dims := model.shape(name)) is not None:
            own[name] = tuple(None if dim is not None and dim < 0 else dim for dim in dims)
        elif name in declared:
            own[name] = (None,) * len(declared[name])
        else:
            cure = f"declare it in the spec: inputs: {{shapes: {{{name}: <a full shape>}}}}"
            raise ModelError(f"input '{name}' has no known rank", where=model.where, cure=cure)
    first = {name: shape[0] for name, shape in own.items() if shape}
    if batch is not None and not any(dim in (None, batch) for dim in first.values()):
        fixed = ", ".join(f"'{name}' at {dim}" for name, dim in first.items())
        raise ModelError(
            f"batch {batch} is asked for, but the model fixes the first dimension of {fixed or 'no input'}",
            where=model.where,
            cure="export the model with a dynamic batch, or take `batch` out of the matrix",
        )
    wanted = {}
    for name, dims in own.items():
        wanted[name] = list(declared.get(name, dims))
        if batch is not None and dims and dims[0] is None:
            wanted[name][0] = batch
        elif name not in declared and len(dims) > 1 and dims[0] is None:
            wanted[name][0] = 1
    if open_inputs := {name: dims for name, dims in wanted.items() if None in dims}:
        raise _unknown_sizes(model, open_inputs)
    found = {name: tuple(dim for dim in dims if dim is not None) for name, dims in wanted.items()}
    for name, shape in found.items():
        if not allows(own[name], shape):
            raise ModelError(
                f"input '{name}' is declared with shape {list(shape)}, but the model has {shape_text(own[name])}",
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
    return found


def with_named_dimensions(model: Model, inputs: Inputs) -> Inputs:
    """The inputs of a case, with shapes of inputs whose dimensions all have the name of one that is known.

    A named dimension (``batch``) has one size in all inputs: that of an input whose shape is declared, else 1 if it is
    the leading dimension of an input of rank two or more.
    """
    named = {name: named_dims(model, name) for name in model.inputs if model.shape(name)}
    profiles = []
    for profile in inputs.profiles:
        spans: dict[int | str | None, InputShape] = {}  # of one dimension, by its name
        for name, span in profile.shapes.items():
            for axis, dim in enumerate(named.get(name, ())[: len(span.opt)]):
                if isinstance(dim, str):
                    spans.setdefault(dim, _each(lambda dims, axis=axis: dims[axis : axis + 1], span))
        declared = set(spans)
        for dims in named.values():
            if len(dims) > 1 and isinstance(dims[0], str):
                spans.setdefault(dims[0], InputShape.of((1,)))
        spans |= {
            dim: InputShape.of((dim,)) for dims in named.values() for dim in dims if isinstance(dim, int)
        }
        found = {
            name: _each(lambda *ones: sum(ones, ()), *(spans[dim] for dim in dims))
            for name, dims in named.items()
            if name not in profile.shapes
            and all(dim in spans for dim in dims)
            and (declared.intersection(dims) or (len(dims) == 1 and isinstance(dims[0], str)))
        }
        profiles.append(replace(profile, shapes={**profile.shapes, **found}))
    return replace(inputs, profiles=tuple(profiles))


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

    Inputs of which only the leading dimension is dynamic have the shape that `resolve_shapes` gives them.
    """
    found = []
    if inputs.batch is None:
        for number, profile in enumerate(inputs.profiles):
            dynamic = {
                name for name in model.inputs if None in (model.shape(name) or ())
            } - profile.shapes.keys()
            try:
                shapes = resolve_shapes(model, inputs, number) if dynamic else {}
            except (ModelError, SpecError):  # reported where the shapes are needed
                shapes = {}
            more = {name: InputShape.of(shape) for name, shape in shapes.items() if name in dynamic}
            found.append(replace(profile, shapes={**more, **profile.shapes}))
        return tuple(found)
    own = resolve_shapes(model, inputs)
    fixed = {name: InputShape.of(shape) for name, shape in own.items()}
    for profile in inputs.profiles:  # declared ranges with the first dimension as resolved
        declared = {
            name: _each(lambda dims, first=own[name][:1]: (*first, *dims[1:]), span)
            for name, span in profile.shapes.items()
            if name in own
        }
        found.append(replace(profile, shapes={**fixed, **declared}))
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
    found = {}
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
            ranges=tuple(each.shapes[name] for each in inputs.profiles if name in each.shapes),
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
    return tuple(dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in dims)


def _each(change: Callable[..., Shape], *spans: InputShape) -> InputShape:
    """The smallest, usual and largest shape, each changed from those of the spans."""
    return InputShape(
        min=change(*(span.min for span in spans)),
        opt=change(*(span.opt for span in spans)),
        max=change(*(span.max for span in spans)),
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


@dataclass(frozen=True, slots=True)
class Span:
    """All values from ``low`` to ``high``."""

    low: float
    high: float

    def nearest(self, value: float) -> float:
        """The value, or the nearest bound."""
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRange:
    """One dimension: from ``least`` to ``most``. Axes of one ``name`` are equally long."""

    least: int
    most: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDomain:
    """One input: its ``shapes`` by profile, the range ``known`` from data, and the range to be ``tried``."""

    name: str
    dtype: np.dtype[np.generic]
    shapes: tuple[tuple[AxisRange, ...], ...]
    known: Span
    tried: Span


def input_domains(
    model: Model,
    specs: Mapping[str, InputSpec],
    profiles: Iterable[ShapeProfile],
    known: Mapping[str, Span],
    *,
    values: Mapping[str, Span],
    beyond: float,
) -> tuple[InputDomain, ...]:
    """The domain of each input: ``profiles`` give the shapes, ``known`` the ranges seen in data.

    ``values`` are the ranges allowed by a spec. Without one, integers, which may be indices, stay within the known
    range, and floats extend it ``beyond`` times. Raises `SpecError` for a name in ``values`` that is not an input.
    """
    require_inputs(model, values, "`search.values`")
    shaped, found = tuple(profiles), []
    for name, spec in specs.items():
        wide = known[name]
        if np.issubdtype(spec.dtype, np.floating):
            largest = float(np.finfo(spec.dtype).max)  # type: ignore[type-var]  # it is one of floats
            middle, half = (wide.low + wide.high) / 2, (wide.high - wide.low) / 2 * beyond
            wide = Span(max(middle - half, -largest), min(middle + half, largest))
        shapes, dims = [], dict(enumerate(named_dims(model, name)))
        for profile in shaped:
            span, axes = profile.shapes.get(name) or InputShape.of(spec.shape), []
            for index, (low, high) in enumerate(zip(span.min, span.max, strict=True)):
                own = dims.get(index)
                # axes without a name are equally long if they are declared with the same bounds
                axis = own if isinstance(own, str) else f"{index} {low} {high}"
                axes.append(AxisRange(least=low, most=high, name=axis))
            shapes.append(tuple(axes))
        tried = values.get(name) or wide
        found.append(
            InputDomain(name=name, dtype=spec.dtype, shapes=tuple(shapes), known=known[name], tried=tried)
        )
    return tuple(found)


def spans_of(feeds: Iterable[Mapping[str, Array]]) -> dict[str, Span]:
    """The smallest and the largest finite value of each input in all feeds; zero twice if an input has none."""
    found: dict[str, Span] = {}
    for feed in feeds:
        for name, array in feed.items():
            old = found.get(name, Span(math.inf, -math.inf))
            values = array[np.isfinite(array)]
            if values.size:
                low, high = float(values.min()), float(values.max())
                old = Span(min(old.low, low), max(old.high, high))
            found[name] = old
    return {name: span if span.low <= span.high else Span(0.0, 0.0) for name, span in found.items()}


class InputResult(NamedTuple):
    """Messages of the limits that an input breaks, and its noise, which the search maximizes."""

    broken: tuple[str, ...]
    noise: float
