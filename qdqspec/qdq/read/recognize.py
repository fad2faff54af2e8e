"""Recognizes the Q/DQ pairs of a model, made by any tool, for stripping, import and comparison.

Pairs are recognized by structure, never by name. Relu and Clip that a quantizing tool removed because a zero point cuts
off the same values are restored: quantizers remove them with unsigned activations, and without the pairs such a model
computes something else. Without the original this is a guess: a zero point at the end of the range may
also come from calibration. No Relu is inserted if the graph shows that none can have been removed. `FloatWeights`
restores names and values of float weights behind a DequantizeLinear.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

from qdqspec._core.arrays import Array
from qdqspec.graph.dynamic_kernels import CARRIED, QUANTIZE
from qdqspec.graph.dynamic_pairs import with_pairs
from qdqspec.graph.fold import with_constant_numbers
from qdqspec.graph.model import QDQ_OPS, Model, Node
from qdqspec.graph.ops import COPY_OPS, FLOATS, is_default
from qdqspec.graph.protos import copied, is_external, metadata
from qdqspec.graph.trt import (
    DOMAIN,
    DYNAMIC_OPS,
    FP4_DYNAMIC,
    MXFP8_DEQUANTIZE,
    MXFP8_DYNAMIC,
    MXFP8_QUANTIZE,
    PAIR_OPS,
    is_pair_op,
    of_e8m0,
)
from qdqspec.qdq.quantize.scales import along

_DOMAINS = ("", "ai.onnx", "com.microsoft")


def recognize(
    model: Model, reference: Model | None = None, *, activations: Model | None = None
) -> Recognition:
    """Examine each node of a model; ``reference`` is the model before quantization, at the same opset.

    ``activations`` replaces it if only nodes have to be restored: a removed Relu or Clip, and what kernels replaced.
    """
    model = with_pairs(with_constant_numbers(model), reference or activations)
    found = Recognition(
        model, FloatWeights(model, reference), ActivationRestorer(model, activations or reference)
    )
    found.find()
    return found


@dataclass(slots=True)
class Recognition:
    """The Q/DQ of a model, and its replacement in the model without.

    ``removed`` are the nodes to remove, by index; ``floats`` the DequantizeLinear nodes whose weights are
    restored, by name; ``place`` the name of such a weight by the integers it replaces; ``left`` the nodes
    that cannot be removed, by reason; ``rescaled`` the tensors before removed pairs that rescale values.
    """

    model: Model
    weights: FloatWeights
    restorer: ActivationRestorer
    alias: dict[str, str] = field(default_factory=dict)  # tensor: its replacement
    removed: set[int] = field(default_factory=set)
    floats: dict[str, Node] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)  # initializers
    left: dict[str, list[str]] = field(default_factory=dict)
    rescaled: list[str] = field(default_factory=list)
    _stored: dict[str, list[str]] = field(default_factory=dict)  # integer forms of each weight

    def find(self) -> None:
        """Classify each node."""
        for node in self.model.nodes:
            if is_op(node, "DequantizeLinear") and not makes_scale(self.model, node.outputs[0]):
                self._find_dequantize(node)
        for node in self.model.nodes:
            if is_op(node, "QuantizeLinear"):
                self._find_quantize(node)
        # The place of each weight. Of several integer forms, insertion puts one in place and others
        # at the end.
        order = {name: index for index, name in enumerate(self.model.initializers)}
        for name, forms in self._stored.items():
            self.place.setdefault(min(forms, key=lambda form: order.get(form, -1)), name)
        self._remove_unused()

    def _find_dequantize(self, node: Node) -> None:
        source, reason = node.inputs[0], ""
        producer = self.model.producer.get(source)
        if producer is not None and is_op(producer, "QuantizeLinear") and source == producer.outputs[0]:
            reason = self._take_pair(producer, node)
        elif source not in self.model.constants:
            maker = "a graph input" if producer is None else producer.op_type
            reason = f"reads what no QuantizeLinear made, but {maker}"
        elif not is_constant(self.model, node.inputs):
            reason = "has a scale or zero point that is computed"
        else:
            self._take_weight(node)
        if reason:
            self.left.setdefault(reason, []).append(node.name)
        else:
            self.removed.add(node.index)

    def _take_pair(self, quantize: Node, dequantize: Node) -> str:
        """Replace the tensor after the pair by that before it; return the reason if that is impossible."""
        before, after = quantize.inputs[0], dequantize.outputs[0]
        types = {self.model.elem_type(before), self.model.elem_type(after)} - {None}
        if len(types) > 1:
            return "changes the element type"
        if self.restorer.take(quantize, dequantize):
            return ""
        if self._rescales(quantize, dequantize):
            self.rescaled.append(before)
        before = self.now(before)
        if self._leaves_body(before, after):
            return "makes an output of a body out of a tensor of another graph"
        if after not in self.model.outputs:
            self.alias[after] = before
        elif before in self.model.producer and before not in self.model.outputs:
            self.alias[before] = after  # a graph output keeps its name: the producer makes it now
        else:
            return "makes a graph output out of an input or another output"
        return ""

    def _rescales(self, quantize: Node, dequantize: Node) -> bool:
        """Whether constant numbers of ONNX's own Q and DQ differ: then the pair does more than rounding."""
        nodes = quantize, dequantize
        if any(node.domain == DOMAIN or not is_constant(self.model, node.inputs[1:]) for node in nodes):
            return False
        scales = [scale_of(self.model, node) for node in nodes]
        zeros = [self.model.array(name) if (name := node.input_at(2)) else np.zeros(1) for node in nodes]
        return not all(_are_equal(*both) for both in (scales, zeros))

    def _leaves_body(self, before: str, after: str) -> bool:
        """Whether a tensor is an output of a body, and its replacement is of another graph."""
        if not self.model.has_bodies:
            return False
        readers = [self.model.by_name[end.node] for end in self.model.consumers.get(after, ())]
        maker = self.model.producer.get(before)
        scope = "" if maker is None else maker.scope
        return any(reader.is_marker and reader.scope != scope for reader in readers)

    def _take_weight(self, node: Node) -> None:
        name = self.weights.name(node)
        if name != node.outputs[0]:
            self.alias[node.outputs[0]] = name
            if name in self.model.constants:
                return
        if name not in self.floats:
            self.floats[name] = node
            self.weights.note(node, name)
        self._stored.setdefault(name, []).append(node.inputs[0])

    def _find_quantize(self, node: Node) -> None:
        ends = [end for output in node.outputs for end in self.model.consumers.get(output, ())]
        if all(self._is_removed(self.model.by_name[end.node]) for end in ends) and not any(
            map(self._is_read_outside, node.outputs)
        ):
            self.removed.add(node.index)
        else:
            self.left.setdefault("has an integer output that others read", []).append(node.name)

    def _is_removed(self, node: Node) -> bool:
        """Whether a node is removed, or makes only scales of removed nodes."""
        if node.index in self.removed or not makes_scale(self.model, node.outputs[0]):
            return node.index in self.removed
        ends = self.model.consumers[node.outputs[0]]
        return all(self.model.by_name[end.node].index in self.removed for end in ends)

    def _is_read_outside(self, tensor: str) -> bool:
        return tensor in self.model.outputs or tensor in self.model.subgraph_reads

    def _remove_unused(self) -> None:
        """Remove the constants, and the nodes that computed them, that only removed nodes had read."""
        work: list[str] = []
        for node in (self.model.nodes[index] for index in sorted(self.removed)):
            stored = is_op(node, "DequantizeLinear") and node.inputs[0] in self.model.constants
            work += node.inputs if stored else node.inputs[1:]  # not the data that passes through
        while work:
            name = work.pop()
            if not name or name in self.dropped or not self._is_unread(name):
                continue
            producer = self.model.producer.get(name)
            if producer is not None and producer.index in self.removed:
                continue  # a pair's own constants are always removed
            if producer is None:
                self.dropped.update({name} & self.model.initializers.keys())
            elif name in self.place:
                self.dropped.add(name)
            elif all(self._is_unread(output) for output in producer.outputs if output):
                self.removed.add(producer.index)
                work.extend(producer.inputs)

    def _is_unread(self, tensor: str) -> bool:
        ends = self.model.consumers.get(tensor, ())
        return not self._is_read_outside(tensor) and all(
            self.model.by_name[e.node].index in self.removed for e in ends
        )

    def float_weight(self, name: str) -> TensorProto:
        """The float weight of that name. Computed on demand: all weights together are as large as the float model."""
        return self.weights.tensor(self.floats[name], name)

    def now(self, tensor: str) -> str:
        """The name of a tensor in the model without Q/DQ."""
        while tensor in self.alias:
            tensor = self.alias[tensor]
        return tensor


def _are_equal(one: Array, other: Array) -> bool:
    """Whether all values are equal, also where one array has a single one for all."""
    fits = one.shape == other.shape or 1 in (one.size, other.size)
    return fits and bool((one.astype(np.float64) == other.astype(np.float64)).all())


def is_op(node: Node, op_type: str) -> bool:
    """Whether a node is a QuantizeLinear or DequantizeLinear, or another operator with that role in a pair."""
    if node.domain == DOMAIN:
        return PAIR_OPS.get(node.op_type, node.op_type) == op_type
    if node.op_type == QUANTIZE:
        return op_type == "QuantizeLinear" and node.domain in _DOMAINS
    return node.op_type == op_type and node.domain in _DOMAINS


def is_qdq(node: Node) -> bool:
    """Whether a node is either of the two."""
    return is_op(node, "QuantizeLinear") or is_op(node, "DequantizeLinear")


@dataclass(slots=True)
class ActivationRestorer:
    """Finds the pairs that replace an activation function, and the nodes to restore.

    ``exact`` are the reference's own nodes, by the index of the node they follow; ``relus`` are
    DequantizeLinear nodes, by index, that become a Relu, with the tensor it reads.
    """

    model: Model
    reference: Model | None
    exact: dict[int, Node] = field(default_factory=dict)
    relus: dict[int, str] = field(default_factory=dict)

    def take(self, quantize: Node, dequantize: Node) -> bool:
        """Record the pair if a Relu must replace it. True if the pair cannot simply be removed."""
        tensor = quantize.inputs[0]
        producer = self.model.producer.get(tensor)
        if producer is None or is_qdq(producer) or is_dynamic(quantize):
            return False  # tools remove no Relu or Clip of an input
        if metadata(quantize.proto, CARRIED) is not None:
            return False  # a pair of ours
        after = dequantize.outputs[0]
        # A graph output keeps its name through a pair; other tensors get the name of the tensor before it.
        known = after if after in self.model.outputs else tensor
        original = self.reference.producer.get(known) if self.reference else None
        if original is not None:
            if original.op_type in ("Relu", "Clip") and self._fits(original):
                self.exact[producer.index] = original
            return False
        if not starts_at_zero(self.model, quantize):
            return False  # it cuts off nothing that the graph shows
        if never_negative(self.model, tensor) or cut_at_zero(self.model, tensor):
            return False
        self.relus[dequantize.index] = tensor
        return True

    def constants(self) -> set[str]:
        """Constants that the restored nodes read and the model lacks: bounds of a Clip."""
        read = {name for node in self.exact.values() for name in node.inputs[1:] if name}
        return read - self.model.constants.keys()

    def _fits(self, original: Node) -> bool:
        known = self.reference.constants if self.reference else {}
        free = original.inputs[0] not in self.model.producer and original.inputs[0] not in self.model.inputs
        return free and all(name in known for name in original.inputs[1:] if name)


# Proves from the graph which tensors have no negative values.
# Used where a Q/DQ pair may replace a Relu that a quantizing tool removed: on a tensor that is never
# negative, or before a Relu, nothing was removed.

# Their results are never negative, for any operands.
_NEVER_NEGATIVE = frozenset(
    {
        "Abs", "Exp", "HardSigmoid", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Relu", "Sigmoid", "Softmax",
        "Softplus", "Sqrt",
    }
)  # fmt: skip

# Their results are never negative if no operand is: they copy, pool, add or multiply values.
_KEEPS_SIGN = COPY_OPS | {
    "Add", "AveragePool", "Cast", "Concat", "Conv", "ConvTranspose", "Div", "Gemm", "GlobalAveragePool",
    "GlobalMaxPool", "MatMul", "Max", "MaxPool", "Mul", "Pow", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
    "Sum",
}  # fmt: skip
_UNSIGNED = (TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64, TensorProto.BOOL)
_REDUCES = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
# a Relu after them cuts off the same values
_PASSES = COPY_OPS | {"MaxPool", "QuantizeLinear", "DequantizeLinear"}


def never_negative(model: Model, tensor: str, depth: int = 4) -> bool:
    """Whether up to ``depth`` operators before a tensor prove that no value is below zero. False if unknown."""
    if tensor in model.constants:
        values = model.array(tensor)
        return values.dtype.kind in "fiu" and bool((values >= 0).all())
    if model.elem_type(tensor) in _UNSIGNED:
        return True
    node = model.producer.get(tensor)
    if node is None or depth == 0 or not is_default(node):
        return False
    if node.op_type in _NEVER_NEGATIVE or _clips_at_zero(model, node):
        return True
    if node.op_type == "DequantizeLinear":
        return starts_at_zero(model, node)
    if node.op_type == "Mul" and len(set(node.inputs)) == 1:  # a square
        return True
    if node.op_type not in _KEEPS_SIGN or any(node.number(factor, 1.0) < 0 for factor in ("alpha", "beta")):
        return False
    return all(never_negative(model, name, depth - 1) for name in _values(node))


def cut_at_zero(model: Model, tensor: str) -> bool:
    """Whether a Relu, or a Clip at zero, reads a tensor: directly, or after nodes that copy or pool it."""
    waiting, seen = [tensor], {tensor}
    while waiting:
        for end in model.consumers.get(waiting.pop(), ()):
            node = model.by_name[end.node]
            if end.input or not is_default(node):
                continue
            if node.op_type == "Relu" or _clips_at_zero(model, node):
                return True
            if node.op_type in _PASSES:
                waiting.extend({*node.outputs} - seen)
                seen.update(node.outputs)
    return False


def _clips_at_zero(model: Model, node: Node) -> bool:
    """Whether a node is a Clip whose lower bound is known and at least zero."""
    if node.op_type != "Clip" or not is_default(node):
        return False
    if bound := node.input_at(1):
        return never_negative(model, bound, 0)
    return node.number("min", -1.0) >= 0  # an attribute before opset 11


def starts_at_zero(model: Model, node: Node) -> bool:
    """Whether the smallest value that a Q or DQ represents is zero: its zero point is the lowest integer."""
    if not node.input_at(2):  # a zero point of 0
        integers = node.outputs[0] if is_op(node, "QuantizeLinear") else node.inputs[0]
        return model.elem_type(integers) in _UNSIGNED
    if node.input_at(2) not in model.constants:
        return False
    zero_point = model.array(node.inputs[2])
    if zero_point.dtype not in (np.uint8, np.int8, np.uint16, np.int16):
        return False
    return bool((zero_point == np.iinfo(zero_point.dtype).min).all())


def _values(node: Node) -> list[str]:
    """The operands that are values; other inputs are axes, shapes and indices."""
    if node.op_type == "Pad":
        return [name for name in (*node.inputs[:1], *node.inputs[2:3]) if name]
    if node.op_type in COPY_OPS or node.op_type in _REDUCES:
        return [*node.inputs[:1]]
    return [name for name in node.inputs if name]


# Default axis and block, as in `qdqspec.graph.trt`.
_DEFAULTS = {
    FP4_DYNAMIC: (1, 16),
    MXFP8_DYNAMIC: (-1, 32),
    MXFP8_QUANTIZE: (1, 32),
    MXFP8_DEQUANTIZE: (1, 32),
}


@dataclass(slots=True)
class FloatWeights:
    """Finds the float form of integer weights, in the reference if it has them."""

    model: Model
    reference: Model | None
    restored: list[str] = field(default_factory=list)
    dequantized: list[str] = field(default_factory=list)

    def name(self, node: Node) -> str:
        """The name of the weight behind this DequantizeLinear in the model without Q/DQ.

        Our own nodes record it; else it is the tensor that the node's consumer reads in the reference; else
        the integer tensor's name without the suffix ``_quantized``; else the node's output.
        """
        if node.outputs[0] in self.model.outputs:
            return node.outputs[0]
        name = (
            metadata(node.proto, CARRIED)
            or self._name_in_reference(node)
            or node.inputs[0].removesuffix("_quantized")
        )
        return name if name != node.inputs[0] and self._is_free(name, node) else node.outputs[0]

    def tensor(self, node: Node, name: str) -> TensorProto:
        """The float weight: the reference's own bytes, or the integers dequantized."""
        original = self._original(node, name)
        if original is None or self.reference is None:
            return numpy_helper.from_array(dequantized(self.model, node), name)
        return within_reach(original, self.reference, self.model)

    def note(self, node: Node, name: str) -> None:
        """Record the source of the float weight."""
        (self.dequantized if self._original(node, name) is None else self.restored).append(name)

    def _original(self, node: Node, name: str) -> TensorProto | None:
        """The reference's constant of that name and shape."""
        found = self.reference.constants.get(name) if self.reference else None
        same = found is not None and list(found.dims) == list(self.model.constants[node.inputs[0]].dims)
        return found if same else None

    def _name_in_reference(self, node: Node) -> str | None:
        if self.reference is None:
            return None
        shape = tuple(self.model.constants[node.inputs[0]].dims)
        for end in self.model.consumers.get(node.outputs[0], ()):
            reader = self.reference.by_name.get(end.node)
            if reader is None or end.input >= len(reader.inputs):
                continue
            name = reader.inputs[end.input]
            constant = self.reference.constants.get(name)
            if constant is not None and tuple(constant.dims) == shape:
                return name
        return None

    def _is_free(self, name: str, node: Node) -> bool:
        """Whether the name is unused, this node's output, or the weight itself."""
        if name == node.outputs[0]:
            return True
        known, integers = self.model.constants.get(name), self.model.constants[node.inputs[0]]
        if known is not None:
            return known.data_type in FLOATS and tuple(known.dims) == tuple(integers.dims)
        return name not in self.model.producer and name not in self.model.inputs


def dequantized(model: Model, node: Node) -> Array:
    """The values of a DequantizeLinear of a constant, in the type of its scale or of its attribute.

    Per tensor, per channel (any axis) and blocked, after the ONNX operator's definition.
    """
    integers = model.array(node.inputs[0]).astype(np.float64)  # exact for 32-bit integers and 8-bit floats
    scale = scale_of(model, node)
    dtype = node.number("output_dtype", 0)
    if dtype:
        scale = scale.astype(np.float32)  # a power of two may underflow in the type of the result
    axis, block = blocks_of(node)
    given = node.input_at(2)
    zero_point = model.array(given).astype(np.float64) if given else np.zeros(())
    steps = integers - along(zero_point, integers.shape, axis, block)
    real: Array = steps.astype(scale.dtype) * along(scale, integers.shape, axis, block)
    return real.astype(tensor_dtype_to_np_dtype(dtype)) if dtype else real


def blocks_of(node: Node) -> tuple[int, int]:
    """The axis of a Q or DQ, which may be negative, and the number of elements per scale; 0 without blocks."""
    axis, block = _DEFAULTS.get(node.op_type, (1, 0)) if is_pair_op(node.proto) else (1, 0)
    return node.number("axis", axis), node.number("block_size", block)


def scale_of(model: Model, node: Node) -> Array:
    """The scale of a Q or DQ, which may be a dequantized constant, as in NVFP4."""
    maker = model.producer.get(node.inputs[1])
    if node.inputs[1] not in model.constants and maker is not None:
        return dequantized(model, maker)
    scale = model.array(node.inputs[1])
    return of_e8m0(scale) if node.op_type in (MXFP8_QUANTIZE, MXFP8_DEQUANTIZE) else scale


def within_reach(tensor: TensorProto, owner: Model, reader: Model) -> TensorProto:
    """The tensor as a model in ``reader``'s folder can find it: external data is not moved.

    Its file may be outside that folder, which ONNX does not allow: such data is included when the model is
    written.
    """
    if not is_external(tensor) or owner.path is None or reader.path is None:
        return tensor
    if owner.path.parent == reader.path.parent:
        return tensor
    moved = copied(tensor)
    for entry in moved.external_data:
        if entry.key == "location":
            entry.value = os.path.relpath(owner.path.parent / entry.value, reader.path.parent)
    return moved


def is_constant(model: Model, tensors: tuple[str, ...]) -> bool:
    """Whether all these tensors (empty names aside) are constants of the model, or dequantized scales."""
    return all(
        name in model.constants
        or (makes_scale(model, name) and model.producer[name].inputs[0] in model.constants)
        for name in tensors
        if name
    )


def makes_scale(model: Model, tensor: str) -> bool:
    """Whether a DequantizeLinear makes a tensor from constants that is only used as a scale.

    Its input may also be the scales that dynamic quantization computed.
    """
    maker = model.producer.get(tensor)
    ends = model.consumers.get(tensor, ())
    return (
        maker is not None
        and maker.op_type == "DequantizeLinear"
        and all(name in model.constants for name in maker.inputs[1:] if name)
        and (maker.inputs[0] in model.constants or found_scales(model, maker.inputs[0]) is not None)
        and bool(ends)
        and all(end.input == 1 and model.by_name[end.node].op_type in QDQ_OPS for end in ends)
    )


def found_scales(model: Model, tensor: str) -> Node | None:
    """The node that computed these scales of blocks in dynamic quantization; ``None`` for other tensors."""
    maker = model.producer.get(tensor)
    return maker if maker is not None and is_dynamic(maker) and tensor in maker.outputs[1:] else None


def is_dynamic(node: Node) -> bool:
    """Whether a node computes scales while it quantizes: of blocks, or one of the whole tensor."""
    if node.op_type == QUANTIZE:
        return is_default(node)
    return node.op_type in DYNAMIC_OPS and is_pair_op(node.proto)
