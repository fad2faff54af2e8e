"""Odd models by the structure of their graph, their opset, and existing quantization."""

from __future__ import annotations

from onnx import helper

from odd.written import CONV, DENSE, ONE, OddModel, odd

_WEIGHT = ", ".join(str(number % 7) for number in range(64))
_CHAIN = "\n".join(f"h{i + 1} = Relu(h{i})" for i in range(400))


def _of_opset(opset: int) -> OddModel:
    return odd(
        f"opset-{opset}",
        f"default opset {opset}",
        """net (float[1, 3, 8, 8] x) => (float[1, 4, 4, 4] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w)
            b = Relu(a)
            c = Conv <pads = [1, 1, 1, 1]> (b, v)
            d = Add(b, c)
            y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)
        }""",
        CONV,
        opset=opset,
        # before IR 4, weights had to be inputs
        ir=max(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]), 4),
    )


GRAPHS = (
    *map(_of_opset, range(7, 26)),
    odd(
        "no-nodes",
        "nothing is computed",
        "net (float[1, 8] x) => (float[1, 8] x) {}",
        refused="the model has no nodes",
    ),
    odd(
        "only-copies",
        "nothing is computed, values are moved",
        """net (float[1, 4, 6] x) => (float[24] y) <int64[1] form = {-1}> {
            a = Transpose <perm = [0, 2, 1]> (x)
            b = Identity(a)
            y = Reshape(b, form)
        }""",
    ),
    odd(
        "output-is-input",
        "an input is an output, too",
        "net (float[1, 8] x) => (float[1, 8] x, float[1, 8] y) { y = MatMul(x, w) }",
        ONE,
    ),
    odd(
        "output-is-weight",
        "a weight is an output, too",
        "net (float[1, 8] x) => (float[1, 8] y, float[8, 8] w) { y = MatMul(x, w) }",
        ONE,
    ),
    odd(
        "output-twice",
        "one tensor is two outputs",
        "net (float[1, 8] x) => (float[1, 8] y, float[1, 8] y) { y = MatMul(x, w) }",
        ONE,
    ),
    odd(
        "missing-operands",
        "an operand left out in the middle",
        """net (float[1, 8] x) => (float[1, 8] y) <float high = {6}> {
            h = MatMul(x, w)
            c = Clip(h, , high)
            y = MatMul(c, v)
        }""",
        DENSE,
    ),
    odd(
        "unread",
        "inputs, weights and results that nothing reads",
        """net (float[1, 8] x, float[3] nobody) => (float[1, 8] y) {
            y = MatMul(x, w)
            dead = MatMul(x, v)
        }""",
        {**DENSE, "unused": (5, 5)},
    ),
    odd(
        "training-batchnorm",
        "training mode",
        """net (float[2, 3, 6, 6] x) => (float[2, 4, 6, 6] y, float[4] m, float[4] s) {
            h = Conv <pads = [1, 1, 1, 1]> (x, w)
            y, m, s = BatchNormalization <training_mode = 1> (h, scale, bias, mean, one)
        }""",
        {"w": CONV["w"], "scale": (4,), "bias": (4,), "mean": (4,), "one": (4,)},
    ),
    odd(
        "q-operators",
        "QLinearMatMul",
        f"""net (uint8[1, 8] x) => (uint8[1, 8] y)
        <float s = {{0.1}}, uint8 z = {{128}}, uint8[8, 8] w = {{{_WEIGHT}}}> {{
            y = QLinearMatMul(x, s, z, w, s, z, s, z)
        }}""",
        nothing=True,
    ),
    odd(
        "integer-operators",
        "DynamicQuantizeLinear, MatMulInteger",
        f"""net (float[1, 8] x) => (float[1, 8] y) <uint8[8, 8] w = {{{_WEIGHT}}}> {{
            q, s, z = DynamicQuantizeLinear(x)
            h = MatMulInteger(q, w, z)
            f = Cast <to = 1> (h)
            g = Mul(f, s)
            y = MatMul(g, v)
        }}""",
        {"v": (8, 8)},
    ),
    odd(
        "pairs-already",
        "a Q/DQ pair is in it",
        """net (float[1, 8] x) => (float[1, 8] y) <float s = {0.05}, uint8 z = {128}> {
            q = QuantizeLinear(x, s, z)
            d = DequantizeLinear(q, s, z)
            h = MatMul(d, w)
            y = MatMul(h, v)
        }""",
        DENSE,
    ),
    odd(
        "long-chain",
        "400 operators one after another",
        f"net (float[1, 8] x) => (float[1, 8] y) {{ h0 = MatMul(x, w)\n {_CHAIN}\n y = MatMul(h400, v) }}",
        DENSE,
    ),
)
