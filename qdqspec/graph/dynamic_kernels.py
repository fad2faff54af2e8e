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

`with_kernels` replaces the first form by the second, `qdqspec.graph.dynamic_pairs` the second by the first. The node
that was replaced is metadata of the new one, so that names and attributes return exactly.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.flat import free_name, names_in
from qdqspec.graph.ops import is_default, is_fused_attention
from qdqspec.graph.protos import (
    CONTRIBUTED,
    attribute_of,
    constants_of,
    copied,
    copy_model,
    metadata,
    names_read_inside,
    padded_inputs,
    refill,
    trimmed_inputs,
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
        nodes = self._sweep_pairs(nodes)
        read = {name for node in nodes for name in (*node.input, *names_read_inside(node))}
        read |= {output.name for output in self._flat.graph.output}
        proto = copy_model(self._flat, but={"node", "initializer"})
        proto.graph.node.extend(nodes)
        kept = (t for t in self._flat.graph.initializer if t.name in read or t.name not in self._unread)
        proto.graph.initializer.extend((*kept, *self._added))
        if CONTRIBUTED not in self._imports and any(node.domain == CONTRIBUTED for node in nodes):
            proto.opset_import.append(helper.make_opsetid(CONTRIBUTED, 1))
        return proto

    def _lower_node(self, node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        if self._is_fused_slowly(node):
            found = copied(node)
            found.op_type = "Sum"
            found.metadata_props.add(key=REPLACED, value=encoded(node))
            return (found,)
        is_known = is_default(node) and node.op_type in (*_LINEAR, "LSTM")
        pair = self._find_dynamic_pair(node) if is_known or is_fused_attention(node) else None
        if pair is None:
            return (node,)
        if is_fused_attention(node):
            weight = self._find_weight(node, 1)
            return (node,) if weight is None else self._attention(node, pair, weight)
        if node.op_type == "LSTM":
            weights = [self._find_weight(node, index) for index in (1, 2)]
            fits = all(weight is not None and self._rows(weight) for weight in weights)
            return self._lstm(node, pair) if fits and not attribute_of(node, "layout", 0) else (node,)
        return self._make_linear(node, pair) if self._fits_linear(node) else (node,)

    def _is_fused_slowly(self, node: onnx.NodeProto) -> bool:
        """Whether it adds two computed float tensors for a normalization."""
        if node.op_type != "Add" or not is_default(node) or node.output[0] not in self._normalized:
            return False
        makers = map(self._producer.get, node.input)
        return not any(name in self._constants for name in node.input) and not any(
            maker is not None and maker.op_type == "DequantizeLinear" for maker in makers
        )

    def _find_dynamic_pair(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The DynamicQuantizeLinear behind the first operand."""
        after = self._producer.get(node.input[0])
        if after is None or after.op_type != "DequantizeLinear":
            return None
        found = self._producer.get(after.input[0])
        return found if found is not None and found.op_type == QUANTIZE else None

    def _find_weight(self, node: onnx.NodeProto, index: int) -> onnx.NodeProto | None:
        """The DequantizeLinear of stored 8-bit integers, with one scale a tensor or channel, of LSTM also in blocks."""
        found = self._producer.get(node.input[index])
        if found is None or found.op_type != "DequantizeLinear":
            return None
        if attribute_of(found, "block_size", 0) and node.op_type != "LSTM":
            return None
        known = all(name in self._constants for name in found.input if name)
        return found if known and self._constants[found.input[0]].data_type in _INTEGERS else None

    def _fits_linear(self, node: onnx.NodeProto) -> bool:
        weight = self._find_weight(node, 1)
        if weight is None:
            return False
        dims = self._constants[weight.input[0]].dims
        channels = len(dims) - 1
        if node.op_type == "Gemm":
            plain = attribute_of(node, "alpha", 1.0) == 1 and attribute_of(node, "beta", 1.0) == 1
            if not plain or attribute_of(node, "transA", 0):
                return False
            channels = 0 if attribute_of(node, "transB", 0) else 1
        scales = self._constants[weight.input[1]]
        single = int(np.prod(scales.dims)) == 1
        return single or (len(dims) == 2 and attribute_of(weight, "axis", 1) in (channels, channels - 2))

    def _rows(self, weight: onnx.NodeProto) -> tuple[int, ...]:
        """The shape of the kernel's scales: one a direction, or one a direction and row; empty for another one."""
        directions, rows, _ = self._constants[weight.input[0]].dims
        if attribute_of(weight, "block_size", 0):
            return (directions, rows) if self._has_equal_blocks(weight) else ()
        count, axis = int(np.prod(self._constants[weight.input[1]].dims)), attribute_of(weight, "axis", 1)
        if count == 1 or (axis == 0 and count == directions):
            return (directions,)
        return (1, rows) if (directions, axis, count) == (1, 1, rows) else ()

    def _has_equal_blocks(self, weight: onnx.NodeProto) -> bool:
        """Whether blocks along the last axis have the same scale and zero point in each row."""
        if attribute_of(weight, "axis", 1) not in (2, -1):
            return False
        numbers = (numpy_helper.to_array(self._constants[name]) for name in weight.input[1:])
        return all((values == values[..., :1]).all() for values in numbers)

    def _make_linear(self, node: onnx.NodeProto, pair: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        weight = self._producer[node.input[1]]
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
        bias = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
        result = self._node("Mul", node, "_scaled", [real, self._last])
        last = result
        yield result
        if bias:
            last = self._node("Add", node, "_bias", [result.output[0], bias])
            yield last
        last.output[0] = node.output[0]
        self._unread.update((node.input[0], node.input[1], *weight.input))

    def _lstm(self, node: onnx.NodeProto, pair: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        numbers: list[str] = []
        stored: list[str] = []
        weights = tuple(self._producer[node.input[index]] for index in (1, 2))
        for part, weight in zip(("W", "R"), weights, strict=True):
            yield self._node("Transpose", node, f"_{part}", [weight.input[0]], perm=[0, 2, 1])
            stored.append(self._last)
            numbers += self._make_lstm_numbers(node, weight, part)
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

    def _make_lstm_numbers(self, node: onnx.NodeProto, weight: onnx.NodeProto, part: str) -> list[str]:
        """Scales and zero points as the kernel takes them."""
        shape = self._rows(weight)
        scale = numpy_helper.to_array(self._constants[weight.input[1]])
        kind = helper.tensor_dtype_to_np_dtype(self._constants[weight.input[0]].data_type)
        given = weight.input[2:3]
        zero = numpy_helper.to_array(self._constants[given[0]]) if given else np.zeros((), kind)
        names = []
        if attribute_of(weight, "block_size", 0):
            scale, zero = (values[..., :1] if values.ndim else values for values in (scale, zero))
        for values, what in ((scale, "scale"), (zero, "zero_point")):
            name = self._free(f"{node.name or node.output[0]}_{part}_{what}")
            values = np.broadcast_to(values.reshape(-1), shape) if values.size == 1 else values.reshape(shape)
            self._added.append(numpy_helper.from_array(np.array(values, order="C"), name))
            names.append(name)
        return names

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

    def _sweep_pairs(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """The nodes less the pairs that nothing reads any more."""
        outputs = {output.name for output in self._flat.graph.output}
        read = Counter(name for node in nodes for name in (*node.input, *names_read_inside(node)))
        kept = []
        for node in reversed(nodes):
            is_pair = node.op_type in ("DequantizeLinear", QUANTIZE) and is_default(node)
            if is_pair and not any(read[name] or name in outputs for name in node.output):
                read.subtract(node.input)
                self._unread.update(node.input)
                continue
            kept.append(node)
        return kept[::-1]
