"""The user's model: inputs fixed to a value, local functions inlined, weights that are no inputs; cautions; digests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from odd import ODD_MODELS
from onnx import TensorProto, helper, numpy_helper
from onnx_text import outputs_of, parsed

from qdqspec._core.node_digests import changes_text
from qdqspec.errors import SpecError
from qdqspec.graph.given import cautions, digests_of, fix_inputs, fixed_arrays, given_model, inlined
from qdqspec.graph.model import Model, load_model

X = np.array([[1.0, -2.0], [3.0, -4.0]], np.float32)


def fixed(model: Model, **values: object) -> onnx.ModelProto:
    proto = fix_inputs(model, fixed_arrays(model, values))
    onnx.checker.check_model(proto, full_check=True)
    return proto


RATES = """g (float[n,2] x, int64 rate) => (float[n,2] y) <int64 wide = {16000}, float[2] w = {2.0, 4.0}> {
  is_wide = Equal(rate, wide)
  [gate] y = If (is_wide) <
    then_branch = yes () => (float[n,2] t) {
      [scale] u = Mul(x, w)
      two = Constant<value_int: int = 2>()
      half = Div(rate, two)  is_half = Equal(half, two)
      [inner] t = If (is_half) <
        then_branch = a () => (p) { p = Neg(u) },
        else_branch = b () => (q) { q = Abs(u) }
      >
    },
    else_branch = no () => (float[n,2] e) { [scale] u = Div(x, w)  e = Relu(u) }
  >
}"""


@pytest.mark.parametrize("rate", [16000, 8000])
def test_the_executed_branch_remains_with_its_names(rate: int) -> None:
    model = parsed(RATES)
    proto = fixed(model, rate=rate)
    assert [value.name for value in proto.graph.input] == ["x"]
    kinds = ["Mul", "Abs"] if rate == 16000 else ["Div", "Relu"]
    assert [node.op_type for node in proto.graph.node] == kinds
    assert proto.graph.node[0].name == "scale"
    (found,), (expected,) = outputs_of(proto, {"x": X}), outputs_of(model, {"x": X, "rate": rate})
    np.testing.assert_array_equal(found, expected)


def test_names_that_exist_in_the_graph_are_prefixed_with_the_path_of_the_branch() -> None:
    text = """(float[n] x, bool c) => (float[n] y, float[n] z) {
      [neg] u = Neg(x)
      [gate] v = If (c) <
        then_branch = yes () => (s) { [neg] z = Exp(u)  s = Neg(z) },
        else_branch = no () => (e) { e = Abs(u) }
      >
      y = Relu(v)  z = Abs(v)
    }"""
    model = parsed(f"g {text}")
    proto = fixed(model, c=True)
    assert [node.name for node in proto.graph.node][:2] == ["neg", "gate/then_branch/neg"]
    assert proto.graph.node[1].output == ["gate/then_branch/z"]
    feeds = {"x": np.float32([1, -2])}
    for ours, theirs in zip(outputs_of(proto, feeds), outputs_of(model, {**feeds, "c": True}), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_loops_of_both_branches_may_have_the_same_names() -> None:
    text = """(float[1,2] x, bool c) => (float[1,2] y) <int64 n = {2}, bool on = {1}> {
      y = If (c) <
        then_branch = yes () => (t) {
          t = Loop (n, on, x) <
            body = one (int64 i, bool go, float[1,2] v) => (bool go2, float[1,2] w) {
              go2 = Identity(go)  w = MatMul(v, rare)
            }>
        },
        else_branch = no () => (e) {
          e = Loop (n, on, x) <
            body = two (int64 i, bool go, float[1,2] v) => (bool go2, float[1,2] w) {
              go2 = Identity(go)  m = MatMul(v, rare)  w = Neg(m)
            }>
        }
      >
    }"""
    proto = parsed(f"g {text}").proto
    for number, branch in enumerate(proto.graph.node[0].attribute):
        values = numpy_helper.from_array(np.float32([number + 2]), "rare")
        sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1])), [2, 2])
        branch.g.node[0].attribute[0].g.sparse_initializer.append(sparse)
    for c in (True, False):
        (found,) = outputs_of(fix_inputs(Model(proto), {"c": np.array(c)}), {"x": X[:1]})
        (expected,) = outputs_of(Model(proto), {"x": X[:1], "c": np.array(c)})
        np.testing.assert_array_equal(found, expected)


def test_one_tensor_may_be_several_outputs_of_the_branch() -> None:
    text = """(float[n] x, bool c) => (float[n] y, float[n] z) {
      y, z = If (c) <
        then_branch = yes () => (t, t2) { t = Neg(x)  t2 = Identity(t) },
        else_branch = no () => (e, e2) { e = Abs(x)  e2 = Abs(e) }
      >
    }"""
    model = parsed(f"g {text}")
    branch = next(a.g for a in model.proto.graph.node[0].attribute if a.name == "then_branch")
    del branch.node[1]
    branch.output[1].name = "t"
    proto = fix_inputs(model, {"c": np.array(True)})
    first, second = outputs_of(proto, {"x": np.float32([1, -2])})
    assert first.tolist() == second.tolist() == [-1, 2]


def test_a_sparse_weight_of_the_executed_branch_remains() -> None:
    text = """(float[1,2] x, bool c) => (float[1,2] y) {
      y = If (c) <then_branch = yes () => (t) { t = MatMul(x, rare) },
                  else_branch = no () => (e) { e = MatMul(x, rare) }>
    }"""
    model = parsed(f"g {text}")
    for number, branch in enumerate(model.proto.graph.node[0].attribute):
        values = numpy_helper.from_array(np.float32([number + 2]), "rare")
        place = numpy_helper.from_array(np.array([1]))
        branch.g.sparse_initializer.append(helper.make_sparse_tensor(values, place, [2, 2]))
    model = Model(model.proto)
    for c in (True, False):
        (found,) = outputs_of(fix_inputs(model, {"c": np.array(c)}), {"x": X[:1]})
        (expected,) = outputs_of(model, {"x": X[:1], "c": np.array(c)})
        np.testing.assert_array_equal(found, expected)


def test_in_an_old_ir_version_a_constant_replaces_the_input() -> None:
    model = parsed("g (float[2] x, float[2] g) => (float[2] y) { y = Mul(x, g) }", ir=3)
    (found,) = outputs_of(fixed(model, g=[2.0, 3.0]), {"x": np.float32([1, 1])})
    assert found.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rat": 1}, "names 'rat', which is no input of the model.*rate"),
        ({"rate": 1.5}, "the value of input 'rate' is 1.5, and the model takes int64"),
        ({"rate": True}, "the value of input 'rate' is True, and the model takes int64"),
        ({"rate": (16000,)}, r"the value of input 'rate' has shape \[1\], and the model takes \[\]"),
        ({"x": ((1.0, 1e300),)}, "and the model takes float32"),
    ],
)
def test_values_that_the_input_cannot_have_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fixed_arrays(parsed(RATES), values)


TWO_WEIGHTS = "(float[1,2] x, float[2,2] w, float[2] b) => (float[1,2] y) { t = MatMul(x, w) y = Add(t, b) }"


@pytest.mark.parametrize(
    ("ir", "constants", "inputs"),
    [(4, "wb", "x"), (8, "wb", "x"), (3, "wb", "xwb"), (8, "b", "xwb"), (8, "wo", "xwb")],
    ids=["IR 4", "IR 8", "constant already", "only a vector", "one that is no input"],
)
def test_weights_that_are_also_inputs_become_constant(tmp_path, ir, constants, inputs) -> None:
    """ONNX Runtime neither folds nor fuses weights that are inputs, so that such a model is many times slower."""
    matrix = np.eye(2, dtype=np.float32)
    values = {"w": matrix, "b": np.ones(2, np.float32), "o": matrix}
    proto = parsed(f"g {TWO_WEIGHTS}", ir=ir, **{name: values[name] for name in constants}).proto
    onnx.save(proto, tmp_path / "net.onnx")
    model = given_model(tmp_path / "net.onnx", {})
    assert [port.name for port in model.proto.graph.input] == list(inputs)
    note = ["the weights are graph inputs too, which a runtime does not optimize"]
    assert [text.split(";")[0] for text in model.notes] == (note if inputs == "x" else [])
    assert model.where == str(tmp_path / "net.onnx")


UNSORTED = """<ir_version: 8, opset_import: ["": 17, "my": 1]>
g (float[2,4] x, bool c) => (float[2,4] y) {
    r = Add(s, t)  p = Neg(n)  s = Exp(p)  n = Relu(x)
    t = If (c) <then_branch = a () => (float[2,4] o) { o = my.F(q)  q = Relu(n) },
        else_branch = b () => (float[2,4] m) {
        m = Abs(i)  i = Neg(x) }>
    y = Tanh(r)
}
<domain: "my", opset_import: ["": 17]> F (v) => (w) { w = Add(u, v)  u = Neg(v) }"""


def test_nodes_are_sorted_in_bodies_and_functions_too(tmp_path: Path) -> None:
    """Quark writes nodes in any order. ONNX Runtime runs them, where bodies have no such nodes."""
    onnx.save(onnx.parser.parse_model(UNSORTED), tmp_path / "net.onnx")
    model = load_model(tmp_path / "net.onnx")
    assert [node.op_type for node in model.proto.graph.node] == ["Relu", "Neg", "If", "Exp", "Add", "Tanh"]
    own = given_model(tmp_path / "net.onnx", {})
    assert own.sha256 == model.sha256
    assert own.notes[0].startswith("some nodes come before")
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    positive = np.maximum(x, 0)
    for chosen, branch in ((True, np.zeros_like(x)), (False, np.abs(x))):
        feed = {"x": x, "c": np.array(chosen)}
        (y,) = outputs_of(own.path, feed)
        np.testing.assert_allclose(y, np.tanh(np.exp(-positive) + branch), rtol=1e-5)


@pytest.mark.parametrize("names", ["??", "HW", "HH", "?W"])
def test_several_dimensions_that_are_called_by_a_question_mark_are_not_equal(
    tmp_path: Path, names: str
) -> None:
    proto = parsed("g (float[B,3,H,W] x) => (float[B,3,H,W] y) { y = Relu(x) }").proto
    for port in (*proto.graph.input, *proto.graph.output):
        port.type.tensor_type.shape.dim[2].dim_param, port.type.tensor_type.shape.dim[3].dim_param = names
    onnx.save(proto, tmp_path / "net.onnx")
    model = given_model(tmp_path / "net.onnx", {})
    expected = ["B", "", *(names if names != "??" else ("", ""))]
    for port in (*model.proto.graph.input, *model.proto.graph.output):
        assert [dim.dim_param for dim in port.type.tensor_type.shape.dim] == expected
    assert len(model.notes) == (names == "??")


TEXT = """<ir_version: 8, opset_import: ["": 17, "my": 1]>
g (float[n,4] x, bool c) => (float[n,4] y) <float[4] w = {1.0, 2.0, 3.0, 4.0}> {
  [call_a] a = my.f<alpha = 0.5>(x)
  [call_b] b = my.f<alpha = 0.25>(a)
  v = If (c) < then_branch = yes () => (t) { t = my.f<alpha = 0.125>(b) }, else_branch = no () => (e) { e = Neg(b) } >
  y = Mul(v, w)
}
<domain: "my", opset_import: ["": 17, "my": 1]> f <alpha>(x) => (y) {
  [leak] t = LeakyRelu<alpha: float = @alpha>(x)
  [inner] y = my.h(t)
}
<domain: "my", opset_import: ["": 17]> h (x) => (y) { [sig] s = Sigmoid(x)  y = Mul(x, s) }"""
CALL = {"x": np.float32([[1, -2, 3, -4]]), "c": np.array(True)}


def test_calls_are_replaced_with_unique_names_in_bodies_too(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(TEXT)
    flat = inlined(proto)
    onnx.checker.check_model(flat, full_check=True)
    assert not flat.functions
    names = [node.name for node in Model(flat).nodes]
    assert len(names) == len(set(names))
    plain = [name for name in names if not name.endswith(("inputs", "_branch"))]
    assert plain[:6] == [
        "call_a/leak", "call_a/inner/sig", "call_a/inner/Mul#1",
        "call_b/leak", "call_b/inner/sig", "call_b/inner/Mul#1",
    ]  # fmt: skip
    assert plain[6] == "If#6/then_branch/f#0/leak"
    onnx.save(proto, tmp_path / "calls.onnx")
    model = given_model(tmp_path / "calls.onnx", {})
    assert [node.name for node in model.nodes] == names
    assert model.notes == ("2 local functions are inlined in a copy of the model",)
    assert flat.graph.initializer == proto.graph.initializer
    np.testing.assert_array_equal(outputs_of(flat, CALL)[0], outputs_of(proto, CALL)[0])


def test_functions_of_a_runtime_or_of_another_opset_version_are_not_inlined() -> None:
    proto = onnx.parser.parse_model(TEXT.replace('"my"', '"trt"').replace("my.", "trt."))
    assert inlined(proto) is proto
    other = TEXT.replace('"my", opset_import: ["": 17]> h', '"my", opset_import: ["": 13]> h')
    flat = inlined(onnx.parser.parse_model(other))
    assert [f.name for f in flat.functions] == ["h"]
    assert [node.name for node in flat.graph.node][:2] == ["call_a/leak", "call_a/inner"]
    assert flat.graph.node[1].op_type == "h"


ODD = {odd.name: odd for odd in ODD_MODELS}
SAID = {
    "training-dropout": "its outputs are random ('Dropout#1')",
    "integer-operators": "integer operators with ranges found at run time are in it already ('MatMulInteger#0')",
    "pairs-already": "it contains Q/DQ already ('QuantizeLinear#0', 'DequantizeLinear#1')",
    "string-constant": "outputs that are no tensors of numbers are not compared: 'label'",
    "string-input": "outputs that are no tensors of numbers are not compared: 'y'",
    "sequence-output": "outputs that are no tensors of numbers are not compared: 'rows'",
}


@pytest.mark.parametrize("name", sorted(set(ODD) - {"no-nodes"}))
def test_an_unusual_property_is_reported_only_if_results_depend_on_it(name: str) -> None:
    said = "; ".join(cautions(Model(ODD[name].make())))
    assert said.startswith(SAID[name]) if name in SAID else said == ""


def test_a_model_that_is_only_compared_has_no_advice_on_its_search() -> None:
    model = Model(ODD["pairs-already"].make())
    assert list(cautions(model))
    assert not list(cautions(model, searched=False))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (  # models that make speech have such an input, and draw random numbers in inference too
            """g (float[1,4] x, float scale) => (float[1,4] y) { r = RandomNormalLike(x) n = Mul(r, scale)
            y = Add(x, n) }""",
            "or if an input scales the random numbers, give data where it is 0",
        ),
        (
            """g (float[1,2,4] x, float[4,12] w, float[12] b) => (float y) {
            [attention] y = com.microsoft.Attention<num_heads = 2>(x, w, b) }""",
            "an optimizer has fused its attentions ('attention'): the model before that step",
        ),
    ],
    ids=["scaled random numbers", "fused attention"],
)
def test_random_numbers_and_fused_attentions_are_noted(text: str, said: str) -> None:
    (found,) = cautions(parsed(text))
    assert said in found


NETWORK = """g (float[n,4,8,8] x) => (float[n,4,8,8] y) { [a] a = Conv(x, w1)  [b] b = Relu(a)
    [c] c = Conv<kernel_shape = [1, 1]>(b, w2)  [d] d = Add(c, b)  [e] e = Mul(d, s)  [y] y = Add(e, s) }"""


def network(old: str = "", new: str = "", opset: int = 17, **constants: object) -> Model:
    weights = {
        name: np.random.default_rng(seed).normal(size=(4, 4, 1, 1)).astype(np.float32)
        for seed, name in enumerate(("w1", "w2", "other"))
    }
    given = {"w1": weights["w1"], "w2": weights[constants.pop("w2", "w2")], "s": np.float32(0.5)} | constants
    assert old in NETWORK
    return parsed(NETWORK.replace(old, new) if old else NETWORK, opset, **given)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (network(w2="other"), "1 node changed: Conv 'c' (weights); 1 constant changed"),
        (network("a = Conv(", "a = Conv<strides = [2, 2]>("), "1 node changed: Conv 'a' (attributes)"),
        (network("[d] d = Add(c, b)", "[c2] c2 = Relu(c) [d] d = Add(c2, b)"), "1 node changed: + Relu 'c2'"),
        (network("[d] d = Add(c, b)  [e] e = Mul(d, s)", "[e] e = Mul(c, s)"), "1 node changed: - Add 'd'"),
        (network("Add(c, b)", "Add(c, a)"), "1 node changed: Add 'd' (inputs)"),
        (
            network(s=np.float32(0.25)),
            "2 nodes changed: Mul 'e' (weights), Add 'y' (weights); 1 constant changed",
        ),
        (network("[c] c", "[stage] c"), "2 nodes changed: + Conv 'stage', - Conv 'c'"),
        (
            network("a = Conv(x, w1)  [b] b = Relu(a)", "first = Conv(x, w1)  [b] b = Relu(first)"),
            "nodes and constants are the same: other names of tensors, or other metadata",
        ),
        (network("[n,4,8,8] x", "[8,4,8,8] x"), "1 node changed: input 'x' (type)"),
        (network(opset=18), "1 node changed: operator set 'ai.onnx' (version)"),
        (
            network(
                "a = Conv(x, w1)  [b] b = Relu(a)", "a = Conv<group = 1>(x, w1)  [b] b = Neg(a)", w2="other"
            ),
            "4 nodes changed: Conv 'a' (attributes), Conv 'c' (weights), + Neg 'b', - Relu 'b'; 1 constant changed",
        ),
    ],
)
def test_a_message_names_what_changed_in_a_model(changed: Model, text: str) -> None:
    assert changes_text(digests_of(network()), digests_of(changed)) == text


def test_a_constant_has_the_same_digest_in_each_form() -> None:
    """As raw bytes, as a list of numbers, and as a Constant node."""
    before, after = network().proto, network().proto
    raw = after.graph.initializer[0]
    values = numpy_helper.to_array(raw)
    raw.CopyFrom(TensorProto(name="w1", dims=values.shape, data_type=1, float_data=values.ravel()))
    moved = after.graph.initializer.pop()
    after.graph.node.insert(0, helper.make_node("Constant", [], [moved.name], value=moved))
    assert digests_of(Model(before)) == digests_of(Model(after))


def chain(count: int) -> Model:
    nodes = (f"t{i + 1} = {f'Add(t{i}, c)' if i % 3 else f'Relu(t{i})'}" for i in range(count))
    text = f"g (float[1] t0) => (float[1] t{count}) {{ {' '.join(nodes)} }}"
    return parsed(text, named=True, c=np.float32(1))


def test_the_digests_of_many_nodes_are_short_and_a_few_of_many_changes_are_named() -> None:
    assert len(digests_of(chain(20_000))) < 256 << 10
    text = changes_text(digests_of(chain(20)), digests_of(chain(40)))
    assert text.startswith("22 nodes changed: ")
    assert text.endswith(", and 17 more")
    assert text.count("'t") == 5


@pytest.mark.parametrize("damaged", ["", "abc", "\u00e9", "{}", digests_of(chain(30))[:50]])
def test_missing_or_damaged_digests_give_no_text(damaged: str) -> None:
    assert changes_text(damaged, digests_of(chain(3))) == ""
    assert changes_text(digests_of(chain(3)), damaged) == ""
