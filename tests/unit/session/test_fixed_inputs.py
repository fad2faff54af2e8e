"""A session on ONNX Runtime with a case that fixes an input to a value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from written_cases import normal, written_case

from qdqspec.app.session import Session
from qdqspec.errors import SpecError
from qdqspec.graph.model import load_model
from qdqspec.types import Case, TuneRules

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
    assert "data.npz: array 'rate' is not used: the input is fixed to 16000" in warnings
    assert any("input 'rate' is fixed to 16000: the tuned model has no such input" in w for w in warnings)


def test_an_unknown_fixed_input_is_an_error_with_the_nearest_name(case: Case, tmp_path: Path) -> None:
    wrong = replace(case, inputs=replace(case.inputs, values={"rte": 8000}))
    with (
        Session(no_cache=True, output=tmp_path / "out") as session,
        pytest.raises(SpecError, match=r"'rte', which is no input of the model.*'rate'"),
    ):
        session.model(wrong)
