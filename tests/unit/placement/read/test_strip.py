"""Pairs of other tools and of training are removed, and pairs that cannot be removed are reported."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed
from random_models import ranges_for

from qdqspec.errors import ModelError
from qdqspec.graph.fold import fold_weights
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import ChangedModel, insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Consumer, Placement, Site

PAIR = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)"
HALF = {"s": np.array(0.5, np.float32)}
NUMBERS = HALF | {"z": np.array(3, np.uint8)}


def net(text: str, **constants: object) -> Model:
    return parsed(text, 19, ir=9, **constants)


def lines(stripped: ChangedModel) -> list[str]:
    """The nodes of a model, one a line."""
    onnx.checker.check_model(stripped.proto, full_check=True)
    return [f"{', '.join(n.output)} = {n.op_type}({', '.join(n.input)})" for n in stripped.proto.graph.node]


def initializers(stripped: ChangedModel) -> list[str]:
    return [tensor.name for tensor in stripped.proto.graph.initializer]


ENDS = "(float[4] x) => (float[4] y)"
REMOVED = {
    "several dequantizers": (f"{PAIR}  b = DequantizeLinear(q, s, z)  y = Add(a, b)", ["y = Add(x, x)"], []),
    "another reader of the scale": (f"{PAIR}  y = Mul(a, s)", ["y = Mul(x, s)"], ["s"]),
    "a computed scale": (
        "two = Add(s, s)  q = QuantizeLinear(x, two, z)  a = DequantizeLinear(q, two, z)  y = Neg(a)",
        ["y = Neg(x)"], [],
    ),
    "consecutive pairs": (
        f"{PAIR}  p = QuantizeLinear(a, s, z)  b = DequantizeLinear(p, s, z)  y = Neg(b)", ["y = Neg(x)"], [],
    ),
    "an output": (
        "t = Relu(x)  q = QuantizeLinear(t, s, z)  y = DequantizeLinear(q, s, z)  o = Neg(t)",
        ["y = Relu(x)", "o = Neg(y)"], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REMOVED)
def test_pairs_are_removed_with_the_constants_that_only_they_read(form: str) -> None:
    text, left, constants = REMOVED[form]
    ends = ENDS.replace("y)", "y, float[4] o)") if "  o = " in text else ENDS
    stripped = strip_qdq(net(f"g {ends} {{ {text} }}", **NUMBERS))
    assert (lines(stripped), initializers(stripped), stripped.notes) == (left, constants, ())


KEPT = {
    "an input as output": (
        ENDS, "q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)", 2, "makes a graph output out of an input",
    ),
    "integers as output": (
        "(float[4] x) => (uint8[4] q, float[4] y)", f"{PAIR}  y = Neg(a)", 2,
        "not removed, 1: 'QuantizeLinear#0': has an integer output that others read",
    ),
    "integers through an operator": (
        "(float[1,1,4,4] x) => (float[1,1,3,3] y)",
        "q = QuantizeLinear(x, s, z)  m = MaxPool<kernel_shape = [2, 2]>(q)  a = DequantizeLinear(m, s, z)  y = Neg(a)",
        4, "no QuantizeLinear made, but MaxPool",
    ),
    "an output of a body": (
        "(float[4] x, bool yes) => (float[4] y)",
        """y = If(yes) <
            then_branch = t () => (float[4] d) { p = QuantizeLinear(x, s, z)  d = DequantizeLinear(p, s, z) },
            else_branch = e () => (float[4] n) { n = Neg(x) }>""",
        1, "makes an output of a body out of a tensor of another graph",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", KEPT)
def test_pairs_that_cannot_be_removed_are_kept_and_reported(form: str) -> None:
    ends, text, left, note = KEPT[form]
    stripped = strip_qdq(net(f"g {ends} {{ {text} }}", **NUMBERS))
    assert len(lines(stripped)) == left
    assert initializers(stripped) == ["s", "z"]
    assert any(note in one for one in stripped.notes)


def weight_model(
    integers: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None, attributes: str = ""
) -> Model:
    shape = ",".join(map(str, integers.shape))
    third, numbers = ("", {}) if zero is None else (", w_z", {"w_z": zero})
    return net(
        f"""g (float[{shape}] x) => (float[{shape}] y) {{
        [dq] w_DequantizeLinear_Output = DequantizeLinear{attributes}(w_quantized, w_s{third})
        [add] y = Add(x, w_DequantizeLinear_Output) }}""",
        w_quantized=integers, w_s=scale, **numbers,
    )  # fmt: skip


RANDOM = np.random.default_rng(0)
SIGNED = RANDOM.integers(-128, 128, (3, 4)).astype(np.int8)
UNSIGNED = RANDOM.integers(0, 256, (3, 4)).astype(np.uint8)
WEIGHTS = {
    "per tensor": (SIGNED, np.float32(0.1), np.int8(5), ""),
    "per channel": (SIGNED, np.float32([1, 2, 3]), np.int8([0, 1, 2]), "<axis = 0>"),
    "negative axis": (UNSIGNED, np.float32([1, 2, 3]), np.uint8([9, 8, 7]), "<axis = -2>"),
    "default axis": (UNSIGNED, np.float32([1, 2, 3, 4]), np.uint8([4, 3, 2, 1]), ""),
    "int32 bias": (np.int32([-(2**31), 2**31 - 1, 16777217]), np.float32([0.1] * 3), None, "<axis = 0>"),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_integer_weights_are_dequantized_as_the_operator_defines(kind: str) -> None:
    model = weight_model(*WEIGHTS[kind])
    feeds = {"x": np.zeros(WEIGHTS[kind][0].shape, np.float32)}
    expected = ReferenceEvaluator(model.proto).run(None, feeds)[0]
    stripped = strip_qdq(model)
    assert lines(stripped) == ["y = Add(x, w)"]
    assert initializers(stripped) == ["w"]
    np.testing.assert_allclose(Model(stripped.proto).array("w"), expected, rtol=1e-6)
    assert stripped.notes == (
        "dequantized, not equal to the original weights, 1: 'w': give the original as reference to restore them",
    )


TABLES = {
    "one scale": ("g = Gather(t, ids) y = DequantizeLinear(g, s, z)", ()),
    "table dequantized before": ("d = DequantizeLinear(t, s, z) y = Gather(d, ids)", ()),
    "scales of columns": ("g = Gather(t, ids) y = DequantizeLinear<axis = -1>(g, s, z)", (8,)),
    "scales of rows": ("d = DequantizeLinear<axis = 0>(t, s, z) y = Gather(d, ids)", (6,)),
    "columns gathered, scales of rows": (
        "g = Gather<axis = 1>(t, ids) y = DequantizeLinear<axis = 0>(g, s, z)",
        (6,),
    ),
}


@pytest.mark.parametrize("form", TABLES)
def test_tables_of_embeddings_are_dequantized(form: str) -> None:
    text, shape = TABLES[form]
    random = np.random.default_rng(0)
    constants = {
        "t": random.integers(-127, 127, (6, 8)).astype(np.int8),
        "s": random.uniform(0.1, 1, shape).astype(np.float32),
        "z": random.integers(-3, 3, shape).astype(np.int8),
    }
    model = net(f"g (int64[2,3] ids) => (float[a,b,c] y) {{ {text} }}", **constants)
    stripped = strip_qdq(model)
    assert [node.op_type for node in stripped.proto.graph.node] == ["Gather"]
    feeds = {"ids": random.integers(0, 6, (2, 3))}
    before, after = (ReferenceEvaluator(proto).run(None, feeds)[0] for proto in (model.proto, stripped.proto))
    np.testing.assert_array_equal(before, after)


def test_a_table_with_scales_of_the_places_of_indices_is_unchanged_and_reported() -> None:
    text = "g (int64[2,3] ids) => (float[a,b,c] y) { g = Gather(t, ids) y = DequantizeLinear<axis = 1>(g, s, z) }"
    stripped = strip_qdq(
        net(text, t=np.ones((6, 8), np.int8), s=np.ones(3, np.float32), z=np.zeros(3, np.int8))
    )
    assert "not removed, 1" in "".join(stripped.notes)
    assert [node.op_type for node in stripped.proto.graph.node] == ["Gather", "DequantizeLinear"]


def test_bytes_and_name_of_a_weight_are_taken_from_the_reference_if_the_shape_fits() -> None:
    """The name is that of the tensor that the same node reads in the reference."""
    model = weight_model(np.int8([[1, 2]]), np.float32(0.1))
    reference = net(
        "g (float[1,2] x) => (float[1,2] y) { [add] y = Add(x, m_weight) }",
        m_weight=np.float32([[0.11, 0.22]]),
    )
    stripped = strip_qdq(model, reference)
    assert stripped.proto.graph.initializer == reference.proto.graph.initializer
    assert stripped.notes[0] == "taken from the reference, 1: 'm_weight'"
    stripped = strip_qdq(model, net("g (float[3] x) => (float[3] y) { [add] y = Add(x, w) }", w=(3,)))
    assert Model(stripped.proto).array("w").shape == (1, 2)
    assert any("the reference has no such weight" in note for note in stripped.notes)


# What ONNX Runtime's quantizer makes of a MatMul with a Relu.
CLIPPED = "q = QuantizeLinear(t, s, zero)  a = DequantizeLinear(q, s, zero)"
SQUARE = "g (float[2,2] x) => (float[2,2] y)"


def clipped(text: str) -> Model:
    constants = {
        "quarter": np.array(0.25, np.float32),
        "zero": np.array(0, np.uint8), "two": np.array(2, np.uint8),
        "low": np.array(0, np.float32), "high": np.array(6, np.float32),
        "high2": np.full((2, 2), 6, np.float32), "low2": np.full((2, 2), -1, np.float32),
        "shape": np.array([2, 2]), "steps": np.array([0.5, 0.1], np.float32), "zeros": np.zeros(2, np.uint8),
        "same": np.array([0.5, 0.5], np.float32),
    }  # fmt: skip
    used = {name: value for name, value in constants.items() if re.search(rf"\b{name}\b", text)}
    return net(f"{SQUARE} {{ {text} }}", **HALF, **used)


@pytest.mark.parametrize("made", ["MatMul(x, x)", "Tanh(x)", "Transpose(x)"])
@pytest.mark.parametrize(
    "between",
    ["[act] t = Relu(m)", "[act] t = Clip(m, low, high)", ""],
    ids=["Relu", "Clip", "nothing"],
)
@pytest.mark.parametrize("zero", ["zero", "two"])
def test_an_activation_that_a_tool_removed_is_restored_from_the_reference(
    between: str, made: str, zero: str
) -> None:
    given = f"[first] t = {made}  {CLIPPED.replace('zero', zero)}  [neg] y = Neg(a)"
    first = "m" if between else "t"
    reference = net(
        f"{SQUARE} {{ [first] {first} = {made} {between} [neg] y = Neg(t) }}",
        **({"low": np.float32(-1), "high": np.float32(6)} if "Clip" in between else {}),
    )
    stripped = strip_qdq(clipped(given), reference)
    assert stripped.notes[-1] == "equal to the reference"
    assert stripped.proto == reference.proto


@pytest.mark.parametrize(("kind", "relus"), [("", 1), ("<output_dtype = 2>", 1), ("<output_dtype = 3>", 0)])
def test_a_pair_without_a_zero_point_clips_by_its_type(kind: str, relus: int) -> None:
    pair = f"q = QuantizeLinear{kind}(t, s)  a = DequantizeLinear(q, s)"
    model = parsed(f"{SQUARE} {{ t = MatMul(x, x)  {pair}  y = Neg(a) }}", 21, ir=10, **HALF)
    assert [node.op_type for node in strip_qdq(model).proto.graph.node].count("Relu") == relus


@pytest.mark.parametrize(
    ("quantize", "dequantize", "rescales"),
    [
        ("(x, s, two)", "(q, s, two)", False),
        ("(x, s, two)", "(q, quarter, two)", True),
        ("(x, s, two)", "(q, s, zero)", True),
        ("(x, s, two)", "(q, s)", True),
        ("(x, s, zeros)", "(q, s, zeros)", True),  # more zero points than scales
        ("<axis = 1>(x, same, zeros)", "(q, s, zero)", False),  # one scale may stand for all
        ("(x, s, zero)", "<axis = 1>(q, same, zeros)", False),
        *(
            ("<axis = 1>(x, steps, zeros)", f"<axis = {axis}>(q, steps, zeros)", rescales)
            for axis, rescales in ((1, False), (-1, False), (0, True), (-2, True))
        ),
    ],
)
def test_a_pair_that_rescales_values_is_kept_and_reported(
    quantize: str, dequantize: str, rescales: bool
) -> None:
    """Without the pair the model would compute other values."""
    model = clipped(f"q = QuantizeLinear{quantize}  a = DequantizeLinear{dequantize}  y = Neg(a)")
    for stripped in (strip_qdq(model), import_placement(model)):
        is_kept = any(
            re.search("'DequantizeLinear#1': it.* has (other numbers|another number of)", n)
            for n in stripped.notes
        )
        assert is_kept == rescales
    assert len(strip_qdq(model).proto.graph.node) == (3 if rescales else 1)


def test_an_activation_that_a_tool_removed_before_a_graph_output_is_restored() -> None:
    reference = net(f"{SQUARE} {{ [mm] m = MatMul(x, x) [act] y = Relu(m) }}")
    model = clipped(
        "[mm] y_before = MatMul(x, x)  q = QuantizeLinear(y_before, s, zero)  y = DequantizeLinear(q, s, zero)"
    )
    assert strip_qdq(model, reference).proto == reference.proto
    assert lines(strip_qdq(model)) == ["y_before = MatMul(x, x)", "y = Relu(y_before)"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("t = MatMul(x, x)", "y = Relu(a)"),
        ("t = MatMul(x, x)", "y = Clip(a, low, high)"),
        ("t = MatMul(x, x)", "b = Transpose(a)  y = Relu(b)"),
        ("t = MatMul(x, x)", "b = Reshape(a, shape)  y = Relu(b)"),
        ("u = Relu(x)  v = Sigmoid(x)  t = Add(u, v)", "y = Neg(a)"),
        ("u = Mul(x, x)  t = Add(u, u)", "y = Neg(a)"),
        ("u = Clip(x, low, high)  t = MatMul(u, high2)", "y = Neg(a)"),
        ("u = Softmax(x)  v = Transpose(u)  t = Add(v, v)", "y = Neg(a)"),
        ("u = Cast<to = 2>(x)  t = Cast<to = 1>(u)", "y = Neg(a)"),
    ],
)
def test_no_relu_is_added_where_none_can_have_been_removed(before: str, after: str) -> None:
    expected = f"{before}  {after}".replace("(a", "(t")
    stripped = strip_qdq(clipped(f"{before}  {CLIPPED}  {after}"))
    assert lines(stripped) == re.sub("<to = .>", "", expected).split("  ")


@pytest.mark.parametrize(
    "before",
    [
        "t = MatMul(x, x)",
        "u = Relu(x)  t = Sub(u, x)",
        "u = Relu(x)  t = Add(u, x)",
        "u = Relu(x)  t = MatMul(u, low2)",
        "u = Clip(x)  t = Add(u, u)",
        "u = Relu(x)  t = Gemm<alpha = -1.0>(u, u)",
        "t = Tanh(x)",
        "u = MatMul(x, x)  t = Transpose(u)",
        "u = MatMul(x, x)  t = Cast<to = 1>(u)",
    ],
)
def test_a_relu_replaces_a_zero_point_that_clipped_where_the_tensor_may_be_negative(before: str) -> None:
    stripped = strip_qdq(clipped(f"{before}  {CLIPPED}  y = Neg(a)"))
    assert lines(stripped)[-2:] == ["a = Relu(t)", "y = Neg(a)"]
    assert any(re.search("a Relu was inserted where .*'t'.*--reference", note) for note in stripped.notes)


def quantized(model: Model, *sites: Site, **ranges: TensorRange) -> Model:
    numbers = Quantizer(model, ranges or ranges_for(model))
    return Model(insert_qdq(model, Placement(sites=frozenset(sites)), numbers).proto)


def test_inserted_pairs_never_replace_a_relu() -> None:
    model = net(f"{SQUARE} {{ [mm] t = MatMul(x, x)  [neg] y = Neg(t) }}")
    site = Site(tensor="t", consumers=(Consumer("neg", 0),), format="uint8")
    assert strip_qdq(quantized(model, site, t=TensorRange(0.0, 4.0))).proto == model.proto


@pytest.mark.parametrize(
    ("text", "before", "notes"),
    [
        ("[n] y = Neg(x)", "[i] t = Identity(x)  [n] y = Neg(t)", [
            "which has more nodes, 1: 'i': the quantizing tool removed them",
            "'n': reads t > x: the quantizing tool changed this",
        ]),
        # `quantize_static` of ONNX Runtime 1.32 gives each quantized Gemm a ``beta`` of 1
        ("[n] y = Gemm<beta = 1.0>(x, x, x)", "[n] y = Gemm<beta = 2.0>(x, x, x)", [
            "'n': other attributes: the quantizing tool changed this",
        ]),
    ],
)  # fmt: skip
def test_what_the_quantizing_tool_changed_is_reported(text: str, before: str, notes: list[str]) -> None:
    model, reference = (net(f"{SQUARE} {{ {each} }}") for each in (text, before))
    expected = tuple(f"not like the reference, {note}" for note in notes)
    assert strip_qdq(model, reference).notes == import_placement(model, reference).unlike == expected


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("(float[2,2] z, float[2,2] x) => (float[2,2] y, float[2,2] o)", "inputs"),
        ("(float[2,2] x, float[2,2] z) => (float[2,2] o, float[2,2] y)", "outputs"),
    ],
)
def test_inputs_and_outputs_in_another_order_are_not_the_reference(ends: str, words: str) -> None:
    nodes = "{ [n] y = Neg(x)  [m] o = Tanh(z) }"
    before = "(float[2,2] x, float[2,2] z) => (float[2,2] y, float[2,2] o)"
    stripped = strip_qdq(net(f"g {ends} {nodes}"), net(f"g {before} {nodes}"))
    why = f"other {words}, or in another order: the quantizing tool changed this"
    assert stripped.notes == (f"not like the reference, {why}",)


def test_a_raised_opset_is_kept_and_reported_without_a_reference() -> None:
    text = "g (float[1, 4] x) => (float[4] y) { [s] y = Squeeze<axes = [0]>(x) }"
    original = parsed(text, 11, ir=3)
    made = quantized(original, Site(tensor="x", consumers=(Consumer("s", 0),), format="int16"))
    alone = strip_qdq(made)
    assert alone.notes == ("stays at opset 21, to which it was raised (was opset 11, IR version 3)",)
    assert lines(alone)[-1].startswith("y = Squeeze(x, ")
    with_reference = strip_qdq(made, original)
    assert with_reference.notes[-1] == "equal to the reference"
    assert with_reference.proto == original.proto


def test_weights_are_taken_from_a_reference_with_external_data(tmp_path: Path, models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    weights = frozenset(
        Site(tensor=t, consumers=e, format="int8", axis=0, weight=True)
        for t, e in model.consumers.items()
        if t in model.constants and len(model.shape(t) or ()) == 4
    )
    inserted = insert_qdq(model, Placement(sites=weights), Quantizer(model, {}))
    (tmp_path / "quantized").mkdir()
    onnx.save(inserted.proto, tmp_path / "quantized" / "q.onnx")
    moved = onnx.load(models / "digits_resnet.onnx")  # saving turns its tensors into references
    onnx.save(moved, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=64)
    stripped = strip_qdq(load_model(tmp_path / "quantized" / "q.onnx"), load_model(tmp_path / "m.onnx"))
    assert stripped.notes[-1] == "equal to the reference"
    back = tmp_path / "quantized" / "back.onnx"
    save_model(stripped.proto, back, base=back.parent)
    assert {t.name: numpy_helper.to_array(t).tobytes() for t in onnx.load(back).graph.initializer} == {
        name: model.array(name).tobytes() for name in model.initializers
    }


def with_norm(scale: float = 2.0) -> Model:
    values = {"s": scale, "b": 1, "m": 3, "v": 4}
    return net(
        "g (float[1,2,4,4] x) => (float[1,2,4,4] y) { [conv] c = Conv(x, w) "
        "[norm] n = BatchNormalization(c, s, b, m, v) [relu] y = Relu(n) }",
        w=(2, 2, 1, 1),
        **{name: np.full(2, value, np.float32) for name, value in values.items()},
    )


def test_a_model_whose_numbered_nodes_have_other_names_is_the_reference() -> None:
    original = net(f"{SQUARE} {{ [n0] t = Tanh(x)  [n1] u = Neg(t)  [n2] y = Add(u, t) }}")
    pair = "q = QuantizeLinear(x, s, two)  a = DequantizeLinear(q, s, two)"
    made = clipped(f"[n0] {pair}  [n2] t = Tanh(a)  [n3] u = Neg(t)  [n4] y = Add(u, t)")
    stripped = strip_qdq(made, original)
    assert (stripped.proto, stripped.notes) == (original.proto, ("equal to the reference",))


def test_nodes_that_tuning_folded_are_restored_from_the_reference_if_the_weights_agree() -> None:
    reference = with_norm()
    model = quantized(
        fold_weights(reference).model, Site(tensor="x", consumers=(Consumer("conv", 0),), format="uint8")
    )
    assert "norm" not in model.by_name
    stripped = strip_qdq(model, reference)
    assert stripped.proto == reference.proto
    assert stripped.notes[-1] == "with the nodes that quantizing folded into weights, 1: 'norm'"
    other = with_norm(scale=5.0)
    stripped = strip_qdq(model, other)
    assert stripped.proto != other.proto
    assert any("not like the reference" in note for note in stripped.notes)


WEIGHT = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)
SQUARES = "(float[2,2] x) => (float[2,2] y)"


def test_a_transposed_weight_whose_integers_a_tool_transposes_is_restored_from_the_reference() -> None:
    """As the table of an embedding that the last product reads too."""
    ends, w = "g (int64[2] i) => (float[2,3] y)", np.arange(12, dtype=np.float32).reshape(3, 4)
    original = net(f"{ends} {{ [g] e = Gather(w, i)  [turn] t = Transpose(w)  [m] y = MatMul(e, t) }}", w=w)
    quantized = net(
        f"""{ends} {{ [turn] p = Transpose(q)  t = DequantizeLinear(p, s, z)
            [g] k = Gather(q, i)  e = DequantizeLinear(k, s, z)  [m] y = MatMul(e, t) }}""",
        q=np.rint(w / 0.5).astype(np.uint8) + np.uint8(3), **NUMBERS,
    )  # fmt: skip
    stripped = strip_qdq(quantized, original)
    assert stripped.proto == original.proto


def test_a_weight_that_the_tool_scaled_is_not_taken_from_the_reference() -> None:
    """As SmoothQuant does, which divides the data before the layer by the same factors."""
    reference = net(f"g {SQUARES} {{ [m] m = MatMul(x, w)  [a] y = Add(m, b) }}", w=WEIGHT, b=HALF["s"])
    constants = {"f": np.array([0.1, 2], np.float32), "i": np.array([[80, -127], [2, 16]], np.int8)}
    quantized = net(
        f"""g {SQUARES} {{ [smooth] z = Mul(x, f)  d = DequantizeLinear(i, s)
            [m] m = MatMul(z, d)  [a] y = Add(m, b) }}""",
        **constants,
        s=np.array(0.125, np.float32),
        b=np.array(0.25, np.float32),
    )
    stripped = strip_qdq(quantized, reference)
    assert np.array_equal(Model(stripped.proto).array("d"), constants["i"] * np.float32(0.125))
    assert [note.partition(", ")[0] for note in stripped.notes] == [
        "dequantized", "not like the reference", "not like the reference",
    ]  # fmt: skip
    assert "lacks nodes, 1: 'smooth'" in stripped.notes[1]
    assert "'m': reads x, (constant) > z, (constant), 'b': 1 of 1 values, by up to 0.25" in stripped.notes[2]
    assert import_placement(quantized, reference).unlike == stripped.notes[1:]


def test_bounds_in_constant_nodes_are_restored_by_name() -> None:
    lines_before = "[lo] l = Constant<value = float {0.0}>()  [n] n = Neg(x)  [act] c = Clip(n, l)"
    reference = net(f"g {SQUARES} {{ {lines_before}  [out] y = Abs(c) }}")
    pair = "q = QuantizeLinear(c, s, z)  d = DequantizeLinear(q, s, z)"
    quantized = net(f"g {SQUARES} {{ [n] c = Neg(x)  {pair}  [out] y = Abs(d) }}", **HALF, z=np.uint8(0))
    stripped = strip_qdq(quantized, reference)
    assert stripped.proto == reference.proto
    alone = strip_qdq(quantized, net(f"g {SQUARES} {{ {lines_before}  [out] y = Exp(c) }}"))
    assert lines(alone) == ["n = Neg(x)", "c = Clip(n, l)", "y = Abs(c)"]
    assert initializers(alone) == ["l"]


def test_scales_that_do_not_fit_are_an_error_with_the_name_of_the_node() -> None:
    text = "[d] d = DequantizeLinear<axis = 0, block_size = 2>(i, s)  y = MatMul(x, d)"
    scales = np.ones((3, 1), np.float32)
    model = parsed(f"g {SQUARES} {{ {text} }}", 21, ir=10, i=np.ones((2, 2), np.int8), s=scales)
    with pytest.raises(ModelError, match="'d' has scales of shape"):
        strip_qdq(model)


def test_a_pair_on_the_state_of_a_loop_is_removed_with_a_reference() -> None:
    def loop(pair: str, read: str) -> Model:
        text = f"""g (int64 n, bool go, float[2] x) => (float[2] y) {{ [loop] y = Loop(n, go, x) <body = b
            (int64 i, bool c, float[2] s_in) => (bool o, float[2] s_out)
            {{ o = Identity(c)  {pair}  s_out = Sigmoid({read}) }}> }}"""
        return net(text, **(NUMBERS if pair else {}))

    quantized = loop("q = QuantizeLinear(s_in, s, z)  d = DequantizeLinear(q, s, z)", "d")
    assert strip_qdq(quantized, loop("", "s_in")).notes == ("equal to the reference",)
    assert diff_models(quantized, quantized).same


def test_a_weight_restored_without_a_reference_needs_no_input() -> None:
    """Up to IR version 3 each initializer is an input."""
    text = f"g {SQUARES} {{ d = DequantizeLinear(i, s)  y = MatMul(x, d) }}"
    proto = parsed(text, 13, ir=8, i=np.ones((2, 2), np.int8), **HALF).proto
    for name, kind, dims in (("i", 3, [2, 2]), ("s", 1, [])):
        proto.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, dims))
    proto.ir_version = 3
    assert lines(strip_qdq(Model(proto))) == ["y = MatMul(x, d)"]
