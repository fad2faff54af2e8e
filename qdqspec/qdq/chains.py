"""Finds channels that can be scaled: tensors whose channels can have common factors, and places for products.

The factors begin at constants that make a tensor channel by channel, such as the scale and bias of a normalization or
the weight and bias of a convolution; they pass through operators that are homogeneous in each channel; and each reader
at the end is a linear operator whose constant weight is divided by them. Where other operators read the tensor too, as
the residual sum behind a normalization of BERT, an inserted product can have the factors: it takes a small share of the
time of the linear operators behind it. `qdqspec.qdq.equalize` applies the factors.
Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721;
G. Xiao et al., "SmoothQuant", arXiv 2211.10438, for normalizations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal, NamedTuple, cast

import onnx
from onnx import TensorProto
from pydantic import Field, TypeAdapter, ValidationError

from qdqspec.graph import Model, Node
from qdqspec.graph.ops import SHAPE_SOURCES, is_default, summed_axis
from qdqspec.graph.protos import metadata

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
# behind these an inserted product may have the factors
_BEFORE_PRODUCTS = frozenset(
    {
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        *("EmbedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    }
)


class Branch(NamedTuple):
    """The linear operators, by name, that read the product of a tensor with factors in place of the tensor."""

    tensor: str
    readers: tuple[str, ...]

    @property
    def product(self) -> str:
        """The name of the inserted node, and of its output."""
        return f"{self.tensor}_scaled"

    @property
    def factors(self) -> str:
        """The name of the constant with a factor for each channel."""
        return f"{self.tensor}_factors"


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

    @staticmethod
    def read(records: object) -> tuple[Equalization, ...]:
        """The changes with these records. Raises ``ValueError`` for other data."""
        return EQUALIZATIONS.validate_python(records)

    @property
    def record(self) -> dict[str, object]:
        """The form in schemes and metadata."""
        found: dict[str, object] = {
            "exponents": self.exponents,
            "constants": [one._asdict() for one in self.constants],
        }
        return found if self.branch is None else found | {"branch": self.branch._asdict()}


EQUALIZATIONS = TypeAdapter(tuple[Equalization, ...])  # reads what `Equalization.record` makes


def held_equalizations(proto: onnx.ModelProto) -> tuple[Equalization, ...]:
    """The changes that the metadata of a model holds; damaged metadata holds none."""
    try:
        return EQUALIZATIONS.validate_json(metadata(proto, EQUALIZED) or "[]")
    except ValidationError:
        return ()


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
    if any(change.branch is None for change in held_equalizations(model.flat)):
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
            dims = self._constant(node.inputs[1]).dims
            its_axis, times = summed_axis(node), 1
            if op == "Conv":
                groups = node.number("group", 1)
                _require(axis == 1 and (groups == 1 or (dims[1] == 1 and dims[0] % groups == 0)))
                its_axis, times = (1, 1) if groups == 1 else (0, dims[0] // groups)
            else:
                _require(axis == rank - 1 and len(dims) == 2 and not node.attributes.get("transA", 0))
            weight = self._scale(node.inputs[1], its_axis, -1, repeat * times)
            self._chain.absorbers.append(Absorber(node=node, source=tensor, axis=axis, weight=weight))
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


def branched(model: Model, *, least_outputs: int = 256) -> tuple[Equalization, ...]:
    """A change without effect, all exponents zero, for each branch of a model that may have factors, in graph order.

    The readers are MatMul and Gemm whose constant weights nothing else reads. They read a normalization that needs no
    product otherwise, and have ``least_outputs`` together, so that the product takes a small share of their time.
    """
    readers: dict[str, list[Node]] = {}
    read_elsewhere = {*model.outputs, *model.captured, *(value.name for value in model.flat.graph.input)}
    for node in model.nodes:
        if _may_scale(model, node) and node.inputs[1] not in read_elsewhere:
            readers.setdefault(node.inputs[0], []).append(node)
    absorbed = {absorber.source for chain in find_chains(model) for absorber in chain.absorbers}
    known = {*model.producer, *model.constants, *model.inputs, *model.by_name}
    changes = []
    for tensor, nodes in readers.items():
        branch = Branch(tensor, tuple(node.name for node in nodes))
        if (
            tensor in absorbed
            or not _is_normalized(model, tensor)
            or {branch.product, branch.factors} & known
        ):
            continue
        weights = [ScaledConstant(node.inputs[1], summed_axis(node), -1) for node in nodes]
        if sum(model.constants[one.tensor].dims[1 - one.axis] for one in weights) >= least_outputs:
            exponents = (0,) * ((model.shape(tensor) or ())[-1] or 0)
            constants = (ScaledConstant(branch.factors, 0), *weights)
            changes.append(Equalization(exponents=exponents, constants=constants, branch=branch))
    return tuple(changes)


def _is_normalized(model: Model, tensor: str) -> bool:
    """Whether a tensor is the output of a normalization, or of its last operators: a product and a sum by channel."""
    maker = model.producer.get(tensor)
    if maker is None or maker.outputs[0] != tensor:
        return False
    if maker.op_type in _BEFORE_PRODUCTS:
        return True
    for op_type in ("Add", "Mul"):  # with one constant vector each
        if maker is None or maker.op_type != op_type:
            return False
        if sum(name in model.constants for name in maker.inputs) != 1:
            return False
        constant, other = sorted(maker.inputs, key=lambda name: name not in model.constants)
        if len(model.constants[constant].dims) != 1:
            return False
        maker = model.producer.get(other)
    return maker is not None


def _may_scale(model: Model, node: Node) -> bool:
    """Whether a linear operator's weight can be divided by factors of its input's last axis."""
    if node.op_type not in ("Gemm", "MatMul") or not is_default(node) or node.scope:
        return False
    source, weight = node.inputs[0], model.constants.get(node.inputs[1])
    shape = model.shape(source)
    if weight is None or shape is None or node.attributes.get("transA", 0) or source in model.constants:
        return False
    axis = summed_axis(node)
    is_private = len(model.consumers[node.inputs[1]]) == 1
    is_plain = weight.data_type == TensorProto.FLOAT and model.elem_type(source) == TensorProto.FLOAT
    has_channels = len(shape) > 1 and len(weight.dims) == 2 and shape[-1] == weight.dims[axis]
    return is_private and is_plain and has_channels and weight.dims[axis] > 1
