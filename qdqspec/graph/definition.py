"""What ONNX defines a model to compute: by its reference implementation, and by operators that define integer ones.

A runtime computes QLinearConv and similar operators with kernels that may saturate, also without any optimization.
`as_defined` replaces such an operator by float operators on dequantized operands, which compute its result exactly but
for the rounding of float32. Operators with a recurrence or of domain ``com.microsoft`` only (DynamicQuantizeLSTM,
QAttention) stay; their int8 weights become the same numbers in uint8, for which kernels do not saturate.

Source: https://onnx.ai/onnx/operators; for domain ``com.microsoft``, the document ContribOperators.md of its runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core.arrays import Array
from qdqspec.graph.flat import free_name, names_in
from qdqspec.graph.model import QDQ_OPS, Model
from qdqspec.graph.protos import (
    CONTRIBUTED,
    DEFAULT_DOMAINS,
    all_graphs,
    attribute_of,
    constants_of,
    copied,
    copy_model,
    opset_of,
    padded_inputs,
    refill,
)
from qdqspec.graph.storage import array_of
from qdqspec.graph.trt import meanings

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

Attributes: TypeAlias = Iterable[onnx.AttributeProto]

# Inputs of operators that stay: each weight and its zero point.
_WEIGHTS = {"DynamicQuantizeLSTM": ((1, 9), (2, 11)), "QAttention": ((1, 7),)}
_KNOWS_DEQUANTIZE = 19  # onnx 1.23 has no version of DequantizeLinear for lower opsets


def reference_outputs(model: Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a model file by name, computed slowly, operator by operator, as ONNX defines them."""
    evaluator = evaluator_of(onnx.load(str(model)))
    values = evaluator.run(None, dict(feeds))
    return {name: np.asarray(value) for name, value in zip(evaluator.output_names, values, strict=True)}


def evaluator_of(proto: onnx.ModelProto) -> ReferenceEvaluator:
    """The reference implementation of a model, with the operators of `qdqspec.graph.trt` and old DequantizeLinear."""
    from onnx.reference import ReferenceEvaluator  # imported late: it takes as long as all of onnx
    from onnx.reference.op_run import OpRun

    class DequantizeLinear(OpRun):
        """Of opsets 10 and 13. The evaluator finds it by name, and passes later attributes as well."""

        op_domain = ""

        def _run(self, x, scale, zero_point=None, axis=1, **later):  # type: ignore[no-untyped-def]  # noqa: ARG002 - its seam
            shape = (
                [-1 if axis % x.ndim == index else 1 for index in range(x.ndim)]
                if scale.size > 1
                else scale.shape
            )
            zero = 0 if zero_point is None else zero_point.astype(np.int64).reshape(shape)
            return ((x.astype(np.int64) - zero).astype(scale.dtype) * scale.reshape(shape),)

    foreign = [*meanings(proto)]
    if foreign:
        proto = copy_model(proto)
        proto.functions.extend(foreign)
    return ReferenceEvaluator(
        proto, new_ops=[DequantizeLinear] if opset_of(proto) < _KNOWS_DEQUANTIZE else []
    )


# ---- integer operators ---------------------------------------------------------------------------


def as_defined(model: Model) -> onnx.ModelProto:
    """The model with integer operators replaced; the model's own proto if it has none.

    Operators with scales of another type than float32, or with scales for each row of a product, stay.
    """
    if not any(_definition_of(node.proto) for node in model.nodes):
        return model.proto
    proto = copy_model(model.proto)
    base = None if model.path is None else model.path.parent
    known: dict[str, TensorProto] = {}
    # runtimes refuse a new name that two graphs have
    taken = {name for graph in all_graphs(proto.graph) for name in names_in(graph)}
    for graph in all_graphs(proto.graph):
        known |= constants_of(graph)
        _Rewriting(graph, known, lambda tensor: array_of(tensor, base), taken).run()
    return proto


def is_quantized(model: Model) -> bool:
    """Whether a model has Q/DQ nodes or operators that compute in integers."""
    return any(node.op_type in QDQ_OPS or _definition_of(node.proto) for node in model.nodes)


class _Rewriting:
    """Replaces the operators of one graph. ``known`` are the constants of this graph and of those around it.

    No new name is among those ``taken``, to which it is added.
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        known: Mapping[str, TensorProto],
        values: Callable[[TensorProto], np.ndarray],
        taken: set[str],
    ) -> None:
        self._graph = graph
        self._known = known
        self._values = values
        self._free = partial(free_name, taken=taken)
        self._made: list[onnx.NodeProto] = []
        self._constants: list[TensorProto] = []

    def run(self) -> None:
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            define = _definition_of(node)
            self._made = []
            is_defined = define is not None and self._has_plain_scales(node) and define(self, node)
            nodes += self._made if is_defined else [copied(node)]
        refill(self._graph.node, nodes)
        self._graph.initializer.extend(self._constants)

    # ---- the operators: each returns whether it was replaced -----------------------------------------

    def qlinear_conv(self, node: onnx.NodeProto) -> bool:
        """QLinearConv: x, scale, zero; w, scale, zero; scale, zero of y; bias of scale x_scale * w_scale."""
        x, xs, xz, w, ws, wz, ys, yz, bias = padded_inputs(node, 9)
        per_channel = self._rank_of(w) is not None
        if not per_channel and self._is_vector(ws):
            return False
        weight = self._dequantized(w, self._column(ws, w), self._column(wz, w))
        operands = [self._dequantized(x, xs, xz), weight]
        if bias:
            product = self._add("Mul", [xs, ws])
            operands.append(self._add("Mul", [self._float(bias), product]))
        result = self._add("Conv", operands, node.attribute)
        return self._finish("QuantizeLinear", [result, ys, yz], node)

    def qlinear_matmul(self, node: onnx.NodeProto) -> bool:
        """QLinearMatMul: a, scale, zero; b, scale, zero; scale, zero of y."""
        a, a_scale, a_zero, b, b_scale, b_zero, ys, yz = padded_inputs(node, 8)
        if self._is_vector(a_scale) or self._is_vector(ys):
            return False
        operands = [self._dequantized(a, a_scale, a_zero), self._dequantized(b, b_scale, b_zero)]
        result = self._add("MatMul", operands)
        return self._finish("QuantizeLinear", [result, ys, yz], node)

    def qgemm(self, node: onnx.NodeProto) -> bool:
        """QGemm: a, scale, zero; b, scale, zero; bias of scale alpha * a_scale * b_scale; scale, zero of y."""
        a, a_scale, a_zero, b, b_scale, b_zero, c, ys, yz = padded_inputs(node, 9)
        turned = attribute_of(node, "transB", 0)
        columns = (self._column(name, b) if turned else name for name in (b_scale, b_zero))
        operands = [self._dequantized(a, a_scale, a_zero), self._dequantized(b, *columns)]
        attributes = [each for each in node.attribute if each.name != "alpha"]
        alpha = self._constant(np.float32(attribute_of(node, "alpha", 1.0)))
        operands[0] = self._add("Mul", [operands[0], alpha])
        if c:
            product = self._add("Mul", [self._add("Mul", [a_scale, alpha]), b_scale])
            operands.append(self._add("Mul", [self._float(c), product]))
        if not ys:
            return self._finish("Gemm", operands, node, attributes)
        result = self._add("Gemm", operands, attributes)
        return self._finish("QuantizeLinear", [result, ys, yz], node)

    def matmul_integer(self, node: onnx.NodeProto) -> bool:
        """MatMulInteger: a, b, and their zero points; int32."""
        a, b, a_zero, b_zero = padded_inputs(node, 4)
        if self._is_vector(a_zero):
            return False
        result = self._add("MatMul", [self._dequantized(a, "", a_zero), self._dequantized(b, "", b_zero)])
        return self._finish("Cast", [result], node, [helper.make_attribute("to", TensorProto.INT32)])

    def conv_integer(self, node: onnx.NodeProto) -> bool:
        """ConvInteger: x, w, and their zero points; int32."""
        x, w, x_zero, w_zero = padded_inputs(node, 4)
        operands = [self._dequantized(x, "", x_zero), self._dequantized(w, "", self._column(w_zero, w))]
        result = self._add("Conv", operands, node.attribute)
        return self._finish("Cast", [result], node, [helper.make_attribute("to", TensorProto.INT32)])

    def matmul_integer_to_float(self, node: onnx.NodeProto) -> bool:
        """MatMulIntegerToFloat: a, b, their scales, their zero points, bias."""
        a, b, a_scale, b_scale, a_zero, b_zero, bias = padded_inputs(node, 7)
        if self._is_vector(a_scale):
            return False
        return self._product(node, self._dequantized(a, a_scale, a_zero), b, b_scale, b_zero, bias)

    def dynamic_quantize_matmul(self, node: onnx.NodeProto) -> bool:
        """DynamicQuantizeMatMul: a in float, b, its scale and zero point, bias."""
        a, b, b_scale, b_zero, bias = padded_inputs(node, 5)
        found = [self._free(f"{node.output[0]}/{part}") for part in ("integers", "scale", "zero")]
        self._made.append(helper.make_node("DynamicQuantizeLinear", [a], found))
        return self._product(node, self._dequantized(*found), b, b_scale, b_zero, bias)

    def with_unsigned_weights(self, node: onnx.NodeProto) -> bool:
        """An operator that stays, with uint8 weights in the place of int8 ones."""
        changed = copied(node)
        for place, zero_place in _WEIGHTS[node.op_type]:
            given = padded_inputs(node, zero_place + 1)
            weight, zero = self._known.get(given[place]), self._known.get(given[zero_place])
            if weight is None or weight.data_type != TensorProto.INT8 or (given[zero_place] and zero is None):
                continue
            changed.input.extend([""] * (zero_place + 1 - len(changed.input)))
            zeros = np.zeros((), np.int8) if zero is None else self._values(zero)
            for input_, values in ((place, self._values(weight)), (zero_place, zeros)):
                changed.input[input_] = self._constant((values.astype(np.int16) + 128).astype(np.uint8))
        self._made.append(changed)
        return True

    # ---- parts ----------------------------------------------------------------------------------------

    def _product(self, node: onnx.NodeProto, a: str, b: str, b_scale: str, b_zero: str, bias: str) -> bool:
        operands = [a, self._dequantized(b, b_scale, b_zero)]
        if not bias:
            return self._finish("MatMul", operands, node)
        return self._finish("Add", [self._add("MatMul", operands), bias], node)

    def _dequantized(self, tensor: str, scale: str, zero: str) -> str:
        """The float values of integers, by operators of every opset: a scale may be for each column of a product."""
        found = self._float(tensor)
        if zero:
            found = self._add("Sub", [found, self._float(zero)])
        return self._add("Mul", [found, scale]) if scale else found

    def _float(self, tensor: str) -> str:
        return self._add("Cast", [tensor], [helper.make_attribute("to", TensorProto.FLOAT)])

    def _column(self, tensor: str, weight: str) -> str:
        """A scale or zero point for each output channel, so that it applies to the first axis of the weight."""
        rank = self._rank_of(weight)
        if not tensor or rank is None or not self._is_vector(tensor):
            return tensor
        return self._add("Reshape", [tensor, self._constant(np.array([-1, *[1] * (rank - 1)], np.int64))])

    def _rank_of(self, tensor: str) -> int | None:
        return len(self._known[tensor].dims) if tensor in self._known else None

    def _is_vector(self, tensor: str) -> bool:
        """Whether a scale or zero point is a constant with several values."""
        return tensor in self._known and int(np.prod(self._known[tensor].dims)) > 1

    def _has_plain_scales(self, node: onnx.NodeProto) -> bool:
        """Whether no constant that the node reads is in another float type than float32."""
        others = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
        return not any(self._known[name].data_type in others for name in node.input if name in self._known)

    def _constant(self, value: np.ndarray | np.generic) -> str:
        name = self._free("defined/constant")
        self._constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _add(self, op_type: str, inputs: Sequence[str], attributes: Attributes = ()) -> str:
        output = self._free(f"defined/{op_type}")
        made = helper.make_node(op_type, inputs, [output], output)
        made.attribute.extend(attributes)
        self._made.append(made)
        return output

    def _finish(
        self, op_type: str, inputs: Sequence[str], node: onnx.NodeProto, attributes: Attributes = ()
    ) -> bool:
        """The last node of a definition, with the output and the name of the operator."""
        made = helper.make_node(op_type, [*filter(None, inputs)], list(node.output), node.name)
        made.attribute.extend(attributes)
        self._made.append(made)
        return True


_Define: TypeAlias = Callable[[_Rewriting, onnx.NodeProto], bool]
_STANDARD: Mapping[str, _Define] = {
    "ConvInteger": _Rewriting.conv_integer,
    "MatMulInteger": _Rewriting.matmul_integer,
    "QLinearConv": _Rewriting.qlinear_conv,
    "QLinearMatMul": _Rewriting.qlinear_matmul,
}
_OF_RUNTIME: Mapping[str, _Define] = {
    "DynamicQuantizeLSTM": _Rewriting.with_unsigned_weights,
    "DynamicQuantizeMatMul": _Rewriting.dynamic_quantize_matmul,
    "MatMulIntegerToFloat": _Rewriting.matmul_integer_to_float,
    "QAttention": _Rewriting.with_unsigned_weights,
    "QGemm": _Rewriting.qgemm,
}


def _definition_of(node: onnx.NodeProto) -> _Define | None:
    if node.domain in DEFAULT_DOMAINS:
        return _STANDARD.get(node.op_type)
    return _OF_RUNTIME.get(node.op_type) if node.domain == CONTRIBUTED else None
