"""Odd models by their tensors: types, empty and scalar ones, and how values are stored."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from odd.written import CONV, DENSE, OddModel, write


def _of_type(name: str) -> onnx.ModelProto:
    kind = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "double": TensorProto.DOUBLE}[
        name
    ]
    proto = write(
        f"net ({name}[1, 8] x) => ({name}[1, 8] y) {{ h = MatMul(x, w)\n r = Relu(h)\n y = MatMul(r, v) }}",
        DENSE,
    )
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(kind))
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return proto


def _zero_size() -> onnx.ModelProto:
    return write(
        """net (float[1, 8] x, float[0, 8] empty) => (float[1, 8] y, float[0, 8] z) {
            all = Concat <axis = 0> (x, empty)
            y = MatMul(all, w)
            z = MatMul(empty, v)
        }""",
        DENSE,
    )


def _scalar_input() -> onnx.ModelProto:
    proto = write(
        """net (float[1, 8] x, float[1] gain) => (float[1, 8] y) {
            h = MatMul(x, w)
            y = Mul(h, gain)
        }""",
        DENSE,
    )
    del proto.graph.input[1].type.tensor_type.shape.dim[:]
    return proto


def _input_with_default(ir: int) -> onnx.ModelProto:
    """Until IR 3 each initializer had to be an input; later such an input is a default that a caller may replace."""
    proto = write(
        "net (float[1, 8] x, float[8, 8] w) => (float[1, 8] y) { y = MatMul(x, w) }", ir=ir, opset=8
    )
    values = np.random.default_rng(0).normal(0, 0.3, (8, 8)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(values, "w"))
    return proto


def _sparse() -> onnx.ModelProto:
    proto = write(
        """net (float[1, 8] x) => (float[1, 8] y) {
            h = MatMul(x, w)
            y = MatMul(h, rare)
        }""",
        {"w": (8, 8)},
    )
    values = numpy_helper.from_array(np.linspace(0.1, 1, 8, dtype=np.float32), "rare")
    places = numpy_helper.from_array(np.arange(0, 64, 9, dtype=np.int64), "rare_places")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [8, 8]))
    return proto


def _strings() -> onnx.ModelProto:
    return write(
        """net (float[1, 8] x) => (float[1, 8] y, string[2] label) <string[2] words = {"yes", "no"}> {
            y = MatMul(x, w)
            label = Identity(words)
        }""",
        {"w": (8, 8)},
    )


def _string_input() -> onnx.ModelProto:
    return write("net (string[1] x) => (string[1] y) { y = Identity(x) }")


def _sequence_inside() -> onnx.ModelProto:
    return write(
        """net (float[2, 8] x) => (float[2, 8] y) <int64 first = {0}> {
            h = MatMul(x, w)
            rows = SplitToSequence <axis = 0> (h)
            row = SequenceAt(rows, first)
            all = ConcatFromSequence <axis = 0> (rows)
            sum = Add(all, row)
            y = MatMul(sum, v)
        }""",
        DENSE,
    )


def _sequence_input() -> onnx.ModelProto:
    return write(
        """net (seq(float[1, 8]) rows) => (float[1, 8] y) <int64 first = {0}> {
            row = SequenceAt(rows, first)
            y = MatMul(row, w)
        }""",
        {"w": (8, 8)},
    )


def _sequence_output() -> onnx.ModelProto:
    proto = write(
        """net (float[2, 8] x) => (float[2, 8] y, float[2, 8] rows) {
            y = MatMul(x, w)
            rows = SplitToSequence <axis = 0> (y)
        }""",
        {"w": (8, 8)},
    )
    row = helper.make_tensor_type_proto(TensorProto.FLOAT, [1, 8])
    proto.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(row))
    return proto


def _optional_input() -> onnx.ModelProto:
    return write(
        """net (optional(float[1, 8]) maybe) => (float[1, 8] y) {
            x = OptionalGetElement(maybe)
            y = MatMul(x, w)
        }""",
        {"w": (8, 8)},
        opset=18,
    )


def _unnamed_dimensions() -> onnx.ModelProto:
    return write("net (float[?, 8] x) => (float[?, 8] y) { h = MatMul(x, w)\n y = MatMul(h, v) }", DENSE)


def _unknown_dimensions() -> onnx.ModelProto:
    return write("net (float[?, 3, ?, ?] x) => (float[?, 4, ?, ?] y) { y = Conv(x, w) }", {"w": CONV["w"]})


def _unknown_rank() -> onnx.ModelProto:
    proto = write("net (float[1, 8] x) => (float[1, 8] y) { y = MatMul(x, w) }", {"w": (8, 8)})
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    return proto


def _infinite_mask() -> onnx.ModelProto:
    proto = write(
        """net (float[8, 8] x) => (float[8, 8] y) {
            q = MatMul(x, w)
            masked = Add(q, mask)
            p = Softmax(masked)
            y = MatMul(p, v)
        }""",
        DENSE,
    )
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
    proto.graph.initializer.append(numpy_helper.from_array(mask, "mask"))
    return proto


TENSORS = (
    OddModel(name="float16", oddity="all is float16", make=partial(_of_type, "float16")),
    OddModel(name="bfloat16", oddity="all is bfloat16", make=partial(_of_type, "bfloat16")),
    OddModel(name="double", oddity="all is double", make=partial(_of_type, "double"), outcome="nothing"),
    OddModel(name="zero-size", oddity="an input without an element", make=_zero_size),
    OddModel(name="scalar-input", oddity="an input of rank 0", make=_scalar_input),
    OddModel(
        name="input-with-default", oddity="a weight that a caller may replace",
        make=partial(_input_with_default, 8),
    ),
    OddModel(name="initializers-are-inputs", oddity="IR 3", make=partial(_input_with_default, 3)),
    OddModel(name="sparse-weight", oddity="a sparse initializer", make=_sparse),
    OddModel(name="string-constant", oddity="an output of strings", make=_strings),
    OddModel(
        name="string-input", oddity="an input of strings", make=_string_input,
        outcome="refused", error_text="'x' holds strings",
    ),
    OddModel(name="sequence", oddity="a sequence between operators", make=_sequence_inside),
    OddModel(
        name="sequence-input", oddity="an input that is a sequence", make=_sequence_input,
        outcome="refused", error_text="'rows' is a sequence",
    ),
    OddModel(name="sequence-output", oddity="an output that is a sequence", make=_sequence_output),
    OddModel(
        name="optional-input", oddity="an input that may be missing", make=_optional_input,
        outcome="refused", error_text="'maybe' is optional",
    ),
    OddModel(name="unnamed-dimension", oddity="a dynamic batch without a name", make=_unnamed_dimensions),
    OddModel(
        name="unnamed-dimensions", oddity="dynamic height and width", make=_unknown_dimensions,
        outcome="refused", error_text="dimension 2 of input 'x' is dynamic",
    ),
    OddModel(
        name="unknown-rank", oddity="an input of any rank", make=_unknown_rank,
        outcome="refused", error_text="'x' has no known rank",
    ),
    OddModel(name="infinite-mask", oddity="minus infinity in an attention mask", make=_infinite_mask),
)  # fmt: skip
