"""Q/DQ pairs that cost time in ONNX Runtime's CPU provider, because they do not become integer kernels.

All rules were measured with ONNX Runtime 1.31.1 on x86-64, and are verified against the installed version in
``tests/unit/lint/test_onnxruntime.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from qdqspec.backends.onnxruntime.lint.rule import rule
from qdqspec.backends.onnxruntime.ops import ABSORBED, LABELS, MOVING
from qdqspec.graph.model import Node
from qdqspec.lint.rules import Hit
from qdqspec.lint.view import View

_MEASURED = "measured, ONNX Runtime 1.31.1"
# A Q after them is moved before them.
_PASSED = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_MAX_POOL_SINCE = 12
_LOWEST: dict[int | None, int] = {
    TensorProto.UINT8: 0,
    TensorProto.INT8: -128,
    TensorProto.UINT16: 0,
    TensorProto.INT16: -32768,
}


@rule(
    "ORT020",
    "slow",
    "A convolution reads quantized data and gives float: it runs in float, and dequantizes its weight in every run",
    cure="quantize what follows it too, or leave it in float",
    source=f"{_MEASURED}: Conv has a kernel for integers in and out only",
)
def float_convolutions(view: View) -> Iterator[Hit]:
    """A Conv with both inputs dequantized, whose result has a float reader."""
    for node in view.operators:
        made = view.inputs(node) if node.op_type == "Conv" else {}
        if len(made) == 2 and all(made.values()):
            why = _seen_in_float(view, node)
            if why:
                yield Hit(node.name, why)


@rule(
    "ORT021",
    "slow",
    "An operator reads quantized tensors and gives float: it runs in float",
    cure="quantize what follows it too, or leave it in float",
    source=f"{_MEASURED}: only MatMul and Gemm have a kernel for integers in and float out",
)
def float_results(view: View) -> Iterator[Hit]:
    """Any other operator with an integer kernel, whose inputs were quantized for it alone and whose result is float."""
    for node in view.operators:
        offered = LABELS.get(node.op_type, ())
        if node.op_type == "Conv" or "in-only" in offered or not offered or not _reads_integers(view, node):
            continue
        own = any(
            len(view.readers(dq.outputs[0])) == 1 for dq in view.inputs(node).values() if dq is not None
        )
        why = _seen_in_float(view, node)
        if own and why and not _dequantizes_for_free(view, node):
            yield Hit(node.name, why)


@rule(
    "ORT022",
    "slow",
    "An operator without an integer kernel stands between pairs: each of them runs",
    cure="leave it in float, together with its neighbours where they are small",
    source=f"{_MEASURED}: ConvTranspose, Pad, ReduceMean, LayerNormalization, Sub, Div, Tanh, Gelu and others",
)
def no_integer_kernel(view: View) -> Iterator[Hit]:
    """An operator without an integer kernel between a dequantized activation and a quantized result."""
    for node in view.operators:
        fits = node.op_type in LABELS and not _mixes_values(node)
        made = [dq for dq in view.inputs(node).values() if dq is not None and view.stored_weight(dq) is None]
        if fits or node.op_type in ABSORBED or not made:
            continue
        if any(view.quantizers(output) for output in node.outputs):
            yield Hit(node.name, f"is a {node.op_type}")


@rule(
    "ORT023",
    "slow",
    "A weight is dequantized in every run",
    cure="keep the weight in float where its operator runs in float",
    source=f"{_MEASURED}: a DequantizeLinear of a constant is not folded",
)
def unfused_weights(view: View) -> Iterator[Hit]:
    """A stored weight without an integer kernel: of an unsupported operator, or with float data."""
    for dequantizer in view.dequantizers:
        numbers = view.numbers(dequantizer)
        if view.stored_weight(dequantizer) is None or numbers.block or numbers.elem_type == TensorProto.INT32:
            continue
        for node in view.readers(dequantizer.outputs[0]):
            why = _cannot_take_weight(view, node)
            if why:
                yield Hit(dequantizer.name, f"'{node.name}' {why}")
                break


@rule(
    "ORT024",
    "slow",
    "A Gemm that gives float has a float bias: its weight is dequantized in every run",
    cure="store the bias as int32 behind a DequantizeLinear, with input scale times weight scale",
    source=f"{_MEASURED}; a MatMul with an Add of a constant becomes such a Gemm",
)
def float_biases(view: View) -> Iterator[Hit]:
    """A quantized Gemm with a float bias, or MatMul whose only reader adds a flat float constant; a float result."""
    for node in view.operators:
        owner = node if node.op_type == "Gemm" else _adder(view, node)
        if node.op_type not in ("Gemm", "MatMul") or owner is None or not _reads_integers(view, node):
            continue
        constants = [t for t in owner.inputs if t in view.model.constants and _is_flat(view, t)]
        if constants and _seen_in_float(view, owner):
            yield Hit(node.name, f"adds '{constants[0]}'")


@rule(
    "ORT025",
    "slow",
    "An operator reads quantized and float tensors: it runs in float",
    cure="quantize the other operand too, constants as well",
    source=f"{_MEASURED}: float constants of Add and Mul stop the fusion",
)
def mixed_operands(view: View) -> Iterator[Hit]:
    """Add, Mul, Concat or Where with a quantized result and some data inputs in float."""
    for node in view.operators:
        made = view.inputs(node) if node.op_type in ("Add", "Concat", "Mul", "Where") else {}
        floats = [index for index, dq in made.items() if dq is None]
        if floats and len(floats) < len(made) and view.quantizers(node.outputs[0]):
            tensor = node.inputs[floats[0]]
            kind = "constant" if tensor in view.model.constants else "tensor"
            yield Hit(node.name, f"reads float {kind} '{tensor}'")


@rule(
    "ORT026",
    "slow",
    "The scales on both sides of an operator that moves values differ: it runs in float",
    cure="give both sides the same scale and zero point",
    source=_MEASURED,
)
def moved_scales(view: View) -> Iterator[Hit]:
    """MaxPool, Transpose and similar between a DQ and a Q with different numbers."""
    for node in view.operators:
        moves = node.op_type in MOVING and not _mixes_values(node)
        before = view.dequantizer(node.inputs[0]) if moves else None
        if before is None:
            continue
        for after in view.quantizers(node.outputs[0]):
            if not view.numbers(before).same_scale(view.numbers(after)):
                yield Hit(node.name, f"stands between '{before.name}' and '{after.name}'")
                break


@rule(
    "ORT028",
    "slow",
    "A quantized MaxPool of an opset below 12 runs in float",
    cure="export with opset 12 or above, or leave it in float",
    source=_MEASURED,
)
def old_max_pool(view: View) -> Iterator[Hit]:
    """A MaxPool between pairs in a model of an older opset, whose MaxPool does not support 8-bit integers."""
    for node in view.operators if view.model.opset < _MAX_POOL_SINCE else ():
        if (
            node.op_type == "MaxPool"
            and view.dequantizer(node.inputs[0])
            and view.quantizers(node.outputs[0])
        ):
            yield Hit(node.name, f"is of opset {view.model.opset}")


@rule(
    "ORT027",
    "slow",
    "A Relu stays between its pairs: the zero point behind it is not the lowest value",
    cure="quantize to uint8 with zero point 0, so that quantizing does the cutting off",
    source=_MEASURED,
)
def staying_relu(view: View) -> Iterator[Hit]:
    """A Relu that reads a dequantized tensor and is followed by a Q with a zero point above the lowest value."""
    for node in view.operators:
        behind = view.quantizers(node.outputs[0]) if node.op_type == "Relu" else ()
        if behind and view.dequantizer(node.inputs[0]) and not _vanishes(view, node, behind[0]):
            yield Hit(node.name, f"stands before '{behind[0].name}'")


def _seen_in_float(view: View, node: Node) -> str:
    """The float reader of the result of an operator and of what fuses into it; empty if there is none."""
    chain = view.fused(node, ABSORBED | _passed(view))
    result = chain[-1].outputs[0]
    readers = view.readers(result)
    quantizers = view.quantizers(result)
    stays = [each for each in chain if quantizers and not _vanishes(view, each, quantizers[0])]
    if stays:
        return f"'{stays[0].name}' stays: the zero point behind it is not the lowest value"
    if result in view.model.outputs:
        return f"'{result}' is an output of the model"
    if result in view.model.captured:
        return f"a body of If, Loop or Scan reads '{result}'"
    if not readers:
        return ""
    others = [reader for reader in readers if reader not in quantizers]
    if others:
        beside = "also " if quantizers else ""
        return f"{others[0].op_type} '{others[0].name}' {beside}reads it in float"
    return ""


def _passed(view: View) -> frozenset[str]:
    return _PASSED if view.model.opset >= _MAX_POOL_SINCE else _PASSED - {"MaxPool"}


def _vanishes(view: View, node: Node, quantizer: Node) -> bool:
    """Whether an operator, if it is a Relu, is folded into the Q after it. A Clip's bounds are not judged."""
    numbers = view.numbers(quantizer)
    if node.op_type != "Relu" or numbers.zero_point is None or numbers.elem_type not in _LOWEST:
        return True
    return not np.any(numbers.zero_point != _LOWEST[numbers.elem_type])


def _reads_integers(view: View, node: Node) -> bool:
    made = view.inputs(node)
    return bool(made) and all(dq is not None for dq in made.values())


def _mixes_values(node: Node) -> bool:
    return node.op_type == "Resize" and node.attributes.get("mode", b"nearest") != b"nearest"


def _dequantizes_for_free(view: View, node: Node) -> bool:
    """Whether ONNX Runtime moves a DQ before an operator that moves values to after it at no cost."""
    return node.op_type in MOVING and not view.quantizers(node.outputs[0])


def _cannot_take_weight(view: View, node: Node) -> str:
    if node.op_type not in LABELS:
        return f"is a {node.op_type}"
    if node.op_type not in ("Conv", "Gemm", "MatMul"):
        return ""
    if view.dequantizer(node.inputs[0]) is None and node.inputs[0] not in view.model.constants:
        return f"reads '{node.inputs[0]}' in float"
    return ""


def _adder(view: View, node: Node) -> Node | None:
    readers = view.readers(node.outputs[0]) if node.outputs else ()
    return readers[0] if len(readers) == 1 and readers[0].op_type == "Add" else None


def _is_flat(view: View, tensor: str) -> bool:
    return len(view.model.constants[tensor].dims) == 1
