"""Odd models: small models with unusual properties that tools often do not handle.

`ODD_MODELS` is a table for tests of code that reads, changes or runs models: a backend, a transform, a
command. The name of each entry is its unusual property; it states the expected result of tuning it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx_text import parsed

Outcome: TypeAlias = Literal["searched", "nothing", "refused"]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

ROW = "(float[1, 8] x) => (float[1, 8] y)"
CONV: Shapes = {"w": (4, 3, 3, 3), "v": (4, 4, 3, 3)}
DENSE: Shapes = {"w": (8, 8), "v": (8, 8)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OddModel:
    """One model, created by ``make``, and the expected result of tuning it.

    ``searched``: placements are tried, and the status follows from the measurements. ``nothing``: it is
    unchanged, since nothing in it can be quantized. ``refused``: one error that contains ``error_text``.
    """

    name: str
    make: Callable[[], onnx.ModelProto]
    outcome: Outcome = "searched"
    error_text: str = ""


def odd(
    name: str,
    nodes: str,
    ends: str = ROW,
    weights: Shapes = DENSE,
    *,
    functions: str = "",
    refused: str = "",
    nothing: bool = False,
    change: Callable[[onnx.ModelProto], object] | None = None,
    **how: int,
) -> OddModel:
    """An odd model from the text of its nodes, with the weights that they read; ``how`` are its versions.

    ``ends`` are its inputs, outputs and constants. ``change`` completes it with what text cannot express.
    """
    graph = f"net {ends} {{ {nodes} }} {functions}"

    def make() -> onnx.ModelProto:
        read = {name: shape for name, shape in weights.items() if re.search(rf"\b{name}\b", graph)}
        proto = parsed(graph, **how, **read).proto
        if change is not None:
            change(proto)
        return proto

    outcome: Outcome = "refused" if refused else "nothing" if nothing else "searched"
    return OddModel(name=name, make=make, outcome=outcome, error_text=refused)


def rename_tensors(proto: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """The model with tensors of its main graph renamed."""
    graph = proto.graph
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return proto


def name_nodes(proto: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """The model with these names for the nodes of its main graph, in order."""
    for node, name in zip(proto.graph.node, names, strict=True):
        node.name = name
    return proto


# ---- names ------------------------------------------------------------------------------------


_KINDS = {  # names for two results and a weight
    "colons": ("a:0", "a;1", "b::c:0"),
    "slashes": ("/layer1/0/conv/Conv_output_0", "/a//b/", "./../h"),
    "globs": ("model[0].h", "w*", "?r{1,2}!"),
    "spaces": (" h ", "r\tr", "a b"),
    "quotes": ("h\nh", "r\"r'", "a\\nb<script>&amp;"),
    "unicode": ("größe", "卷积/权重", "\u202e\U0001f600"),
    "endings": ("x_quantized", "x_dequantized", "x_scale"),
    "length": ("h" * 3000, "r" * 3000, "w" * 3000),
}


def _two_layers() -> onnx.ModelProto:
    return odd("", "h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v)").make()


def _with_names(kind: str) -> onnx.ModelProto:
    h, r, w = _KINDS[kind]
    named = name_nodes(_two_layers(), f"{h}/n", f"{r}/n", f"{w}/n")
    return rename_tensors(named, {"h": h, "r": r, "w": w})


NAMES = (
    *(OddModel(name=f"names-{kind}", make=partial(_with_names, kind)) for kind in _KINDS),
    OddModel(
        name="names-of-inputs",
        make=lambda: rename_tensors(_two_layers(), {"x": "in put:0", "y": "out/put;0"}),
    ),
    OddModel(name="names-missing", make=_two_layers),
    OddModel(name="names-repeated", make=lambda: name_nodes(_two_layers(), "same", "same", "same")),
    OddModel(name="names-of-others", make=lambda: name_nodes(_two_layers(), "", "MatMul#0", "MatMul#2")),
)


# ---- bodies, local functions, and operators of other domains ------------------------------------


def _deep_bodies() -> str:
    """Nested bodies, deeper than any exporter writes."""
    inner = "a0 = MatMul(h, v)"
    for level in range(1, 13):
        inner = (
            f"a{level} = If(yes) <then_branch = t{level} () => (float[1, 8] a{level - 1}) {{ {inner} }}, "
            f"else_branch = e{level} () => (float[1, 8] b{level}) {{ b{level} = Relu(h) }}>"
        )
    return f"h = MatMul(x, w)  {inner}"


BODIES = (
    odd(
        "if",
        """h = MatMul(x, w)
        y = If(yes) <then_branch = then () => (float[1, 8] a) { a = MatMul(h, v) },
            else_branch = other () => (float[1, 8] b) { b = Relu(h) }>""",
        f"{ROW} <bool yes = {{1}}>",
    ),
    odd(
        "loop",
        """h = MatMul(x, w)
        y = Loop(three, yes, h) <
            body = turn (int64 i, bool go_on, float[1, 8] state) => (bool goes_on, float[1, 8] next) {
                goes_on = Identity(go_on)  next = MatMul(state, v) }>""",
        f"{ROW} <int64 three = {{3}}, bool yes = {{1}}>",
    ),
    odd(
        "scan",
        """h = MatMul(x, w)  start = MatMul(rows, v)
        last, y = Scan <num_scan_inputs = 1,
            body = turn (float[1, 8] state, float[8] row) => (float[1, 8] next, float[1, 8] seen) {
                sum = Add(state, row)  next = MatMul(sum, v)  seen = Identity(next) }>(start, h)""",
        "(float[3, 8] x) => (float[1, 8] last, float[3, 1, 8] y)",
        {**DENSE, "rows": (1, 8)},
    ),
    odd("bodies-in-bodies", _deep_bodies(), f"{ROW.replace('y', 'a12')} <bool yes = {{1}}>"),
    odd(
        "local-function",
        "h = MatMul(x, w)  s = mine.Twice <gain = 2.0> (h)  y = MatMul(s, v)",
        functions="""<domain: "mine", opset_import: ["" : 17]> Twice <gain> (a) => (b) {
            g = Constant <value_float: float = @gain> ()  c = Mul(a, g)  b = Relu(c) }""",
    ),
    odd(
        "custom-operator",
        "h = MatMul(x, w)  c = acme.Secret <strength = 3> (h)  y = MatMul(c, v)",
        refused="acme",
    ),
)


# ---- types, empty and scalar tensors, and how values are stored ---------------------------------


def _retype(elem_type: int, proto: onnx.ModelProto) -> None:
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(elem_type))
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _of_type(name: str, elem_type: int, *, nothing: bool = False) -> OddModel:
    nodes, ends = "h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v)", ROW.replace("float", name)
    return odd(name, nodes, ends, nothing=nothing, change=partial(_retype, elem_type))


def _add_default(proto: onnx.ModelProto) -> None:
    values = np.random.default_rng(0).normal(0, 0.3, (8, 8)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(values, "w"))


def _with_default(name: str, ir: int) -> OddModel:
    """Until IR 3 each initializer had to be an input; later such an input is a default that a caller may replace."""
    ends = "(float[1, 8] x, float[8, 8] w) => (float[1, 8] y)"
    return odd(name, "y = MatMul(x, w)", ends, {}, ir=ir, opset=8, change=_add_default)


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


TENSORS = (
    _of_type("float16", TensorProto.FLOAT16),
    _of_type("bfloat16", TensorProto.BFLOAT16),
    _of_type("double", TensorProto.DOUBLE, nothing=True),
    odd(
        "zero-size",
        "all = Concat <axis = 0> (x, empty)  y = MatMul(all, w)  z = MatMul(empty, v)",
        "(float[1, 8] x, float[0, 8] empty) => (float[1, 8] y, float[0, 8] z)",
    ),
    odd(
        "scalar-input",
        "h = MatMul(x, w)  y = Mul(h, gain)",
        "(float[1, 8] x, float[1] gain) => (float[1, 8] y)",
        change=lambda proto: proto.graph.input[1].type.tensor_type.shape.ClearField("dim"),
    ),
    _with_default("input-with-default", 8),
    _with_default("initializers-are-inputs", 3),
    odd("sparse-weight", "h = MatMul(x, w)  y = MatMul(h, rare)", change=_add_sparse),
    odd(
        "string-constant",
        "y = MatMul(x, w)  label = Identity(words)",
        '(float[1, 8] x) => (float[1, 8] y, string[2] label) <string[2] words = {"yes", "no"}>',
    ),
    odd("string-input", "y = Identity(x)", "(string[1] x) => (string[1] y)", refused="'x' holds strings"),
    odd(
        "sequence",
        """h = MatMul(x, w)  rows = SplitToSequence <axis = 0> (h)  row = SequenceAt(rows, first)
        all = ConcatFromSequence <axis = 0> (rows)  sum = Add(all, row)  y = MatMul(sum, v)""",
        "(float[2, 8] x) => (float[2, 8] y) <int64 first = {0}>",
    ),
    odd(
        "sequence-input",
        "row = SequenceAt(rows, first)  y = MatMul(row, w)",
        "(seq(float[1, 8]) rows) => (float[1, 8] y) <int64 first = {0}>",
        refused="'rows' is a sequence",
    ),
    odd(
        "sequence-output",
        "y = MatMul(x, w)  rows = SplitToSequence <axis = 0> (y)",
        "(float[2, 8] x) => (float[2, 8] y, float[2, 8] rows)",
        change=_output_sequence,
    ),
    odd(
        "optional-input",
        "x = OptionalGetElement(maybe)  y = MatMul(x, w)",
        "(optional(float[1, 8]) maybe) => (float[1, 8] y)",
        opset=18,
        refused="'maybe' is optional",
    ),
    odd("unnamed-dimension", "h = MatMul(x, w)  y = MatMul(h, v)", ROW.replace("1, 8", "?, 8")),
    odd(
        "unnamed-dimensions",
        "y = Conv(x, w)",
        "(float[?, 3, ?, ?] x) => (float[?, 4, ?, ?] y)",
        CONV,
        refused="dimension 2 of input 'x' is dynamic",
    ),
    odd(
        "unknown-rank",
        "y = MatMul(x, w)",
        change=lambda proto: proto.graph.input[0].type.tensor_type.ClearField("shape"),
        refused="'x' has no known rank",
    ),
    odd(
        "infinite-mask",
        "q = MatMul(x, w)  masked = Add(q, mask)  p = Softmax(masked)  y = MatMul(p, v)",
        ROW.replace("1, 8", "8, 8"),
        change=_add_mask,
    ),
)


# ---- the structure of the graph, its opset, and existing quantization ---------------------------


_WEIGHT = ", ".join(str(number % 7) for number in range(64))
_CHAIN = "  ".join(f"h{i + 1} = Relu(h{i})" for i in range(400))


def _of_opset(opset: int) -> OddModel:
    return odd(
        f"opset-{opset}",
        """a = Conv <pads = [1, 1, 1, 1]> (x, w)  b = Relu(a)  c = Conv <pads = [1, 1, 1, 1]> (b, v)
        d = Add(b, c)  y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)""",
        "(float[1, 3, 8, 8] x) => (float[1, 4, 4, 4] y)",
        CONV,
        opset=opset,
        # before IR 4, weights had to be inputs
        ir=max(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]), 4),
    )


GRAPHS = (
    *map(_of_opset, range(7, 26)),
    odd("no-nodes", "", "(float[1, 8] x) => (float[1, 8] x)", refused="the model has no nodes"),
    odd(
        "only-copies",
        "a = Transpose <perm = [0, 2, 1]> (x)  b = Identity(a)  y = Reshape(b, form)",
        "(float[1, 4, 6] x) => (float[24] y) <int64[1] form = {-1}>",
    ),
    odd("output-is-input", "y = MatMul(x, w)", "(float[1, 8] x) => (float[1, 8] x, float[1, 8] y)"),
    odd("output-is-weight", "y = MatMul(x, w)", "(float[1, 8] x) => (float[1, 8] y, float[8, 8] w)"),
    odd("output-twice", "y = MatMul(x, w)", "(float[1, 8] x) => (float[1, 8] y, float[1, 8] y)"),
    odd(
        "missing-operands",
        "h = MatMul(x, w)  c = Clip(h, , high)  y = MatMul(c, v)",
        f"{ROW} <float high = {{6}}>",
    ),
    odd(
        "unread",
        "y = MatMul(x, w)  dead = MatMul(x, v)",
        "(float[1, 8] x, float[3] nobody) => (float[1, 8] y) <float[2] unused = {1, 2}>",
    ),
    odd(
        "training-batchnorm",
        """h = Conv <pads = [1, 1, 1, 1]> (x, w)
        y, m, s = BatchNormalization <training_mode = 1> (h, scale, bias, mean, one)""",
        "(float[2, 3, 6, 6] x) => (float[2, 4, 6, 6] y, float[4] m, float[4] s)",
        {"w": CONV["w"], "scale": (4,), "bias": (4,), "mean": (4,), "one": (4,)},
    ),
    odd(
        "q-operators",
        "y = QLinearMatMul(x, s, z, w, s, z, s, z)",
        f"{ROW.replace('float', 'uint8')} <float s = {{0.1}}, uint8 z = {{128}}, uint8[8, 8] w = {{{_WEIGHT}}}>",
        {},
        nothing=True,
    ),
    odd(
        "integer-operators",
        """q, s, z = DynamicQuantizeLinear(x)  h = MatMulInteger(q, w, z)
        f = Cast <to = 1> (h)  g = Mul(f, s)  y = MatMul(g, v)""",
        f"{ROW} <uint8[8, 8] w = {{{_WEIGHT}}}>",
        {"v": (8, 8)},
    ),
    odd(
        "pairs-already",
        "q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  h = MatMul(d, w)  y = MatMul(h, v)",
        f"{ROW} <float s = {{0.05}}, uint8 z = {{128}}>",
    ),
    odd("unsorted", "y = MatMul(h, v)  h = Relu(a)  a = MatMul(x, w)"),
    odd("long-chain", f"h0 = MatMul(x, w)  {_CHAIN}  y = MatMul(h400, v)"),
)


ODD_MODELS: tuple[OddModel, ...] = (*NAMES, *BODIES, *TENSORS, *GRAPHS)
