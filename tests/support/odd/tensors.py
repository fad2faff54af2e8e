"""Odd models by their tensors: types, empty and scalar ones, and how values are stored."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from odd.written import CONV, DENSE, ONE, OddModel, odd


def _retype(elem_type: int, proto: onnx.ModelProto) -> None:
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(elem_type))
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _of_type(name: str, elem_type: int, *, nothing: bool = False) -> OddModel:
    text = f"net ({name}[1, 8] x) => ({name}[1, 8] y) {{ h = MatMul(x, w)\n r = Relu(h)\n y = MatMul(r, v) }}"
    return odd(name, f"all is {name}", text, DENSE, nothing=nothing, change=partial(_retype, elem_type))


def _add_default(proto: onnx.ModelProto) -> None:
    values = np.random.default_rng(0).normal(0, 0.3, (8, 8)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(values, "w"))


def _with_default(name: str, oddity: str, ir: int) -> OddModel:
    """Until IR 3 each initializer had to be an input; later such an input is a default that a caller may replace."""
    text = "net (float[1, 8] x, float[8, 8] w) => (float[1, 8] y) { y = MatMul(x, w) }"
    return odd(name, oddity, text, ir=ir, opset=8, change=_add_default)


def _add_sparse(proto: onnx.ModelProto) -> None:
    values = numpy_helper.from_array(np.linspace(0.1, 1, 8, dtype=np.float32), "rare")
    places = numpy_helper.from_array(np.arange(0, 64, 9, dtype=np.int64), "rare_places")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [8, 8]))


def _add_mask(proto: onnx.ModelProto) -> None:
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
    proto.graph.initializer.append(numpy_helper.from_array(mask, "mask"))


def _output_sequence(proto: onnx.ModelProto) -> None:
    row = helper.make_tensor_type_proto(TensorProto.FLOAT, [1, 8])
    proto.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(row))


def _make_scalar(proto: onnx.ModelProto) -> None:
    del proto.graph.input[1].type.tensor_type.shape.dim[:]


TENSORS = (
    _of_type("float16", TensorProto.FLOAT16),
    _of_type("bfloat16", TensorProto.BFLOAT16),
    _of_type("double", TensorProto.DOUBLE, nothing=True),
    odd(
        "zero-size",
        "an input without an element",
        """net (float[1, 8] x, float[0, 8] empty) => (float[1, 8] y, float[0, 8] z) {
            all = Concat <axis = 0> (x, empty)
            y = MatMul(all, w)
            z = MatMul(empty, v)
        }""",
        DENSE,
    ),
    odd(
        "scalar-input",
        "an input of rank 0",
        "net (float[1, 8] x, float[1] gain) => (float[1, 8] y) { h = MatMul(x, w)\n y = Mul(h, gain) }",
        DENSE,
        change=_make_scalar,
    ),
    _with_default("input-with-default", "a weight that a caller may replace", 8),
    _with_default("initializers-are-inputs", "IR 3", 3),
    odd(
        "sparse-weight",
        "a sparse initializer",
        "net (float[1, 8] x) => (float[1, 8] y) { h = MatMul(x, w)\n y = MatMul(h, rare) }",
        ONE,
        change=_add_sparse,
    ),
    odd(
        "string-constant",
        "an output of strings",
        """net (float[1, 8] x) => (float[1, 8] y, string[2] label) <string[2] words = {"yes", "no"}> {
            y = MatMul(x, w)
            label = Identity(words)
        }""",
        ONE,
    ),
    odd(
        "string-input",
        "an input of strings",
        "net (string[1] x) => (string[1] y) { y = Identity(x) }",
        refused="'x' holds strings",
    ),
    odd(
        "sequence",
        "a sequence between operators",
        """net (float[2, 8] x) => (float[2, 8] y) <int64 first = {0}> {
            h = MatMul(x, w)
            rows = SplitToSequence <axis = 0> (h)
            row = SequenceAt(rows, first)
            all = ConcatFromSequence <axis = 0> (rows)
            sum = Add(all, row)
            y = MatMul(sum, v)
        }""",
        DENSE,
    ),
    odd(
        "sequence-input",
        "an input that is a sequence",
        """net (seq(float[1, 8]) rows) => (float[1, 8] y) <int64 first = {0}> {
            row = SequenceAt(rows, first)
            y = MatMul(row, w)
        }""",
        ONE,
        refused="'rows' is a sequence",
    ),
    odd(
        "sequence-output",
        "an output that is a sequence",
        """net (float[2, 8] x) => (float[2, 8] y, float[2, 8] rows) {
            y = MatMul(x, w)
            rows = SplitToSequence <axis = 0> (y)
        }""",
        ONE,
        change=_output_sequence,
    ),
    odd(
        "optional-input",
        "an input that may be missing",
        """net (optional(float[1, 8]) maybe) => (float[1, 8] y) {
            x = OptionalGetElement(maybe)
            y = MatMul(x, w)
        }""",
        ONE,
        opset=18,
        refused="'maybe' is optional",
    ),
    odd(
        "unnamed-dimension",
        "a dynamic batch without a name",
        "net (float[?, 8] x) => (float[?, 8] y) { h = MatMul(x, w)\n y = MatMul(h, v) }",
        DENSE,
    ),
    odd(
        "unnamed-dimensions",
        "dynamic height and width",
        "net (float[?, 3, ?, ?] x) => (float[?, 4, ?, ?] y) { y = Conv(x, w) }",
        {"w": CONV["w"]},
        refused="dimension 2 of input 'x' is dynamic",
    ),
    odd(
        "unknown-rank",
        "an input of any rank",
        "net (float[1, 8] x) => (float[1, 8] y) { y = MatMul(x, w) }",
        ONE,
        change=lambda proto: proto.graph.input[0].type.tensor_type.ClearField("shape"),
        refused="'x' has no known rank",
    ),
    odd(
        "infinite-mask",
        "minus infinity in an attention mask",
        """net (float[8, 8] x) => (float[8, 8] y) {
            q = MatMul(x, w)
            masked = Add(q, mask)
            p = Softmax(masked)
            y = MatMul(p, v)
        }""",
        DENSE,
        change=_add_mask,
    ),
)
