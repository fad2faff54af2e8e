"""Equalization: channels of inner tensors are multiplied by powers of two, and their weights divided by these.

A product with a power of two is exact, so that all outputs stay the same, bit for bit, and the original constants can
be computed again. The factors begin at constants that make a tensor channel by channel, such as the scale and bias of a
normalization or the weight and bias of a convolution; they pass through operators that are homogeneous in each channel;
and each reader at the end is a linear operator whose constant weight is divided by them.
Where other operators read the tensor too, an inserted product has the factors, and the linear operators read that: see
`branches`.
Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721;
G. Xiao et al., "SmoothQuant", arXiv 2211.10438, for normalizations.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, Literal, NamedTuple, cast

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from pydantic import Field, TypeAdapter, ValidationError

from qdqspec._core.arrays import Array
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import SHAPE_SOURCES, is_default
from qdqspec.graph.protos import copied, metadata, refill, values_of_constants, with_value
from qdqspec.qdq.edit.branches import Branch, find_branches, with_branches, without_branches
from qdqspec.types import Placement

EQUALIZED = "qdqspec.equalized"  # model metadata: the factors that constants were multiplied by
LARGEST = 24  # exponent, of either sign: more than any that is chosen, and the factor is a float32

_POOLS = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})
_HOMOGENEOUS = _POOLS | {"Dropout", "Identity", "LeakyRelu", "PRelu", "Relu"}
_REDUCTIONS = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"})
_RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_LINEAR = frozenset({"Conv", "Gemm", "MatMul"})
_NORMALIZATIONS = frozenset(
    {"BatchNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
)
_LAST_AXIS = frozenset({"Gemm", "LayerNormalization", "MatMul", "RMSNormalization"})


class ScaledConstant(NamedTuple):
    """A constant multiplied by the channels' factors (``sign`` 1), or divided by them (-1), along an axis.

    Each channel has ``repeat`` neighbouring elements on the axis.
    """

    tensor: str
    axis: Annotated[int, Field(ge=0)]
    sign: Literal[1, -1] = 1
    repeat: Annotated[int, Field(ge=1)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalization:
    """Channels of a tensor multiplied by two to the power of ``exponents``, and the constants that change with them.

    With a ``branch`` the first constant is that of its inserted product.
    """

    exponents: tuple[Annotated[int, Field(ge=-LARGEST, le=LARGEST)], ...]
    constants: tuple[ScaledConstant, ...]
    branch: Branch | None = None

    @property
    def record(self) -> dict[str, object]:
        """The form in schemes and metadata."""
        found: dict[str, object] = {
            "exponents": self.exponents,
            "constants": [one._asdict() for one in self.constants],
        }
        return found if self.branch is None else found | {"branch": self.branch._asdict()}


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
    """Tensors whose channels can have common factors: from the operator ``maker`` to the operators ``absorbers``."""

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
    if any(change.branch is None for change in _read_held(model.flat)):
        return found  # its constants are restored by what its metadata holds already
    for node in model.nodes:
        if node.outputs and node.outputs[0] not in inside:
            try:
                chain = _Growth(model, fixed).chain(node)
            except _NotScalableError:
                continue
            inside.update(chain.tensors)
            found.append(chain)
    return found


class _Growth:
    """Follows the factors of one tensor to all of its readers."""

    def __init__(self, model: Model, fixed: Collection[str]) -> None:
        self._model = model
        self._closed = {*model.outputs, *model.captured, *fixed, *(i.name for i in model.flat.graph.input)}
        self._products: list[Node] = []

    def chain(self, maker: Node) -> Chain:
        """The chain of a node's output. Raises `_NotScalableError`."""
        tensor = maker.outputs[0]
        axis, constants = self._made(maker)
        channels = self._shape(tensor)[axis]
        _require(channels is not None and channels > 1)
        self._chain = Chain(maker=maker, channels=channels or 0, tensors={}, constants=[], absorbers=[])
        for name, its_axis in constants:
            self._scale(name, its_axis)
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

    def _made(self, node: Node) -> tuple[int, list[tuple[str, int]]]:
        """The axis of the channels of a maker's output, and its constants with their axes."""
        rank, op = len(self._shape(node.outputs[0])), node.op_type
        if op == "Mul" and len(set(node.inputs) & self._model.constants.keys()) == 1:
            (name,) = (one for one in node.inputs if one in self._model.constants)
            dims = list(self._model.constants[name].dims)
            wide = [index for index, dim in enumerate(dims) if dim != 1]
            _require(len(wide) == 1 and len(dims) <= rank)
            return rank - len(dims) + wide[0], [(name, wide[0])]
        _require((op in _LINEAR and node.inputs[0] not in self._model.constants) or op in _NORMALIZATIONS)
        axis = rank - 1 if op in _LAST_AXIS else 1
        _require(rank > axis > 0 and not node.attributes.get("training_mode", 0))
        if op in _NORMALIZATIONS:
            _require(node.attributes.get("axis", -1) in (-1, rank - 1))
            _require(bool(node.attributes.get("spatial", 1)))
            return axis, [(name, 0) for name in node.inputs[1:3] if name]
        transposed = op == "Conv" or bool(node.attributes.get("transB", 0))
        constants = [(node.inputs[1], 0 if transposed else 1)]
        for bias in filter(None, node.inputs[2:3]):
            dims = self._constant(bias).dims
            _require(len(dims) > 0 and prod(dims) == dims[-1])
            constants.append((bias, len(dims) - 1))
        _require(op != "MatMul" or len(self._constant(node.inputs[1]).dims) == 2)
        return axis, constants

    def _constant(self, name: str) -> TensorProto:
        constant = self._model.constants.get(name)
        _require(constant is not None)
        return cast("TensorProto", constant)

    def _scale(self, name: str, axis: int, sign: Literal[1, -1] = 1, repeat: int = 1) -> ScaledConstant:
        """Add a constant that only one node reads, and only once."""
        constant = self._constant(name)
        private = len(self._model.consumers[name]) == 1 and name not in self._closed
        _require(private and constant.data_type == TensorProto.FLOAT)
        _require(0 <= axis < len(constant.dims) and constant.dims[axis] == self._chain.channels * repeat)
        self._chain.constants.append(ScaledConstant(name, axis, sign, repeat))
        return self._chain.constants[-1]

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
                other = node.inputs[1 - index]
                self._scale(other, axis - rank + len(self._constant(other).dims), repeat=repeat)
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
            axis, merged = _follow_reshape(shape, self._shape(node.outputs[0]), axis)
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


def _follow_reshape(
    before: tuple[int | None, ...], after: tuple[int | None, ...], axis: int
) -> tuple[int, int]:
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
    shape = [-1 if index == constant.axis else 1 for index in range(values.ndim)]
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
        if change.branch is not None and change.branch.factors not in self.model.constants:
            self.values.setdefault(change.branch.factors, np.ones(len(change.exponents), np.float32))
        for constant in change.constants:
            before = self.of(constant.tensor)
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
    proto = _replace_constants(model.flat, scaling.values)
    branches = [change.branch for change in changes if change.branch is not None]
    with_branches(proto, model, branches, {one.factors: scaling.of(one.factors) for one in branches})
    records = [change.record for change in (*_read_held(model.flat), *changes)]
    refill(proto.metadata_props, [prop for prop in proto.metadata_props if prop.key != EQUALIZED])
    proto.metadata_props.add(key=EQUALIZED, value=json.dumps(records))
    return Model(proto, path=model.path)


def branches_of(model: Model) -> tuple[Equalization, ...]:
    """The changes of a model whose factors are in inserted products."""
    return tuple(change for change in _read_held(model.flat) if change.branch is not None)


def products_of(model: Model) -> frozenset[str]:
    """The names of the products that are inserted in a model."""
    return frozenset(change.branch.product for change in branches_of(model) if change.branch is not None)


def restored(proto: onnx.ModelProto, kept: Collection[str] = ()) -> onnx.ModelProto:
    """A model in the flat form without the factors that its metadata holds; constants in ``kept`` stay as they are."""
    if metadata(proto, EQUALIZED) is None:
        return proto
    constants = Model(proto).constants
    new: dict[str, Array] = {}
    changes = equalizations_of(proto, constants)
    for change in reversed(changes):
        for constant in change.constants:
            name = constant.tensor
            if name not in kept:
                before = new[name] if name in new else numpy_helper.to_array(constants[name])
                new[name] = scaled(before, constant, change.exponents, -1)
    found = _replace_constants(proto, new)
    without_branches(found, [change.branch for change in changes if change.branch is not None])
    refill(found.metadata_props, [prop for prop in found.metadata_props if prop.key != EQUALIZED])
    return found


def _read_held(proto: onnx.ModelProto) -> tuple[Equalization, ...]:
    """The changes that the metadata of a model holds; damaged metadata holds none."""
    try:
        return EQUALIZATIONS.validate_json(metadata(proto, EQUALIZED) or "[]")
    except ValidationError:
        return ()


def equalizations_of(
    proto: onnx.ModelProto, constants: Mapping[str, TensorProto]
) -> tuple[Equalization, ...]:
    """The factors that the metadata of a model holds, of the ``constants`` of its float form.

    Damaged metadata holds none, and a change is omitted if not all its constants are there in its shapes. The factors
    of a product are in the model itself.
    """
    own = {tensor.name: tensor for tensor in proto.graph.initializer}

    def fits(change: Equalization, one: ScaledConstant) -> bool:
        is_factor = change.branch is not None and one.tensor == change.branch.factors
        tensor = (own if is_factor else constants).get(one.tensor)
        if tensor is None:
            return False
        size = list(tensor.dims)[one.axis : one.axis + 1]
        return tensor.data_type == TensorProto.FLOAT and size == [len(change.exponents) * one.repeat]

    return tuple(
        change for change in _read_held(proto) if all(fits(change, constant) for constant in change.constants)
    )


def branched(model: Model) -> tuple[Equalization, ...]:
    """A change without effect, all exponents zero, for each branch of a model that may have factors."""
    sources = {absorber.source for chain in find_chains(model) for absorber in chain.absorbers}
    return tuple(_make_unscaled(model, branch) for branch in find_branches(model, sources))


def _make_unscaled(model: Model, branch: Branch) -> Equalization:
    weights = [
        ScaledConstant(node.inputs[1], int(bool(node.attributes.get("transB", 0))), -1)
        for node in map(model.by_name.__getitem__, branch.readers)
    ]
    shape = model.shape(branch.tensor) or ()
    return Equalization(
        exponents=(0,) * (shape[-1] or 0),
        constants=(ScaledConstant(branch.factors, 0), *weights),
        branch=branch,
    )


def misfit_of(model: Model, changes: Collection[Equalization]) -> str | None:
    """The reason why these factors would change a model's outputs; ``None`` if it can."""
    inserted = [change for change in changes if change.branch is not None]
    others = [change for change in changes if change.branch is None]
    if (why := _find_misfit(model, inserted, branched(model) if inserted else [])) is not None:
        return why
    model = equalized(model, inserted)
    chains = find_chains(model) if others else []
    return _find_misfit(model, others, [chain.by((0,) * chain.channels) for chain in chains])


def _find_misfit(
    model: Model, changes: Iterable[Equalization], possible: Collection[Equalization]
) -> str | None:
    """The reason why changes cannot be made, of those that are ``possible`` with other exponents."""
    known = {one.constants: replace(one, exponents=()) for one in possible}
    channels = {one.constants: len(one.exponents) for one in possible}
    scaling = ScaledValues(model)
    for change in changes:
        first = change.constants[0].tensor if change.constants else ""
        is_known = known.get(change.constants) == replace(change, exponents=())
        if not is_known or channels[change.constants] != len(change.exponents):
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


def _replace_constants(flat: onnx.ModelProto, new: Mapping[str, Array]) -> onnx.ModelProto:
    """A copy of a model in the flat form with other values of these constants."""
    proto = copied(flat)
    for tensor in proto.graph.initializer:
        if tensor.name in new:
            tensor.CopyFrom(_store_values(tensor, new[tensor.name]))
    for node in proto.graph.node:
        for name, value in values_of_constants([node]) if {*node.output} & new.keys() else ():
            node.CopyFrom(with_value(node, _store_values(value, new[name])))
    return proto


def _store_values(before: TensorProto, values: Array) -> TensorProto:
    """A tensor with other values, in the same field; external data is included."""
    made = copied(before)
    for name in ("raw_data", "float_data", "external_data", "data_location"):
        made.ClearField(name)
    if before.float_data:
        made.float_data.extend(values.reshape(-1).tolist())
    else:
        made.raw_data = np.ascontiguousarray(values).astype("<f4", copy=False).tobytes()
    return made
