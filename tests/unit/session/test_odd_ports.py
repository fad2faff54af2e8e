"""Inputs that a case fixes, outputs that a model declares wrongly, and outputs whose length depends on their values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from written_cases import normal, written_case

from qdqspec.app.session import Session
from qdqspec.errors import SpecError
from qdqspec.graph.model import load_model
from qdqspec.types import Case, InputShape, ShapeProfile, TuneRules

TEXT = """g (float[1,4,8,8] x, int64 rate) => (float[1,4,8,8] y) <int64 wide = {16000}> {
  is_wide = Equal(rate, wide)
  y = If (is_wide) <
    then_branch = yes () => (t) { c = Conv<pads = [1, 1, 1, 1]>(x, w)  t = Relu(c) },
    else_branch = no () => (e) { d = Neg(x)  e = Relu(d) }
  >
}"""


@pytest.fixture
def case(tmp_path: Path) -> Case:
    data = {"x": normal(4, 1, 4, 8, 8), "rate": np.full(4, 8000)}
    case = written_case(tmp_path, TEXT, data, TuneRules(trials=2), w=normal(4, 4, 3, 3, seed=1))
    return replace(case, inputs=replace(case.inputs, values={"rate": 16000}))


def test_a_fixed_input_is_removed_and_parity_is_measured_at_its_value(case: Case, tmp_path: Path) -> None:
    with Session(no_cache=True, output=tmp_path / "out") as session:
        result = session.tune(case)
        given = session.model(case)
        assert given.where == str(case.model)
        assert given.inputs == ("x",)
        assert [node.op_type for node in given.nodes] == ["Conv", "Relu"]
        other = session.model(replace(case, inputs=replace(case.inputs, values={"rate": 8000})))
        assert [node.op_type for node in other.nodes] == ["Neg", "Relu"]
        assert load_model(result.model).inputs == ("x",)
        assert result.parity.sqnr_db > 25  # compared with the branch for 16000, not with that of the data
    warnings = result.evidence.warnings
    assert any("input 'rate' is fixed to 16000: the tuned model has no such input" in w for w in warnings)


def test_an_unknown_fixed_input_is_an_error_with_the_nearest_name(case: Case, tmp_path: Path) -> None:
    wrong = replace(case, inputs=replace(case.inputs, values={"rte": 8000}))
    with (
        Session(no_cache=True, output=tmp_path / "out") as session,
        pytest.raises(SpecError, match=r"'rte', which is no input of the model.*'rate'"),
    ):
        session.model(wrong)


DECLARED = """g (float[1,16,32] x, int64[k] s) => (float[{declared}] y) {{
  [mm] m = MatMul(x, w)  y = Reshape(m, s) }}"""


@pytest.mark.parametrize(
    ("declared", "shown", "now"),
    [("1, 16, 32", "[1, 16, 32]", [None, None]), ("n, 31", "[?, 31]", ["n", None])],
)
def test_a_wrongly_declared_output_shape_is_corrected_with_a_warning(
    declared: str, shown: str, now: list[str | None], tmp_path: Path
) -> None:
    data = {"x": normal(3, 1, 16, 32, seed=1), "s": np.full((3, 2), [16, 32])}
    text = DECLARED.format(declared=declared)
    case = written_case(tmp_path, text, data, TuneRules(trials=1), w=normal(32, 32))
    given = case.model.read_bytes()
    two = InputShape(min=(2,), opt=(2,), max=(2,))
    case = replace(case, inputs=replace(case.inputs, profiles=(ShapeProfile(shapes={"s": two}),)))
    with Session(no_cache=True, output=tmp_path / "out") as session:
        result = session.tune(case)
        (output,) = load_model(result.model).proto.graph.output
    dims = output.type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value or None for dim in dims] == now
    warning = f"output 'y': {shown} is declared, [16, 32] is computed; corrected in a copy of the model"
    assert warning in result.evidence.warnings
    assert case.model.read_bytes() == given


COMPRESSED = """net (float[1,16] x) => (float[n,16] y) {
  a = MatMul(x, w)  b = Relu(a)  c = MatMul(b, v)  d = Reshape(c, rows)
  e = ReduceMax<axes = [1], keepdims = 0>(d)  f = Greater(e, least)  y = Compress<axis = 0>(d, f) }"""
ROWS = 64  # some of their maxima are so close to the limit that quantized weights change their number


def test_placements_whose_outputs_have_another_length_are_not_built(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shapes = {"w": (16, 32), "v": (32, 16 * ROWS)}
    constants = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    constants |= {"rows": np.array([ROWS, 16]), "least": np.float32(1.5)}
    samples = [random.normal(size=(16, 1, 16)).astype(np.float32) for _ in range(2)]
    case = written_case(tmp_path, COMPRESSED, {"x": samples[0]}, TuneRules(trials=4), **constants)
    np.savez(tmp_path / "evaluation.npz", x=samples[1])
    case = replace(case, inputs=replace(case.inputs, evaluation=tmp_path / "evaluation.npz"))
    with Session(root=tmp_path / "out", no_cache=True) as session:
        found = session.search(case)
    assert found.unchanged
    assert "expected below 20 dB and not built" in found.reason
    searched = [trial for trial in found.trials if trial.phase != "confirm"]
    assert all(trial.ok for trial in searched)
