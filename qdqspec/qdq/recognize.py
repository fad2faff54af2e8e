"""Recognizes the Q/DQ pairs of a model, made by any tool, for stripping, import and comparison.

Pairs are recognized by structure, never by name. Relu and Clip that a quantizing tool removed because a zero point cuts
off the same values are restored: quantizers remove them with unsigned activations, and without the pairs such a model
computes something else. Without the original this is a guess: a zero point at the end of the range may
also come from calibration. No Relu is inserted if the graph shows that none can have been removed. Names and values of
float weights behind a DequantizeLinear are restored too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto, numpy_helper

from qdqspec.graph import Model, Node, fold_constants
from qdqspec.graph.ops import COPY_OPS, FLOATS, OF_PAIRS, QDQ_OPS, is_default
from qdqspec.graph.protos import copied, is_external, metadata
from qdqspec.graph.trt import is_pair_op
from qdqspec.qdq.dynamic_kernels import CARRIED
from qdqspec.qdq.dynamic_pairs import with_pairs
from qdqspec.qdq.formats import along
from qdqspec.qdq.pair_numbers import (
    RESCALES,
    UNEQUAL,
    blocks_of,
    dequantized,
    is_constant,
    is_dynamic,
    is_op,
    is_qdq,
    makes_scale,
    read_params,
    scale_of,
)
from qdqspec.qdq.skeleton import find_same_nodes


def with_constant_numbers(model: Model) -> Model:
    """The model with scales, zero points and stored integers of Q and DQ as constants where constants determine them.

    So are the integers of a weight behind a Q if other operators, such as a Clip, change them before the DQ. This
    decides for all readers of pairs what is constant: see `fold_constants`.
    """
    computed: set[str] = set()
    for node in model.nodes:
        if node.op_type in QDQ_OPS and (is_default(node) or is_pair_op(node.proto)):
            first = 0 if node.op_type == "DequantizeLinear" else 1
            computed.update(name for name in node.inputs[first:] if name)
    computed -= model.constants.keys()
    makers = [model.producer[name] for name in computed if name in model.producer]
    if all(maker.op_type in OF_PAIRS or not is_default(maker) for maker in makers):
        return model
    return fold_constants(model, only=computed).model


def count_dequantized(model: Model) -> int:
    """The number of dequantized tensors of a model; scales that are dequantized themselves do not count.

    Operators of integers and floats count as the pairs that they replace.
    """
    model = with_pairs(with_constant_numbers(model))
    made = (node for node in model.nodes if is_op(node, "DequantizeLinear"))
    return sum(not makes_scale(model, node.outputs[0]) for node in made)


def recognize(
    model: Model,
    reference: Model | None = None,
    *,
    activations: Model | None = None,
    rounded_only: bool = False,
) -> Recognition:
    """Examine each node of a model; ``reference`` is the model before quantization, at the same opset.

    ``activations`` replaces it if only nodes have to be restored: a removed Relu or Clip, and what kernels replaced.
    With ``rounded_only`` it restores only weights of which the integers are its values, rounded or clipped.
    """
    activations = activations or reference
    model = with_pairs(with_constant_numbers(model), activations)
    found = Recognition(model, reference, activations, rounded_only)
    found.find()
    return found


@dataclass(slots=True)
class Recognition:
    """The Q/DQ of a model, and its replacement in the model without. Made by `recognize`.

    ``removed`` are the nodes to remove, by index; ``floats`` the DequantizeLinear nodes whose weights are
    restored, by name, and ``originals`` those weights that the reference has; ``place`` the name of such a weight by
    the integers it replaces; ``left`` the nodes that cannot be removed, by reason. ``exact`` are the reference's own
    activation functions, by the index of the node they follow; ``relus`` are DequantizeLinear nodes, by index, that
    become a Relu, with the tensor it reads.
    """

    model: Model
    reference: Model | None
    activations: Model | None
    rounded_only: bool
    alias: dict[str, str] = field(default_factory=dict)  # tensor: its replacement
    removed: set[int] = field(default_factory=set)
    floats: dict[str, Node] = field(default_factory=dict)
    originals: dict[str, TensorProto] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)  # initializers
    left: dict[str, list[str]] = field(default_factory=dict)
    exact: dict[int, Node] = field(default_factory=dict)
    relus: dict[int, str] = field(default_factory=dict)
    _stored: dict[str, list[str]] = field(default_factory=dict)  # integer forms of each weight
    _names: dict[str, str] = field(default_factory=dict)  # of nodes in the reference

    def find(self) -> None:
        """Classify each node."""
        self._names = {} if self.reference is None else find_same_nodes(self.reference, self.model)
        for node in self.model.nodes:
            if is_op(node, "DequantizeLinear") and not makes_scale(self.model, node.outputs[0]):
                self._find_dequantize(node)
        for node in (node for node in self.model.nodes if is_op(node, "QuantizeLinear")):
            readers = (reader for output in node.outputs for reader in self.model.readers(output))
            if all(map(self._is_removed, readers)) and not any(map(self._is_read_outside, node.outputs)):
                self.removed.add(node.index)
            else:
                self.left.setdefault("has an integer output that others read", []).append(node.name)
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
            name = self._name_weight(node)
            if name != node.outputs[0]:
                self.alias[node.outputs[0]] = name
            if name == node.outputs[0] or name not in self.model.constants:
                if name not in self.floats:
                    self.floats[name] = node
                    if (original := self._original(node, name)) is not None:
                        self.originals[name] = original
                self._stored.setdefault(name, []).append(source)
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
        if (problem := read_params(self.model, dequantize, quantize)[1]) in (RESCALES, UNEQUAL):
            return problem  # without the pair the model would compute other values
        if self._replaces_activation(quantize, dequantize):
            return ""
        before = self.now(before)
        maker = self.model.producer.get(before)
        scope = "" if maker is None else maker.scope
        if any(reader.is_marker and reader.scope != scope for reader in self.model.readers(after)):
            return "makes an output of a body out of a tensor of another graph"
        if after not in self.model.outputs:
            self.alias[after] = before
        elif before in self.model.producer and before not in self.model.outputs:
            self.alias[before] = after  # a graph output keeps its name: the producer makes it now
        else:
            return "makes a graph output out of an input or another output"
        return ""

    def _is_removed(self, node: Node) -> bool:
        """Whether a node is removed, or makes only scales of removed nodes."""
        if node.index in self.removed or not makes_scale(self.model, node.outputs[0]):
            return node.index in self.removed
        return all(reader.index in self.removed for reader in self.model.readers(node.outputs[0]))

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
        is_removed = (reader.index in self.removed for reader in self.model.readers(tensor))
        return not self._is_read_outside(tensor) and all(is_removed)

    def now(self, tensor: str) -> str:
        """The name of a tensor in the model without Q/DQ."""
        while tensor in self.alias:
            tensor = self.alias[tensor]
        return tensor

    # ---- activation functions that a tool removed ----------------------------------------------------

    def _replaces_activation(self, quantize: Node, dequantize: Node) -> bool:
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
        original = self.activations.producer.get(known) if self.activations else None
        if original is not None and self.activations is not None:
            # of the same operator, it is here, behind a pair of its own
            if original.op_type in ("Relu", "Clip") and original.op_type != producer.op_type:
                read = original.inputs[0]
                is_free = read not in self.model.producer and read not in self.model.inputs
                if is_free and all(
                    name in self.activations.constants for name in original.inputs[1:] if name
                ):
                    self.exact[producer.index] = original
            return False
        if not starts_at_zero(self.model, quantize):
            return False  # it cuts off nothing that the graph shows
        if never_negative(self.model, tensor) or cut_at_zero(self.model, tensor):
            return False
        self.relus[dequantize.index] = tensor
        return True

    def restored_constants(self) -> Iterator[TensorProto]:
        """Constants that the restored nodes read and the model lacks, bounds of a Clip, by name."""
        known = {} if self.activations is None else self.activations.constants
        read = {name for node in self.exact.values() for name in node.inputs[1:] if name}
        yield from (named(known[name], name) for name in sorted(read - self.model.constants.keys()))

    # ---- weights stored as integers ------------------------------------------------------------------

    @property
    def dequantized(self) -> list[str]:
        """The weights that the reference does not have."""
        return [name for name in self.floats if name not in self.originals]

    def float_weight(self, name: str) -> TensorProto:
        """A float weight: the reference's own bytes, or the integers dequantized.

        It is computed on demand: all weights together are as large as the float model.
        """
        if name not in self.originals or self.reference is None:
            return numpy_helper.from_array(dequantized(self.model, self.floats[name]), name)
        return named(within_reach(self.originals[name], self.reference, self.model), name)

    def _name_weight(self, node: Node) -> str:
        """The name of the weight behind this DequantizeLinear in the model without Q/DQ.

        Our own nodes record it; else it is the tensor that the node's consumer reads in the reference; else
        the integer tensor's name without the suffix ``_quantized``; else the node's output.
        """
        model, output, stored = self.model, node.outputs[0], node.inputs[0]
        nodes = {} if self.reference is None else self.reference.by_name
        ends = (end for end in model.consumers.get(output, ()) if end.node in self._names)
        read = [nodes[self._names[end.node]].input_at(end.input) for end in ends]
        in_reference = next((name for name in read if self._original(node, name) is not None), None)
        name = metadata(node.proto, CARRIED) or in_reference or stored.removesuffix("_quantized")
        if output in model.outputs or name == stored:
            return output
        known = model.constants.get(name)
        if known is not None:  # it may be the weight itself
            is_weight = known.data_type in FLOATS and known.dims == model.constants[stored].dims
            return name if is_weight else output
        return output if name in model.producer or name in model.inputs else name

    def _original(self, node: Node, name: str) -> TensorProto | None:
        """The reference's constant of that name, if it has the shape of the node's integers."""
        found = self.reference.constants.get(name) if self.reference else None
        same = found is not None and found.dims == self.model.constants[node.inputs[0]].dims
        return found if same and (not self.rounded_only or self._rounds(node, name)) else None

    def _rounds(self, node: Node, name: str) -> bool:
        """Whether the node's integers are at most one step away from a constant of the reference, or at their end."""
        assert self.reference is not None
        original, real = (
            each.astype(np.float64) for each in (self.reference.array(name), dequantized(self.model, node))
        )
        stored, (axis, block) = self.model.array(node.inputs[0]), blocks_of(node)
        step = along(scale_of(self.model, node).astype(np.float64), stored.shape, axis, block)
        numbers = stored.astype(np.float64)
        relative = 0.0 if stored.dtype.name.startswith(("int", "uint")) else 0.25  # of floats
        is_near = np.abs(real - original) <= 1.01 * step + relative * np.abs(real)
        is_end = (numbers == numbers.min(initial=np.inf)) | (numbers == numbers.max(initial=-np.inf))
        return bool((is_near | is_end).all())


# ---- tensors without negative values, on which no tool removed a Relu ----------------------------------

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
    read = [name for name in node.inputs if name]  # other inputs than values are axes, shapes and indices
    if node.op_type == "Pad":
        read = [name for name in (*node.inputs[:1], *node.inputs[2:3]) if name]
    elif node.op_type in COPY_OPS or node.op_type in _REDUCES:
        read = read[:1]
    return all(never_negative(model, name, depth - 1) for name in read)


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


def named(tensor: TensorProto, name: str) -> TensorProto:
    """The tensor with this name: the value of a Constant node may have any."""
    if tensor.name == name:
        return tensor
    renamed = copied(tensor)
    renamed.name = name
    return renamed


def within_reach(tensor: TensorProto, owner: Model, reader: Model) -> TensorProto:
    """The tensor as a model in ``reader``'s folder can find it: external data is not moved.

    Its file may be outside that folder, which ONNX does not allow: such data is included when the model is
    written.
    """
    there, here = owner.folder, reader.folder
    if not is_external(tensor) or there is None or here is None or there == here:
        return tensor
    moved = copied(tensor)
    for entry in moved.external_data:
        if entry.key == "location":
            entry.value = os.path.relpath(there / entry.value, here)
    return moved
