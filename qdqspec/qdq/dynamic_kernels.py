"""Operators that compute in integers with ranges found at run time, made of a Q/DQ form of the same computation.

In the Q/DQ form a DynamicQuantizeLinear and a DequantizeLinear are the pair of an activation, a DequantizeLinear
behind stored integers is the weight, and the operator itself is unchanged: MatMul, Gemm, LSTM, or Attention of domain
``com.microsoft``. Runtimes have kernels for another form of the same:

- ``DynamicQuantizeLinear > MatMulInteger > Cast > Mul``, and ``Add`` for the bias of a Gemm, all standard ONNX
  operators, fused into ``DynamicQuantizeMatMul`` or ``MatMulIntegerToFloat``;
- ``DynamicQuantizeLSTM`` of domain ``com.microsoft``, which quantizes its input and hidden state itself;
- ``DynamicQuantizeLinear > QAttention`` of the same domain;
- ``DynamicQuantizeLinear > ConvInteger > Cast > Mul`` of a Conv, which is read and not made.

A float sum of two tensors that a LayerNormalization reads becomes ``Sum``, which computes the same: an ``Add`` is fused
with the normalization into SkipLayerNormalization, which takes 2 to 30 times the time of both (docs/decisions/0019).

`with_kernels` replaces the first form by the second, `qdqspec.qdq.dynamic_pairs` the second by the first. The node
that was replaced is metadata of the new one, so that names and attributes return exactly.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.ops import is_default, is_fused_attention
from qdqspec.graph.protos import (
    CONTRIBUTED,
    attribute_of,
    constants_of,
    copied,
    free_name,
    metadata,
    names_in,
    padded_inputs,
    refill,
    trimmed_inputs,
    without_unread,
)

QUANTIZE = "DynamicQuantizeLinear"
LSTM = "DynamicQuantizeLSTM"
ATTENTION = "QAttention"
REPLACED = "qdqspec.replaced"  # node metadata: the node of the float model that this one computes, encoded
IMPORTS = "qdqspec.imports"  # node metadata: the domain that the model imports for this node only

CARRIED = "qdqspec.tensor"  # node metadata of inserted nodes: the tensor whose values the node carries

_INTEGERS = (TensorProto.INT8, TensorProto.UINT8)
LSTM_INPUTS = 8  # of ONNX's operator; scales and zero points follow them
_LINEAR = ("MatMul", "Gemm")


def with_kernels(flat: onnx.ModelProto) -> onnx.ModelProto:
    """The flat form of a model, with integer kernels for operators behind dynamic pairs and stored weights.

    Operators that no kernel computes, and those with a float operand, keep their pairs.
    """
    return _Lowering(flat).proto()


def encoded(message: onnx.NodeProto | TensorProto) -> str:
    """A node or tensor as text for the metadata of a node."""
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode("ascii")


class _Lowering:
    """Replaces operators one by one; new initializers are in ``_added``."""

    def __init__(self, flat: onnx.ModelProto) -> None:
        self._flat = flat
        graph = flat.graph
        self._producer = {name: node for node in graph.node for name in node.output if name}
        self._constants = constants_of(graph)
        self._free = partial(free_name, taken=names_in(graph))
        self._added: list[TensorProto] = []
        self._unread: set[str] = set()  # what only the operators replaced may have read
        self._imports = {opset.domain for opset in flat.opset_import}
        self._normalized = {
            node.input[0] for node in graph.node if node.op_type == "LayerNormalization" and is_default(node)
        }

    def proto(self) -> onnx.ModelProto:
        nodes = [new for node in self._flat.graph.node for new in self._lower_node(node)]
        if not self._unread:
            return self._flat
        proto = without_unread(self._flat, nodes, self._unread)
        proto.graph.initializer.extend(self._added)
        if CONTRIBUTED not in self._imports and any(node.domain == CONTRIBUTED for node in proto.graph.node):
            proto.opset_import.append(helper.make_opsetid(CONTRIBUTED, 1))
        return proto

    def _lower_node(self, node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        if self._is_fused_slowly(node):
            found = copied(node)
            found.op_type = "Sum"
            found.metadata_props.add(key=REPLACED, value=encoded(node))
            return (found,)
        is_known = is_default(node) and node.op_type in (*_LINEAR, "LSTM")
        if not is_known and not is_fused_attention(node):
            return (node,)
        after = self._producer.get(node.input[0])
        is_pair = after is not None and after.op_type == "DequantizeLinear"
        pair = self._producer.get(after.input[0]) if after is not None and is_pair else None
        weights = [self._find_weight(node, index) for index in ((1, 2) if node.op_type == "LSTM" else (1,))]
        known = [weight for weight in weights if weight is not None]
        if pair is None or pair.op_type != QUANTIZE or len(known) < len(weights):
            return (node,)
        if is_fused_attention(node):
            return self._attention(node, pair, known[0])
        if node.op_type == "LSTM":
            fits = all(map(self._rows, known)) and not attribute_of(node, "layout", 0)
            return self._lstm(node, pair, known) if fits else (node,)
        return self._linear(node, pair, known[0]) if self._fits_linear(node, known[0]) else (node,)

    def _is_fused_slowly(self, node: onnx.NodeProto) -> bool:
        """Whether it adds two computed float tensors for a normalization."""
        if node.op_type != "Add" or not is_default(node) or node.output[0] not in self._normalized:
            return False
        kinds = [maker.op_type for name in node.input if (maker := self._producer.get(name)) is not None]
        return "DequantizeLinear" not in kinds and self._constants.keys().isdisjoint(node.input)

    def _find_weight(self, node: onnx.NodeProto, index: int) -> onnx.NodeProto | None:
        """The DequantizeLinear of stored 8-bit integers, with one scale a tensor or channel, of LSTM also in blocks."""
        found = self._producer.get(node.input[index])
        if found is None or found.op_type != "DequantizeLinear":
            return None
        if attribute_of(found, "block_size", 0) and node.op_type != "LSTM":
            return None
        known = all(name in self._constants for name in found.input if name)
        return found if known and self._constants[found.input[0]].data_type in _INTEGERS else None

    # ---- MatMul and Gemm --------------------------------------------------------------------------

    def _fits_linear(self, node: onnx.NodeProto, weight: onnx.NodeProto) -> bool:
        dims = self._constants[weight.input[0]].dims
        channels = len(dims) - 1
        if node.op_type == "Gemm":
            plain = attribute_of(node, "alpha", 1.0) == 1 and attribute_of(node, "beta", 1.0) == 1
            if not plain or attribute_of(node, "transA", 0):
                return False
            channels = 0 if attribute_of(node, "transB", 0) else 1
        is_single = int(np.prod(self._constants[weight.input[1]].dims)) == 1
        return is_single or (len(dims) == 2 and attribute_of(weight, "axis", 1) in (channels, channels - 2))

    def _linear(
        self, node: onnx.NodeProto, pair: onnx.NodeProto, weight: onnx.NodeProto
    ) -> Iterator[onnx.NodeProto]:
        integers, scale = weight.input[0], weight.input[1]
        if node.op_type == "Gemm" and attribute_of(node, "transB", 0):
            yield self._node("Transpose", node, "_weight", [integers], perm=[1, 0])
            integers = self._last
        zero_points = [pair.output[2], *weight.input[2:3]]
        product = self._node("MatMulInteger", node, "", [pair.output[0], integers, *zero_points])
        self._note_replaced(product, node, pair, (weight,))
        yield product
        yield self._node("Cast", node, "_cast", [self._last], to=TensorProto.FLOAT)
        real = self._last
        yield self._node("Mul", node, "_scale", [pair.output[1], scale])
        last = self._node("Mul", node, "_scaled", [real, self._last])
        if bias := node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else "":
            yield last
            last = self._node("Add", node, "_bias", [self._last, bias])
        last.output[0] = node.output[0]
        yield last
        self._unread.update((node.input[0], node.input[1], *weight.input))

    # ---- LSTM and Attention -----------------------------------------------------------------------

    def _rows(self, weight: onnx.NodeProto) -> tuple[int, ...]:
        """The shape of the kernel's scales: one a direction, or one a direction and row; empty for another one."""
        directions, rows, _ = self._constants[weight.input[0]].dims
        axis = attribute_of(weight, "axis", 1)
        if attribute_of(weight, "block_size", 0):
            numbers = (numpy_helper.to_array(self._constants[name]) for name in weight.input[1:])
            equal = axis in (2, -1) and all((values == values[..., :1]).all() for values in numbers)
            return (directions, rows) if equal else ()
        count = int(np.prod(self._constants[weight.input[1]].dims))
        if count == 1 or (axis == 0 and count == directions):
            return (directions,)
        return (1, rows) if (directions, axis, count) == (1, 1, rows) else ()

    def _lstm(
        self, node: onnx.NodeProto, pair: onnx.NodeProto, weights: Sequence[onnx.NodeProto]
    ) -> Iterator[onnx.NodeProto]:
        stored: list[str] = []
        numbers: list[str] = []  # scales and zero points as the kernel takes them
        for part, weight in zip(("W", "R"), weights, strict=True):
            yield self._node("Transpose", node, f"_{part}", [weight.input[0]], perm=[0, 2, 1])
            stored.append(self._last)
            shape = self._rows(weight)
            kind = helper.tensor_dtype_to_np_dtype(self._constants[weight.input[0]].data_type)
            arrays = [numpy_helper.to_array(self._constants[name]) for name in weight.input[1:3] if name]
            scale, zero = arrays if len(arrays) > 1 else (arrays[0], np.zeros((), kind))
            for values, what in ((scale, "scale"), (zero, "zero_point")):
                if attribute_of(weight, "block_size", 0) and values.ndim:
                    values = values[..., :1]  # blocks of a row have one
                name = self._free(f"{node.name or node.output[0]}_{part}_{what}")
                full = (
                    np.broadcast_to(values.reshape(-1), shape) if values.size == 1 else values.reshape(shape)
                )
                self._added.append(numpy_helper.from_array(np.array(full, order="C"), name))
                numbers.append(name)
        others = [*node.input[3:], *[""] * (LSTM_INPUTS - len(node.input))]
        kernel = self._node(LSTM, node, "", [pair.input[0], *stored, *others, *numbers], domain=CONTRIBUTED)
        refill(kernel.output, node.output)
        kernel.attribute.extend(a for a in node.attribute if a.name != "layout")
        self._note_replaced(kernel, node, pair, weights)
        if CONTRIBUTED not in self._imports:
            kernel.metadata_props.add(key=IMPORTS, value=CONTRIBUTED)
        yield kernel
        self._unread.update((*node.input[:3], *(name for weight in weights for name in weight.input)))

    def _attention(
        self, node: onnx.NodeProto, pair: onnx.NodeProto, weight: onnx.NodeProto
    ) -> Iterator[onnx.NodeProto]:
        bias, mask, past = padded_inputs(node, 5)[2:]
        stored, scale, zero = padded_inputs(weight, 3)
        data, data_scale, data_zero = pair.output
        inputs = trimmed_inputs([data, stored, bias, data_scale, scale, mask, data_zero, zero, past])
        kernel = self._node(ATTENTION, node, "", inputs, domain=CONTRIBUTED)
        refill(kernel.output, node.output)
        kernel.attribute.extend(node.attribute)
        self._note_replaced(kernel, node, pair, (weight,))
        yield kernel
        self._unread.update((*node.input[:2], *weight.input))

    # ---- nodes ------------------------------------------------------------------------------------

    def _node(
        self, op_type: str, origin: onnx.NodeProto, part: str, inputs: list[str], **more: Any
    ) -> onnx.NodeProto:
        """A node in the place of ``origin``; without a ``part`` it has its name."""
        name = self._free(f"{origin.name or origin.output[0]}{part}") if part else origin.name
        self._last = self._free(f"{origin.output[0] or origin.name}{part or '_integers'}")
        return helper.make_node(op_type, inputs, [self._last], name=name, **more)

    def _note_replaced(
        self,
        kernel: onnx.NodeProto,
        node: onnx.NodeProto,
        pair: onnx.NodeProto,
        weights: Iterable[onnx.NodeProto],
    ) -> None:
        """Note in the metadata which node the kernel replaces, by the names of the float model."""
        original = copied(node)
        original.input[0] = pair.input[0]
        for index, weight in enumerate(weights, start=1):
            original.input[index] = metadata(weight, CARRIED) or weight.output[0]  # the float weight
        kernel.metadata_props.add(key=REPLACED, value=encoded(original))
