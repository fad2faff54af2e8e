"""What ONNX defines a model to compute: by its reference implementation, and by operators that define integer ones.

A runtime computes QLinearConv and similar operators with kernels that may saturate, also without any optimization.
`as_defined` replaces such an operator by float operators on dequantized operands, which compute its result exactly but
for the rounding of float32. Operators with a recurrence or of domain ``com.microsoft`` only (DynamicQuantizeLSTM,
QAttention) stay; their int8 weights become the same numbers in uint8, for which kernels do not saturate.

Source: https://onnx.ai/onnx/operators; for domain ``com.microsoft``, the document ContribOperators.md of its runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import QDQ_OPS, is_default
from qdqspec.graph.protos import (
    CONTRIBUTED,
    attribute_of,
    copied,
    copy_model,
    free_name,
    names_in,
    opset_of,
    padded_inputs,
    refill,
)
from qdqspec.graph.trt import is_pair_op, meanings

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

# Inputs of operators that stay: each weight and its zero point.
_WEIGHTS = {"DynamicQuantizeLSTM": ((1, 9), (2, 11)), "QAttention": ((1, 7),)}
# Inputs of products by role. The bias of MatMul is float, that of Conv and Gemm integers of scale a_scale * b_scale.
_PRODUCTS = {
    "ConvInteger": "a b a_zero b_zero",
    "MatMulInteger": "a b a_zero b_zero",
    "QLinearConv": "a a_scale a_zero b b_scale b_zero y_scale y_zero bias",
    "QLinearMatMul": "a a_scale a_zero b b_scale b_zero y_scale y_zero",
    "DynamicQuantizeMatMul": "a b b_scale b_zero bias",
    "MatMulIntegerToFloat": "a b a_scale b_scale a_zero b_zero bias",
    "QGemm": "a a_scale a_zero b b_scale b_zero bias y_scale y_zero",
}
_STANDARD = frozenset({"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"})
_KNOWS_DEQUANTIZE = 19  # onnx 1.23 has no version of DequantizeLinear for lower opsets


def evaluator_of(proto: onnx.ModelProto) -> ReferenceEvaluator:
    """The reference implementation of a model, with what it lacks, such as the operators of `qdqspec.graph.trt`."""
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

    class GatherElements(OpRun):
        """That of onnx 1.23 takes at most 64 elements along the axis, the limit of ``numpy.choose``."""

        op_domain = ""

        def _run(self, data, indices, axis=0):  # type: ignore[no-untyped-def]  # its seam
            parts = [slice(size) for size in indices.shape]
            parts[axis] = slice(None)
            return (np.take_along_axis(data[tuple(parts)], indices, axis),)

    foreign = [*meanings(proto)]
    if foreign:
        proto = copy_model(proto)
        proto.functions.extend(foreign)
        defaults = {function.name: function.attribute_proto for function in foreign}
        # the evaluator has defaults of its own operators only
        for node in filter(is_pair_op, proto.graph.node):
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(one for one in defaults[node.op_type] if one.name not in given)
    old = [DequantizeLinear] if opset_of(proto) < _KNOWS_DEQUANTIZE else []
    return ReferenceEvaluator(proto, new_ops=[GatherElements, *old])


# ---- integer operators ---------------------------------------------------------------------------


def as_defined(model: Model) -> onnx.ModelProto:
    """The model with integer operators replaced; the model's own proto if it has none.

    Operators with scales of another type than float32, or with scales for each row of a product, stay.
    """
    return _Rewriting(model).proto() if any(map(_is_defined, model.nodes)) else model.proto


def is_quantized(model: Model) -> bool:
    """Whether a model has Q/DQ nodes or operators that compute in integers."""
    return any(node.op_type in QDQ_OPS or _is_defined(node) for node in model.nodes)


def _is_defined(node: Node) -> bool:
    """Whether it is an operator that `as_defined` changes."""
    if is_default(node):
        return node.op_type in _STANDARD
    return node.domain == CONTRIBUTED and node.op_type in (_PRODUCTS.keys() | _WEIGHTS.keys()) - _STANDARD


class _Rewriting:
    """Replaces the operators of a model, on its flat form."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known = model.constants
        self._free = partial(free_name, taken=names_in(model.flat.graph))
        self._made: list[onnx.NodeProto] = []  # for the current operator
        self._constants: list[TensorProto] = []

    def proto(self) -> onnx.ModelProto:
        nodes: list[onnx.NodeProto] = []
        others = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
        for node in self._model.nodes:
            self._made = []
            read = (self._known[name].data_type for name in node.inputs if name in self._known)
            if _is_defined(node) and not any(kind in others for kind in read):
                if node.op_type in _WEIGHTS:
                    self._keep_with_unsigned_weights(node.proto)
                else:
                    self._define_product(node.proto)
            nodes += self._made or [node.proto]
        flat = copy_model(self._model.flat, but={"node"})
        flat.graph.node.extend(nodes)
        flat.graph.initializer.extend(self._constants)
        return Model(flat).proto

    def _keep_with_unsigned_weights(self, node: onnx.NodeProto) -> None:
        """An operator that stays, with uint8 weights in the place of int8 ones."""
        changed = copied(node)
        for place, zero_place in _WEIGHTS[node.op_type]:
            given = padded_inputs(node, zero_place + 1)
            weight, zero = self._known.get(given[place]), self._known.get(given[zero_place])
            if weight is None or weight.data_type != TensorProto.INT8 or (given[zero_place] and zero is None):
                continue
            changed.input.extend([""] * (zero_place + 1 - len(changed.input)))
            zeros = np.zeros((), np.int8) if zero is None else self._model.array(given[zero_place])
            for input_, values in ((place, self._model.array(given[place])), (zero_place, zeros)):
                changed.input[input_] = self._constant((values.astype(np.int16) + 128).astype(np.uint8))
        self._made.append(changed)

    def _define_product(self, node: onnx.NodeProto) -> None:
        """Dequantize both operands, multiply in float, and quantize; nothing if scales are for each row."""
        roles = _PRODUCTS[node.op_type].split()
        given = dict(zip(roles, padded_inputs(node, len(roles)), strict=True))
        a, b, bias = given["a"], given["b"], given.get("bias", "")
        a_scale, a_zero, b_scale, b_zero, y_scale = (
            given.get(role, "") for role in ("a_scale", "a_zero", "b_scale", "b_zero", "y_scale")
        )
        kind = "Conv" if "Conv" in node.op_type else "Gemm" if "Gemm" in node.op_type else "MatMul"
        by_rows = kind == "Conv" or attribute_of(node, "transB", 0) == 1  # output channels are axis 0 of b
        if any(map(self._is_vector, (a_scale, a_zero, y_scale))):
            return
        if by_rows and b not in self._known and any(map(self._is_vector, (b_scale, b_zero))):
            return
        if node.op_type == "DynamicQuantizeMatMul":
            found = [self._free(f"{node.output[0]}/{part}") for part in ("integers", "scale", "zero")]
            self._made.append(helper.make_node("DynamicQuantizeLinear", [a], found))
            a, a_scale, a_zero = found
        left = self._dequantized(a, a_scale, a_zero)
        if kind == "Gemm":
            alpha = self._constant(np.float32(attribute_of(node, "alpha", 1.0)))
            left = self._add("Mul", [left, alpha])
            a_scale = self._add("Mul", [a_scale, alpha]) if bias else a_scale
        columns = (self._column(name, b) if by_rows else name for name in (b_scale, b_zero))
        operands = [left, self._dequantized(b, *columns)]
        if bias and kind != "MatMul":  # integers of scale a_scale * b_scale
            operands.append(self._add("Mul", [self._float(bias), self._add("Mul", [a_scale, b_scale])]))
        result = self._add(kind, operands, [each for each in node.attribute if each.name != "alpha"])
        if bias and kind == "MatMul":
            self._add("Add", [result, bias])
        if y_scale:
            self._add("QuantizeLinear", [result, y_scale, *filter(None, [given["y_zero"]])])
        elif node.op_type in ("ConvInteger", "MatMulInteger"):
            self._add("Cast", [result], [helper.make_attribute("to", TensorProto.INT32)])
        self._made[-1].name = node.name
        refill(self._made[-1].output, node.output)

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
        if weight not in self._known or not self._is_vector(tensor):
            return tensor
        ones = [1] * (len(self._known[weight].dims) - 1)
        return self._add("Reshape", [tensor, self._constant(np.array([-1, *ones], np.int64))])

    def _is_vector(self, tensor: str) -> bool:
        """Whether a scale or zero point is a constant with several values."""
        return tensor in self._known and int(np.prod(self._known[tensor].dims)) > 1

    def _constant(self, value: np.ndarray | np.generic) -> str:
        name = self._free("defined/constant")
        self._constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _add(
        self, op_type: str, inputs: Sequence[str], attributes: Iterable[onnx.AttributeProto] = ()
    ) -> str:
        output = self._free(f"defined/{op_type}")
        made = helper.make_node(op_type, inputs, [output], output)
        made.attribute.extend(attributes)
        self._made.append(made)
        return output
