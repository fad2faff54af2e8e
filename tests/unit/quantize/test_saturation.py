"""Ranges end where the operators that read a tensor no longer distinguish its values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings, strategies as st
from onnx import helper
from onnx_text import model_of

from qdqspec.app.session import Session
from qdqspec.graph.definition import evaluator_of
from qdqspec.graph.model import Model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import Saturation, TensorRange, saturations, tie_ranges
from qdqspec.types import Case, Consumer, Inputs, QuantizeRules, Site, TuneRules

WIDE = TensorRange(-20.0, 10.0)
TURN = "Transpose<perm = [1, 0, 2]>"
HARD_SWISH = "p = Add(t, three) c = Clip(p, zero, six) m = Mul(t, c) f = Div(m, six)"
CONSTANTS = (
    "<float three = {3.0}, float zero = {0.0}, float six = {6.0}, float minus = {-1.0},"
    " float[1, 1, 2] shift = {-1.0, 4.0}>"
)


def reading(function: str, also: str = "", **limits: int) -> Saturation | None:
    """The ends of ``t``, from which ``function`` computes ``f``; ``also`` is another reader."""
    found = saturations(model(function, also), {"t": WIDE}, **limits)
    assert found.keys() <= {"t"}
    return found.get("t")


def model(function: str, also: str = "") -> Model:
    nodes = f"t = MatMul(x, w) {function} y = MatMul(f, w) {also}"
    return model_of(f"(float[1, 8, 2] x) => (float[1, n, 2] y) {CONSTANTS} {{ {nodes} }}", w=(2, 2))


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        ("f = Relu(t)", (0.0, 0.0), None),
        (HARD_SWISH, (-3.2, -3.0), None),
        ("f = HardSwish(t)", (-3.2, -3.0), None),
        ("s = Sigmoid(t) f = Mul(t, s)", (-9.0, -6.0), None),
        ("f = Sigmoid(t)", (-8.0, -5.0), (5.0, 8.0)),
        ("f = Tanh(t)", (-4.0, -3.0), (3.0, 4.0)),
        ("f = Clip(t, zero, six)", (0.0, 0.0), (6.0, 6.2)),
        ("n = Neg(t) f = Relu(n)", None, (0.0, 0.0)),
        ("s = Add(t, shift) f = Relu(s)", (-4.2, -4.0), None),  # a Relu for each channel
        (f"r = {TURN}(t) q = Relu(r) f = {TURN}(q)", (0.0, 0.0), None),
        ("r = ReduceMax<axes = [1]>(t) f = Relu(r)", (0.0, 0.0), None),
        ("a, b = Split<axis = 2>(t) u = Relu(a) v = Relu(b) f = Concat<axis = 2>(u, v)", (0.0, 0.0), None),
    ],
)
def test_a_range_ends_where_its_readers_saturate(
    function: str, low: tuple[float, float] | None, high: tuple[float, float] | None
) -> None:
    end = reading(function)
    assert end is not None
    assert (low[0] <= end.low <= low[1]) if low else end.low == -np.inf
    assert (high[0] <= end.high <= high[1]) if high else end.high == np.inf


@pytest.mark.parametrize(
    "function",
    [
        "f = Identity(t)",
        "f = LeakyRelu(t)",
        "f = Softmax(t)",
        "f = Exp(t)",  # a sum of many small results is not small
        "f = Div(six, t)",
        "f = Mul(t, zero)",  # a constant
        "f = Mul(t, x)",
        "r = Relu(t) f = Pow(r, minus)",  # infinite at zero
    ],
)
def test_readers_that_distinguish_all_values_have_no_end(function: str) -> None:
    assert reading(function) is None


@pytest.mark.parametrize("also", ["z = MatMul(t, w)", "z = Softmax(t)", "z = Mul(t, x)"])
def test_one_reader_that_distinguishes_all_values_is_enough(also: str) -> None:
    assert reading("f = Relu(t)", also=also) is None


def test_the_reader_with_the_farthest_end_decides() -> None:
    both = reading("f = Relu(t)", also="h = HardSwish(t) z = MatMul(h, w)")
    assert both is not None
    assert both.low < -3.0


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "(float[2, 2] x) => (float[2, 2] y) { t = MatMul(x, w) y = Relu(t) }", id="a model output"
        ),
        pytest.param(
            """(float[2, 2] x, bool flag) => (float[2, 2] y, float[2, 2] z) { t = MatMul(x, w) f = Relu(t)
              y = MatMul(f, w)  z = If(flag) <then_branch = then () => (float[2, 2] a) { a = Identity(t) },
                else_branch = other () => (float[2, 2] b) { b = Identity(x) }> }""",
            id="a reader in a body",
        ),
    ],
)
def test_tensors_that_others_see_whole_have_no_end(text: str) -> None:
    assert not saturations(model_of(text, w=(2, 2)), {"t": WIDE, "y": WIDE})


def test_tensors_that_share_a_range_share_its_ends() -> None:
    text = """(float[1, 8] x) => (float[1, 16] y)
    { t = MatMul(x, w) u = MatMul(x, w) c = Concat<axis = 1>(t, u) h = HardSwish(c) y = MatMul(h, v) }"""
    both = model_of(text, w=(8, 8), v=(16, 16))
    ranges = tie_ranges(both, {"t": WIDE, "u": TensorRange(-1, 1), "c": WIDE})
    found = saturations(both, ranges)
    assert found.keys() == {"t", "u", "c"}
    assert len({*found.values()}) == 1
    assert not saturations(both, ranges, kept={"u"})


def test_long_functions_are_followed_to_a_limit() -> None:
    chain = " ".join(f"n{i + 1} = Neg(n{i})" for i in range(6))
    assert reading(f"n0 = Relu(t) {chain} f = Neg(n6)", most_nodes=3) is not None
    assert reading(f"n0 = Neg(t) {chain} f = Relu(n6)", most_nodes=3) is None


def test_a_function_for_each_pair_of_many_channels_has_no_end() -> None:
    """Constants along different axes have a function for each pair of elements, which a grid would multiply."""
    text = """(float[1, n, n] x) => (float[1, n, n] y)
    { t = MatMul(x, w) a = Add(t, rows) b = Add(a, columns) f = Relu(b) y = MatMul(f, w) }"""
    few = model_of(text, w=(4, 4), rows=(4, 1), columns=(4,))
    many = model_of(text, w=(512, 512), rows=(512, 1), columns=(512,))
    empty = model_of(text, w=(4, 4), rows=(0, 1), columns=(1,))
    assert saturations(few, {"t": WIDE}).keys() == {"t"}
    assert not saturations(many, {"t": WIDE})
    assert not saturations(empty, {"t": WIDE})


def test_the_lowest_integer_is_beyond_the_end() -> None:
    """All values that the readers do not distinguish are that integer, and its value is one of them."""
    made = model(HARD_SWISH)
    numbers = Quantizer(made, {"t": WIDE}, saturations=saturations(made, {"t": WIDE}))
    params = numbers.params(Site(tensor="t", consumers=(Consumer("p", 0),), format="uint8"))
    assert float(params.scale) == pytest.approx(13.1 / 255, rel=0.01)
    assert -int(params.zero_point) * float(params.scale) <= -3.0


functions = st.lists(
    st.sampled_from(
        [
            "Relu({})", "Tanh({})", "Sigmoid({})", "HardSwish({})", "HardSigmoid({})", "Erf({})", "Elu({})",
            "Softplus({})", "Softsign({})", "Neg({})", "Identity({})", "Add({}, three)", "Add({}, shift)",
            "Mul({}, six)", "Mul({}, t)", "Div({}, three)", "Max({}, three)", "Clip({}, zero, six)",
        ]
    ),
    min_size=1,
    max_size=5,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@example(["Neg({})", "HardSwish({})", "Mul({}, t)"], -24.0, 0.5)  # steep where it does not saturate
@given(functions, st.floats(-30, -0.5), st.floats(0.5, 30))
def test_values_beyond_an_end_give_nearly_the_result_of_the_end(
    parts: list[str], low: float, high: float
) -> None:
    names = ["t", *(f"n{i}" for i in range(len(parts) - 1)), "f"]
    text = " ".join(
        f"{new} = {part.format(old)}" for old, new, part in zip(names, names[1:], parts, strict=False)
    )
    span = TensorRange(low, high)
    made = model(text)
    end = saturations(made, {"t": span}).get("t")
    if end is None:
        return
    nodes = [node.proto for node in made.nodes if node.outputs[0] in names[1:]]
    ends = (
        [helper.make_tensor_value_info("t", 1, [None, 1, 1])],
        [helper.make_tensor_value_info("f", 1, None)],
    )
    graph = helper.make_graph(nodes, "f", *ends, list(made.initializers.values()))
    run = evaluator_of(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))

    def of(values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # exponentials of large values
            found = run.run(None, {"t": values.astype(np.float32).reshape(-1, 1, 1)})[0]
        return np.broadcast_to(found, (len(values), 1, 2)).reshape(len(values), -1).astype(np.float64)

    values, kept = np.linspace(low, high, 4001), end.within(span)
    steepest = np.abs(np.diff(of(values), axis=0)).max(axis=0) * 4000 / 255  # by one step of 8 bits
    lost = np.abs(of(np.clip(values, kept.low, kept.high)) - of(values)).max(axis=0)
    assert (lost <= 1.1 / 32 * steepest + 1e-6).all()


@pytest.fixture
def sigmoids(tmp_path: Path) -> tuple[Path, Path]:
    """A model with SiLU between two products, and data for which its range is wide."""
    path, data = tmp_path / "net.onnx", tmp_path / "data.npz"
    onnx.save(model("s = Sigmoid(t) f = Mul(t, s)").proto, path)
    np.savez(data, x=np.random.default_rng(0).normal(size=(8, 8, 2)).astype(np.float32) * 30)
    return path, data


def test_given_ranges_are_used_as_they_are(sigmoids: tuple[Path, Path], tmp_path: Path) -> None:
    scales = tmp_path / "ranges.json"
    scales.write_text('{"t": [-40.0, 40.0], "x": 90.0, "s": [0, 1], "f": [-1, 40]}')
    with Session(root=tmp_path) as session:
        prepared = session.work(case_of(*sigmoids, scales=scales)).prepared
        assert not prepared.calibrated[1].saturations


def test_scales_of_a_quantized_model_are_used_as_they_are(
    sigmoids: tuple[Path, Path], tmp_path: Path
) -> None:
    with Session(root=tmp_path) as session:
        own = session.work(case_of(*sigmoids)).prepared
        placement, start = own.space.resolve(own.space.everything()), tmp_path / "start.onnx"
        wide = Quantizer(own.model, own.numbers.ranges, biases=own.space.bias_sources)
        save_model(insert_qdq(own.model, placement, wide).proto, start)
        case = replace(case_of(*sigmoids), tune=TuneRules(start_from=(start,)))
        kept = session.work(case).prepared
    (site,) = (site for site in placement.ordered if site.tensor == "t")
    assert float(kept.numbers.params(site).scale) == pytest.approx(float(wide.params(site).scale), rel=1e-5)
    assert float(own.numbers.params(site).scale) < 0.8 * float(wide.params(site).scale)


def case_of(path: Path, data: Path, scales: Path | None = None) -> Case:
    inputs = Inputs(calibration=data, scales=scales)
    return Case(id="default", model=path, inputs=inputs, quantize=QuantizeRules(corrections="none"))
