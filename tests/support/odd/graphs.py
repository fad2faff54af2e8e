"""Odd models by the structure of their graph, their opset, and existing quantization."""

from __future__ import annotations

from functools import partial

import onnx
from onnx import helper

from odd.written import CONV, DENSE, OddModel, write

OPSETS = tuple(range(7, 26))


def _of_opset(opset: int) -> onnx.ModelProto:
    versions = [helper.make_opsetid("", opset)]
    return write(
        """net (float[1, 3, 8, 8] x) => (float[1, 4, 4, 4] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w)
            b = Relu(a)
            c = Conv <pads = [1, 1, 1, 1]> (b, v)
            d = Add(b, c)
            y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)
        }""",
        CONV,
        opset=opset,
        ir=max(helper.find_min_ir_version_for(versions), 4),  # before 4, weights had to be inputs
    )


def _no_nodes() -> onnx.ModelProto:
    return write("net (float[1, 8] x) => (float[1, 8] x) {}")


def _only_copies() -> onnx.ModelProto:
    return write(
        """net (float[1, 4, 6] x) => (float[24] y) <int64[1] form = {-1}> {
            a = Transpose <perm = [0, 2, 1]> (x)
            b = Identity(a)
            y = Reshape(b, form)
        }"""
    )


def _output_is_input() -> onnx.ModelProto:
    return write("net (float[1, 8] x) => (float[1, 8] x, float[1, 8] y) { y = MatMul(x, w) }", {"w": (8, 8)})


def _output_is_weight() -> onnx.ModelProto:
    return write("net (float[1, 8] x) => (float[1, 8] y, float[8, 8] w) { y = MatMul(x, w) }", {"w": (8, 8)})


def _output_twice() -> onnx.ModelProto:
    return write("net (float[1, 8] x) => (float[1, 8] y, float[1, 8] y) { y = MatMul(x, w) }", {"w": (8, 8)})


def _missing_operands() -> onnx.ModelProto:
    return write(
        """net (float[1, 8] x) => (float[1, 8] y) <float high = {6}> {
            h = MatMul(x, w)
            c = Clip(h, , high)
            y = MatMul(c, v)
        }""",
        DENSE,
    )


def _unread() -> onnx.ModelProto:
    return write(
        """net (float[1, 8] x, float[3] nobody) => (float[1, 8] y) {
            y = MatMul(x, w)
            dead = MatMul(x, v)
        }""",
        {**DENSE, "unused": (5, 5)},
    )


def _training_batchnorm() -> onnx.ModelProto:
    return write(
        """net (float[2, 3, 6, 6] x) => (float[2, 4, 6, 6] y, float[4] m, float[4] s) {
            h = Conv <pads = [1, 1, 1, 1]> (x, w)
            y, m, s = BatchNormalization <training_mode = 1> (h, scale, bias, mean, one)
        }""",
        {"w": CONV["w"], "scale": (4,), "bias": (4,), "mean": (4,), "one": (4,)},
    )


def _q_operators() -> onnx.ModelProto:
    return write(
        f"""net (uint8[1, 8] x) => (uint8[1, 8] y)
        <float s = {{0.1}}, uint8 z = {{128}}, uint8[8, 8] w = {{{_numbers(64)}}}> {{
            y = QLinearMatMul(x, s, z, w, s, z, s, z)
        }}"""
    )


def _integer_operators() -> onnx.ModelProto:
    return write(
        f"""net (float[1, 8] x) => (float[1, 8] y) <uint8[8, 8] w = {{{_numbers(64)}}}> {{
            q, s, z = DynamicQuantizeLinear(x)
            h = MatMulInteger(q, w, z)
            f = Cast <to = 1> (h)
            g = Mul(f, s)
            y = MatMul(g, v)
        }}""",
        {"v": (8, 8)},
    )


def _numbers(count: int) -> str:
    return ", ".join(str(number % 7) for number in range(count))


def _pairs() -> onnx.ModelProto:
    return write(
        """net (float[1, 8] x) => (float[1, 8] y) <float s = {0.05}, uint8 z = {128}> {
            q = QuantizeLinear(x, s, z)
            d = DequantizeLinear(q, s, z)
            h = MatMul(d, w)
            y = MatMul(h, v)
        }""",
        DENSE,
    )


def _long_chain() -> onnx.ModelProto:
    steps = "\n".join(f"h{i + 1} = Relu(h{i})" for i in range(400))
    body = f"h0 = MatMul(x, w)\n {steps}\n y = MatMul(h400, v)"
    return write(f"net (float[1, 8] x) => (float[1, 8] y) {{ {body} }}", DENSE)


GRAPHS = (
    *(
        OddModel(name=f"opset-{opset}", oddity=f"default opset {opset}", make=partial(_of_opset, opset))
        for opset in OPSETS
    ),
    OddModel(
        name="no-nodes", oddity="nothing is computed", make=_no_nodes,
        outcome="refused", error_text="the model has no nodes",
    ),
    OddModel(name="only-copies", oddity="nothing is computed, values are moved", make=_only_copies),
    OddModel(name="output-is-input", oddity="an input is an output, too", make=_output_is_input),
    OddModel(name="output-is-weight", oddity="a weight is an output, too", make=_output_is_weight),
    OddModel(name="output-twice", oddity="one tensor is two outputs", make=_output_twice),
    OddModel(name="missing-operands", oddity="an operand left out in the middle", make=_missing_operands),
    OddModel(name="unread", oddity="inputs, weights and results that nobody reads", make=_unread),
    OddModel(name="training-batchnorm", oddity="training mode", make=_training_batchnorm),
    OddModel(name="q-operators", oddity="QLinearMatMul", make=_q_operators, outcome="nothing"),
    OddModel(name="integer-operators", oddity="DynamicQuantizeLinear, MatMulInteger", make=_integer_operators),
    OddModel(name="pairs-already", oddity="a Q/DQ pair stands in it", make=_pairs),
    OddModel(name="long-chain", oddity="400 operators one after another", make=_long_chain),
)  # fmt: skip
