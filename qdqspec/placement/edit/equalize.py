"""Equalization: channels of inner tensors are multiplied by powers of two, and their weights divided by these.

A product with a power of two is exact, so that all outputs stay the same, bit for bit, and the original constants can
be computed again. The factors begin at constants that make a tensor channel by channel, such as the scale and bias of a
normalization or the weight and bias of a convolution; they pass through operators that are homogeneous in each channel;
and each reader at the end is a linear operator whose constant weight is divided by them. A constant with one value for
all channels is expanded: it gets one value for each of them.
Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721;
G. Xiao et al., "SmoothQuant", arXiv 2211.10438, for normalizations.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Literal, NamedTuple, cast

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from pydantic import Field, TypeAdapter, ValidationError

from qdqspec.arrays import Array
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import SHAPE_SOURCES, is_default
from qdqspec.graph.protos import copied, copy_model, metadata, refill
from qdqspec.types import Placement

EQUALIZED = "qdqspec.equalized"  # model metadata: the factors that constants were multiplied by
LARGEST = 24  # exponent, of either sign: more than any that is chosen, and the factor is a float32

MOST_EXPANDED = 1 << 20  # elements of an expanded constant

_POOLS = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})
_HOMOGENEOUS = _POOLS | {"Dropout", "Identity", "LeakyRelu", "PRelu", "Relu"}
_REDUCTIONS = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"})
_RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_LINEAR = frozenset({"Conv", "Gemm", "MatMul"})
_NORMALIZATIONS = frozenset(
    {"BatchNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
)
_LAST_AXIS = frozenset({"Gemm", "LayerNormalization", "MatMul", "RMSNormalization"})
_OF_GELU = frozenset({"Erf", "Tanh"})  # runtimes recognize a Gelu made of several operators by its scalars
_GELU_STEPS = 5  # from these to the last factor of a Gelu, at most


class ScaledConstant(NamedTuple):
    """A constant multiplied by the channels' factors (``sign`` 1), or divided by them (-1), along an axis.

    Each channel has ``repeat`` neighbouring elements on the axis. A constant that has one value for all channels is
    expanded: ``dims`` are those it has in the float model, and the axis is counted from the end, -1 for the last.
    """

    tensor: str
    axis: int
    sign: Literal[1, -1] = 1
    repeat: Annotated[int, Field(ge=1)] = 1
    dims: tuple[Annotated[int, Field(ge=1)], ...] | None = None

    def expanded_dims(self, channels: int) -> tuple[int, ...]:
        """The dims of an expanded constant."""
        dims = [1] * (-self.axis - len(self.dims or ())) + list(self.dims or ())
        dims[self.axis] = channels * self.repeat
        return tuple(dims)

    def expanded(self, values: Array, channels: int) -> Array:
        """The values with an element for each channel."""
        is_small = self.dims is not None and values.shape == self.dims
        return np.broadcast_to(values, self.expanded_dims(channels)) if is_small else values

    def collapsed(self, values: Array, exponents: Sequence[int]) -> Array:
        """The values without factors, in the dims of the float model.

        They are those of the channel with the largest factor, which has the least error if the constant was quantized.
        """
        if self.dims is None:
            return values
        channel = int(np.argmax(self.sign * np.array(exponents)))
        one: Array = np.take(values, channel * self.repeat, self.axis)
        return one.reshape(self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalization:
    """Channels of a tensor multiplied by two to the power of ``exponents``, and the constants that change with them."""

    exponents: tuple[Annotated[int, Field(ge=-LARGEST, le=LARGEST)], ...]
    constants: tuple[ScaledConstant, ...]

    @property
    def record(self) -> dict[str, object]:
        """The form in schemes and metadata."""
        return {"exponents": self.exponents, "constants": [one._asdict() for one in self.constants]}


EQUALIZATIONS = TypeAdapter(tuple[Equalization, ...])  # reads what `Equalization.record` makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorber:
    """A linear operator whose weight is divided by the factors of its input, the tensor ``source``."""

    node: Node
    source: str
    axis: int  # of the channels of the source
    weight: ScaledConstant

    @property
    def is_depthwise(self) -> bool:
        """Whether each output channel reads one input channel."""
        return self.node.op_type == "Conv" and self.weight.axis == 0


@dataclass(slots=True, kw_only=True)
class Chain:
    """Tensors whose channels can have common factors, the operator that makes the first, and those that end it."""

    maker: Node
    channels: int
    tensors: dict[str, tuple[int, int]]  # axis of the channels, and elements of each channel on it
    constants: list[ScaledConstant]
    absorbers: list[Absorber]

    def by(self, exponents: Iterable[int]) -> Equalization:
        """The chain with these exponents of its channels."""
        return Equalization(exponents=tuple(map(int, exponents)), constants=tuple(self.constants))


class _NotScalableError(Exception):
    """Some reader of a tensor cannot have factors."""


def find_chains(model: Model, fixed: Collection[str] = ()) -> list[Chain]:
    """The chains of the main graph, in graph order. Tensors and constants in ``fixed`` are not scaled.

    Omitted are tensors that bodies of If, Loop or Scan read, and constants with several readers or that callers can
    feed.
    """
    found: list[Chain] = []
    inside: set[str] = set()
    if metadata(model.flat, EQUALIZED) is not None:
        return found  # its constants are restored by what its metadata holds already
    for node in model.nodes:
        if node.outputs and node.outputs[0] not in inside:
            chain = _Growth(model, fixed).chain(node)
            if chain is not None:
                inside.update(chain.tensors)
                found.append(chain)
    return found


class _Growth:
    """Follows the factors of one tensor to all of its readers."""

    def __init__(self, model: Model, fixed: Collection[str]) -> None:
        self._model = model
        self._closed = {*model.outputs, *model.captured, *fixed, *(i.name for i in model.flat.graph.input)}

    def chain(self, maker: Node) -> Chain | None:
        """The chain of a node's output; ``None`` if it cannot have factors."""
        try:
            is_factor = maker.op_type in ("Div", "Mul")
            made = self._multiplied(maker) if is_factor else iter([self._made(maker)])
            for axis, constants in made:
                try:
                    return self._grown(maker, axis, constants)
                except _NotScalableError:
                    continue  # another axis may have factors
        except _NotScalableError:
            pass
        return None

    def _grown(self, maker: Node, axis: int, constants: Iterable[tuple[str, int, Literal[1, -1]]]) -> Chain:
        """The chain with channels on this axis. Raises `_NotScalableError`."""
        channels = self._shape(maker.outputs[0])[axis]
        _require(channels is not None and channels > 1)
        self._products: list[Node] = []
        self._chain = Chain(maker=maker, channels=channels or 0, tensors={}, constants=[], absorbers=[])
        for name, its_axis, sign in constants:
            self._scale(name, its_axis, sign)
        pending = [self._join(maker, axis)]
        while pending:
            tensor = pending.pop()
            ends = self._model.consumers.get(tensor, ())
            made = [self._read(tensor, self._model.by_name[end.node], end.input) for end in ends]
            pending += filter(None, made)
        for node in self._products:
            _require(sum(name in self._chain.tensors for name in node.inputs) == 1)
        _require(bool(self._chain.absorbers))
        return self._chain

    def _shape(self, tensor: str) -> tuple[int | None, ...]:
        shape = self._model.shape(tensor)
        _require(shape is not None)
        return shape or ()

    def _multiplied(self, node: Node) -> Iterator[tuple[int, list[tuple[str, int, Literal[1, -1]]]]]:
        """The axes that channels of a product with a constant can have, and the constant with its axis."""
        rank = len(self._shape(node.outputs[0]))
        constants = [name for name in node.inputs if name in self._model.constants]
        _require(len(constants) == 1 and (node.op_type == "Mul" or constants[0] == node.inputs[1]))
        dims = self._model.constants[constants[0]].dims
        _require(len(dims) <= rank)
        sizes = [1] * (rank - len(dims)) + list(dims)
        can_expand = rank > 1 and not self._ends_gelu(node)
        # Layers read channels on axis 1 or on the last one.
        for axis in dict.fromkeys((*(index for index, size in enumerate(sizes) if size > 1), 1, rank - 1)):
            if 0 <= axis < rank and (sizes[axis] > 1 or can_expand):
                yield axis, [(constants[0], axis - rank, 1 if node.op_type == "Mul" else -1)]

    def _ends_gelu(self, node: Node) -> bool:
        """Whether the inputs of a product are made by a Gelu that consists of several operators."""
        made = [node]
        for _ in range(_GELU_STEPS):
            inputs = (self._model.producer.get(name) for one in made for name in one.inputs)
            made = [one for one in inputs if one is not None and one.op_type not in _LINEAR]
            if any(one.op_type in _OF_GELU for one in made):
                return True
        return False

    def _made(self, node: Node) -> tuple[int, list[tuple[str, int, Literal[1, -1]]]]:
        """The axis of the channels of a maker's output, and its constants with their axes."""
        rank, op = len(self._shape(node.outputs[0])), node.op_type
        _require((op in _LINEAR and node.inputs[0] not in self._model.constants) or op in _NORMALIZATIONS)
        axis = rank - 1 if op in _LAST_AXIS else 1
        _require(rank > axis > 0 and not node.attributes.get("training_mode", 0))
        if op in _NORMALIZATIONS:
            _require(node.attributes.get("axis", -1) in (-1, rank - 1))
            _require(bool(node.attributes.get("spatial", 1)))
            return axis, [(name, 0, 1) for name in node.inputs[1:3] if name]
        transposed = op == "Conv" or bool(node.attributes.get("transB", 0))
        constants: list[tuple[str, int, Literal[1, -1]]] = [(node.inputs[1], 0 if transposed else 1, 1)]
        for bias in filter(None, node.inputs[2:3]):
            dims = self._constant(bias).dims
            _require(len(dims) > 0 and prod(dims) == dims[-1])
            constants.append((bias, len(dims) - 1, 1))
        _require(op != "MatMul" or len(self._constant(node.inputs[1]).dims) == 2)
        return axis, constants

    def _constant(self, name: str) -> TensorProto:
        constant = self._model.constants.get(name)
        _require(constant is not None)
        return cast("TensorProto", constant)

    def _scale(self, name: str, axis: int, sign: Literal[1, -1] = 1, repeat: int = 1) -> ScaledConstant:
        """Add a constant that only one node reads, and only once; it is expanded on an axis counted from the end."""
        constant = self._constant(name)
        private = len(self._model.consumers[name]) == 1 and name not in self._closed
        _require(private and constant.data_type == TensorProto.FLOAT)
        dims, channels = tuple(constant.dims), self._chain.channels
        own = axis + len(dims) if axis < 0 else axis  # negative if the constant does not have the axis
        one = ScaledConstant(name, own, sign, repeat)
        if axis < 0 and (own < 0 or dims[own] == 1):
            one = ScaledConstant(name, axis, sign, repeat, dims)
            _require(prod(one.expanded_dims(channels)) <= MOST_EXPANDED)
        else:
            _require(0 <= own < len(dims) and dims[own] == channels * repeat)
        self._chain.constants.append(one)
        return one

    def _join(self, node: Node, axis: int, repeat: int = 1) -> str:
        """Add the output of a node, its only one."""
        tensor = node.outputs[0]
        _require([name for name in node.outputs if name] == [tensor] and tensor not in self._closed)
        _require(is_default(node) and not node.scope)
        shape = self._shape(tensor)
        _require(self._model.elem_type(tensor) == TensorProto.FLOAT)
        _require(len(shape) > axis and shape[axis] == self._chain.channels * repeat)
        self._chain.tensors[tensor] = axis, repeat
        return tensor

    def _read(self, tensor: str, node: Node, index: int) -> str | None:
        """The output of a reader with the factors; ``None`` if its weight is divided by them."""
        (axis, repeat), shape = self._chain.tensors[tensor], self._shape(tensor)
        op, rank = node.op_type, len(shape)
        _require(is_default(node) and not node.scope)
        if op in SHAPE_SOURCES:
            return None
        if op in _LINEAR:
            _require(index == 0)
            self._absorb(tensor, node, axis, repeat)
            return None
        if op in ("Add", "Sub", "Div", "Mul"):
            if op in ("Add", "Sub"):
                _require(len(self._constant(node.inputs[1 - index]).dims) <= rank)
                self._scale(node.inputs[1 - index], axis - rank, repeat=repeat)
            else:
                _require(op == "Mul" or index == 0)
                self._products.append(node)
            _require(len(self._shape(node.outputs[0])) == rank)
            return self._join(node, axis, repeat)
        _require(index == 0)
        if op in _HOMOGENEOUS:
            _require(op not in _POOLS or axis < 2)
        elif op == "Transpose":
            order = list(cast("list[int]", node.attributes.get("perm") or range(rank)[::-1]))
            axis = order.index(axis)
        elif op == "Slice":
            _require(all(step > 0 for step in self._integers(node, 4, "steps") or ()))
        elif op in _REDUCTIONS:
            axes = self._integers(node, 1, "axes")
            reduced = {one % rank for one in axes} if axes else set(range(rank))
            _require(axis not in reduced)
            axis -= 0 if node.attributes.get("keepdims", 1) else sum(one < axis for one in reduced)
        else:
            _require(op in _RESHAPES)
            axis, merged = _place(shape, self._shape(node.outputs[0]), axis)
            repeat *= merged
        return self._join(node, axis, repeat)

    def _integers(self, node: Node, index: int, name: str) -> list[int] | None:
        """The integers of a constant input, in old opsets of the attribute with this name; ``None`` without them."""
        tensor = node.input_at(index)
        if not tensor:
            return cast("list[int] | None", node.attributes.get(name))
        self._constant(tensor)
        return [int(one) for one in self._model.array(tensor).reshape(-1)]

    def _absorb(self, source: str, node: Node, axis: int, repeat: int) -> None:
        dims = self._constant(node.inputs[1]).dims
        times = 1
        if node.op_type == "Conv":
            groups = node.number("group", 1)
            _require(axis == 1 and (groups == 1 or (dims[1] == 1 and dims[0] % groups == 0)))
            its_axis, times = (1, 1) if groups == 1 else (0, dims[0] // groups)
        else:
            _require(axis == len(self._shape(source)) - 1 and len(dims) == 2)
            _require(not node.attributes.get("transA", 0))
            its_axis = int(bool(node.attributes.get("transB", 0)))
        weight = self._scale(node.inputs[1], its_axis, -1, repeat * times)
        self._chain.absorbers.append(Absorber(node=node, source=source, axis=axis, weight=weight))


def _require(holds: bool) -> None:
    if not holds:
        raise _NotScalableError


def _place(before: tuple[int | None, ...], after: tuple[int | None, ...], axis: int) -> tuple[int, int]:
    """The axis of the channels after a reshape, and how many elements each element has on it."""
    behind = before[axis + 1 :]
    _require(None not in (*behind, before[axis]))
    size, inner = before[axis] or 0, prod(dim or 0 for dim in behind)
    for there in reversed(range(len(after))):
        rest = after[there + 1 :]
        if None in (*rest, after[there]) or inner % max(prod(dim or 0 for dim in rest), 1):
            break
        merged = inner // max(prod(dim or 0 for dim in rest), 1)
        if after[there] == size * merged and merged:
            return there, merged
    raise _NotScalableError


def scaled(values: Array, constant: ScaledConstant, exponents: Iterable[int], sign: int = 1) -> Array:
    """A constant multiplied by its factors, or divided by them with ``sign`` -1."""
    along = np.repeat(sign * constant.sign * np.array(tuple(exponents), np.int32), constant.repeat)
    shape = [1] * values.ndim
    shape[constant.axis] = -1
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.ldexp(values, along.reshape(shape)), values.dtype)


@dataclass(slots=True)
class ScaledValues:
    """The constants of a model with the factors of some changes."""

    model: Model
    values: dict[str, Array] = field(default_factory=dict)

    def of(self, tensor: str) -> Array:
        """The value of a constant."""
        return self.values[tensor] if tensor in self.values else self.model.array(tensor)

    def add(self, change: Equalization) -> bool:
        """Apply a change; ``False``, and nothing is changed, if it could not be undone bit for bit.

        It could not if a value became infinite, or too small to be exact.
        """
        found: dict[str, Array] = {}
        for constant in change.constants:
            before = constant.expanded(self.of(constant.tensor), len(change.exponents))
            after = found[constant.tensor] = scaled(before, constant, change.exponents)
            again = scaled(after, constant, change.exponents, -1)
            if not np.isfinite(after).all() or again.tobytes() != before.tobytes():
                return False
        self.values |= found
        return True


def equalized(model: Model, changes: Collection[Equalization]) -> Model:
    """The model with these factors, which its metadata holds. They have to fit, as `misfit_of` states."""
    if not changes:
        return model
    scaling = ScaledValues(model)
    if not all(map(scaling.add, changes)):
        raise PlacementError("channels cannot be scaled exactly", where=model.where)
    proto = _with_constants(model.flat, scaling.values)
    proto.metadata_props.add(key=EQUALIZED, value=json.dumps([change.record for change in changes]))
    return Model(proto, path=model.path)


def restored(proto: onnx.ModelProto, kept: Collection[str] = ()) -> onnx.ModelProto:
    """A model in the flat form without the factors that its metadata holds; constants in ``kept`` stay as they are."""
    if metadata(proto, EQUALIZED) is None:
        return proto
    constants = Model(proto).constants
    new: dict[str, Array] = {}
    for change in reversed(equalizations_of(proto, constants)):
        for constant in change.constants:
            name = constant.tensor
            if name not in kept:
                before = new[name] if name in new else numpy_helper.to_array(constants[name])
                new[name] = constant.collapsed(
                    scaled(before, constant, change.exponents, -1), change.exponents
                )
    found = _with_constants(proto, new)
    refill(found.metadata_props, [prop for prop in found.metadata_props if prop.key != EQUALIZED])
    return found


def equalizations_of(
    proto: onnx.ModelProto, constants: Mapping[str, TensorProto]
) -> tuple[Equalization, ...]:
    """The factors that the metadata of a model holds, of the ``constants`` of its float form.

    Damaged metadata holds none, and a change is omitted if not all its constants are there in its shapes.
    """
    try:
        changes = EQUALIZATIONS.validate_json(metadata(proto, EQUALIZED) or "[]")
    except ValidationError:
        return ()
    return tuple(
        change
        for change in changes
        if all(
            (tensor := constants.get(one.tensor)) is not None
            and tensor.data_type == TensorProto.FLOAT
            and _fits(one, tuple(tensor.dims), len(change.exponents))
            for one in change.constants
        )
    )


def _fits(constant: ScaledConstant, dims: tuple[int, ...], channels: int) -> bool:
    """Whether a constant has these dims in an equalized model, or in its float form."""
    if constant.dims is None:
        return 0 <= constant.axis < len(dims) and dims[constant.axis] == channels * constant.repeat
    return constant.axis < 0 and dims in (constant.dims, constant.expanded_dims(channels))


def misfit_of(model: Model, changes: Collection[Equalization]) -> str | None:
    """The reason why these factors would change a model's outputs; ``None`` if it can."""
    chains = {tuple(chain.constants): chain for chain in find_chains(model)} if changes else {}
    scaling = ScaledValues(model)
    for change in changes:
        chain, first = chains.get(change.constants), change.constants[0].tensor if change.constants else ""
        if chain is None or chain.channels != len(change.exponents):
            return f"the channels that '{first}' makes cannot be scaled in it"
        if not scaling.add(change):
            return f"values of '{first}', or of a weight behind it, are too large or too small to be scaled exactly"
    return None


def touched(
    model: Model, changes: Collection[Equalization], placement: Placement
) -> tuple[Equalization, ...]:
    """The changes of tensors or constants that a placement quantizes."""
    sites = {site.tensor for site in placement.sites}
    chains = {tuple(chain.constants): chain for chain in find_chains(model)} if changes else {}
    return tuple(
        change
        for change in changes
        if sites & {*chains[change.constants].tensors, *(one.tensor for one in change.constants)}
    )


def _with_constants(flat: onnx.ModelProto, new: Mapping[str, Array]) -> onnx.ModelProto:
    """A copy of a model in the flat form with other values of these constants."""
    proto = copy_model(flat, but={"node", "initializer"})
    proto.graph.initializer.extend(
        _stored(t, new[t.name]) if t.name in new else t for t in flat.graph.initializer
    )
    for node in flat.graph.node:
        proto.graph.node.append(node)
        if node.op_type == "Constant" and node.output[0] in new:
            value = next(a for a in proto.graph.node[-1].attribute if a.name == "value")
            value.t.CopyFrom(_stored(value.t, new[node.output[0]]))
    return proto


def _stored(before: TensorProto, values: Array) -> TensorProto:
    """A tensor with other values, in the same field; external data is included."""
    made = copied(before)
    for name in ("dims", "raw_data", "float_data", "external_data", "data_location"):
        made.ClearField(name)
    made.dims.extend(values.shape)
    if before.float_data:
        made.float_data.extend(values.reshape(-1).tolist())
    else:
        made.raw_data = np.ascontiguousarray(values).astype("<f4", copy=False).tobytes()
    return made
