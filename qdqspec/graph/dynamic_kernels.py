"""Operators that compute in integers with ranges found at run time, made of a Q/DQ form of the same computation.

In the Q/DQ form a DynamicQuantizeLinear and a DequantizeLinear are the pair of an activation, a DequantizeLinear
behind stored integers is the weight, and the operator itself is unchanged: MatMul, Gemm or LSTM. Runtimes have
kernels for another form of the same:

- ``DynamicQuantizeLinear > MatMulInteger > Cast > Mul``, and ``Add`` for the bias of a Gemm, all standard ONNX
  operators, fused into ``DynamicQuantizeMatMul`` or ``MatMulIntegerToFloat``;
- ``DynamicQuantizeLSTM`` of domain ``com.microsoft``, which quantizes its input and hidden state itself.

A float sum of two tensors that a LayerNormalization reads becomes ``Sum``, which computes the same: an ``Add`` is fused
with the normalization into SkipLayerNormalization, which takes 2 to 30 times the time of both (docs/decisions/0082).

`with_kernels` replaces the first form by the second, `qdqspec.graph.dynamic_pairs` the second by the first. The node
that was replaced is metadata of the new one, so that names and attributes return exactly.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.protos import (
    DEFAULT_DOMAINS,
    copied,
    copy_model,
    metadata,
    names_read_inside,
    refill,
    values_of_constants,
)

QUANTIZE = "DynamicQuantizeLinear"
LSTM = "DynamicQuantizeLSTM"
DOMAIN = "com.microsoft"
REPLACED = "qdqspec.replaced"  # node metadata: the node of the float model that this one computes, encoded
IMPORTS = "qdqspec.imports"  # node metadata: the domain that the model imports for this node only

CARRIED = "qdqspec.tensor"  # node metadata of inserted nodes: the tensor whose values the node carries

_INTEGERS = (TensorProto.INT8, TensorProto.UINT8)
_LSTM_INPUTS = 8  # of ONNX's operator; scales and zero points follow them
_LINEAR = ("MatMul", "Gemm")


def with_kernels(flat: onnx.ModelProto) -> onnx.ModelProto:
    """The flat form of a model, with integer kernels for operators behind dynamic pairs and stored weights.

    Operators that no kernel computes, and those with a float operand, keep their pairs.
    """
    return _Lowering(flat).proto()


def encoded(message: onnx.NodeProto | TensorProto) -> str:
    """A node or tensor as text for the metadata of a node."""
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode("ascii")


def is_default(node: onnx.NodeProto) -> bool:
    """Whether an operator is one of ONNX's own."""
    return node.domain in DEFAULT_DOMAINS


def attribute_of(node: onnx.NodeProto, name: str, default: object) -> object:
    """The value of an attribute, or its default."""
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


def constants_of(graph: onnx.GraphProto) -> Mapping[str, TensorProto]:
    """The initializers, and the outputs of Constant nodes."""
    return {t.name: t for t in graph.initializer} | dict(values_of_constants(graph.node))


class FreeNames:
    """Names that nothing in a graph has yet."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._taken = {t.name for field in (graph.initializer, graph.input, graph.output) for t in field}
        for node in graph.node:
            self._taken.update((node.name, *node.input, *node.output))

    def free(self, first: str) -> str:
        """The name, or with a number where it is taken; from now on taken."""
        name, count = first, 0
        while name in self._taken:
            count += 1
            name = f"{first}~{count}"
        self._taken.add(name)
        return name


class _Lowering:
    def __init__(self, flat: onnx.ModelProto) -> None:
        self._flat = flat
        graph = flat.graph
        self._producer = {name: node for node in graph.node for name in node.output if name}
        self._constants = constants_of(graph)
        self._names = FreeNames(graph)
        self._added: list[TensorProto] = []
        self._unread: set[str] = set()  # what only the operators replaced may have read
        self._imports = {opset.domain for opset in flat.opset_import}
        self._normalized = {
            node.input[0] for node in graph.node if node.op_type == "LayerNormalization" and is_default(node)
        }

    def proto(self) -> onnx.ModelProto:
        nodes = [new for node in self._flat.graph.node for new in self._lowered(node)]
        if not self._unread:
            return self._flat
        nodes = self._swept(nodes)
        read = {name for node in nodes for name in (*node.input, *names_read_inside(node))}
        read |= {output.name for output in self._flat.graph.output}
        proto = copy_model(self._flat, but={"node", "initializer"})
        proto.graph.node.extend(nodes)
        kept = (t for t in self._flat.graph.initializer if t.name in read or t.name not in self._unread)
        proto.graph.initializer.extend((*kept, *self._added))
        if DOMAIN not in self._imports and any(node.domain == DOMAIN for node in nodes):
            proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        return proto

    def _lowered(self, node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
        if self._is_fused_slowly(node):
            return (_sum_of(node),)
        if not is_default(node) or node.op_type not in (*_LINEAR, "LSTM"):
            return (node,)
        pair = self._activation(node)
        if pair is None:
            return (node,)
        if node.op_type == "LSTM":
            return self._lstm(node, pair) if self._fits_lstm(node) else (node,)
        return self._linear(node, pair) if self._fits_linear(node) else (node,)

    def _is_fused_slowly(self, node: onnx.NodeProto) -> bool:
        """Whether it adds two computed float tensors for a normalization."""
        if node.op_type != "Add" or not is_default(node) or node.output[0] not in self._normalized:
            return False
        makers = map(self._producer.get, node.input)
        return not any(name in self._constants for name in node.input) and not any(
            maker is not None and maker.op_type == "DequantizeLinear" for maker in makers
        )

    def _activation(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The DynamicQuantizeLinear behind the first operand."""
        after = self._producer.get(node.input[0])
        if after is None or after.op_type != "DequantizeLinear":
            return None
        found = self._producer.get(after.input[0])
        return found if found is not None and found.op_type == QUANTIZE else None

    def _weight(self, node: onnx.NodeProto, index: int) -> onnx.NodeProto | None:
        """The DequantizeLinear of stored 8-bit integers, with one scale a tensor or channel."""
        found = self._producer.get(node.input[index])
        if found is None or found.op_type != "DequantizeLinear" or attribute_of(found, "block_size", 0):
            return None
        known = all(name in self._constants for name in found.input if name)
        return found if known and self._constants[found.input[0]].data_type in _INTEGERS else None

    def _fits_linear(self, node: onnx.NodeProto) -> bool:
        weight = self._weight(node, 1)
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

    def _fits_lstm(self, node: onnx.NodeProto) -> bool:
        weights = [self._weight(node, index) for index in (1, 2)]
        return not attribute_of(node, "layout", 0) and all(w is not None and self._rows(w) for w in weights)

    def _rows(self, weight: onnx.NodeProto) -> tuple[int, ...]:
        """The shape of the kernel's scales: one a direction, or one a direction and row; empty for another one."""
        directions, rows, _ = self._constants[weight.input[0]].dims
        count, axis = int(np.prod(self._constants[weight.input[1]].dims)), attribute_of(weight, "axis", 1)
        if count == 1 or (axis == 0 and count == directions):
            return (directions,)
        return (1, rows) if (directions, axis, count) == (1, 1, rows) else ()

    def _linear(self, node: onnx.NodeProto, pair: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        weight = self._producer[node.input[1]]
        integers, scale = weight.input[0], weight.input[1]
        if node.op_type == "Gemm" and attribute_of(node, "transB", 0):
            yield self._node("Transpose", node, "_weight", [integers], perm=[1, 0])
            integers = self._last
        zero_points = [pair.output[2], *weight.input[2:3]]
        product = self._node("MatMulInteger", node, "", [pair.output[0], integers, *zero_points])
        self._keep(product, node, pair, (weight,))
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
            numbers += self._lstm_numbers(node, weight, part)
        others = [*node.input[3:], *[""] * (_LSTM_INPUTS - len(node.input))]
        kernel = self._node(LSTM, node, "", [pair.input[0], *stored, *others, *numbers], domain=DOMAIN)
        refill(kernel.output, node.output)
        kernel.attribute.extend(a for a in node.attribute if a.name != "layout")
        self._keep(kernel, node, pair, weights)
        if DOMAIN not in self._imports:
            kernel.metadata_props.add(key=IMPORTS, value=DOMAIN)
        yield kernel
        self._unread.update((*node.input[:3], *(name for weight in weights for name in weight.input)))

    def _lstm_numbers(self, node: onnx.NodeProto, weight: onnx.NodeProto, part: str) -> list[str]:
        """Scales and zero points as the kernel takes them."""
        shape = self._rows(weight)
        scale = numpy_helper.to_array(self._constants[weight.input[1]])
        kind = helper.tensor_dtype_to_np_dtype(self._constants[weight.input[0]].data_type)
        given = weight.input[2:3]
        zero = numpy_helper.to_array(self._constants[given[0]]) if given else np.zeros((), kind)
        names = []
        for values, what in ((scale, "scale"), (zero, "zero_point")):
            name = self._names.free(f"{node.name or node.output[0]}_{part}_{what}")
            values = np.broadcast_to(values.reshape(-1), shape) if values.size == 1 else values.reshape(shape)
            self._added.append(numpy_helper.from_array(np.array(values, order="C"), name))
            names.append(name)
        return names

    def _node(
        self, op_type: str, origin: onnx.NodeProto, part: str, inputs: list[str], **more: Any
    ) -> onnx.NodeProto:
        """A node in the place of ``origin``; without a ``part`` it has its name."""
        name = self._names.free(f"{origin.name or origin.output[0]}{part}") if part else origin.name
        self._last = self._names.free(f"{origin.output[0] or origin.name}{part or '_integers'}")
        return helper.make_node(op_type, inputs, [self._last], name=name, **more)

    def _keep(
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

    def _swept(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
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


def _sum_of(add: onnx.NodeProto) -> onnx.NodeProto:
    found = copied(add)
    found.op_type = "Sum"
    found.metadata_props.add(key=REPLACED, value=encoded(add))
    return found
