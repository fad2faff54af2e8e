"""A wrongly declared rank or size of an output is corrected in a copy of the model, with a warning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from written_cases import normal, written_case

from qdqspec.app.session import Session
from qdqspec.graph.model import load_model
from qdqspec.types import InputShape, ShapeProfile, TuneRules

TEXT = """g (float[1,16,32] x, int64[k] s) => (float[{declared}] y) {{ [mm] m = MatMul(x, w)  y = Reshape(m, s) }}"""


@pytest.mark.parametrize(
    ("declared", "shown", "now"),
    [("1, 16, 32", "[1, 16, 32]", [None, None]), ("n, 31", "[?, 31]", ["n", None])],
)
def test_a_wrongly_declared_output_shape_is_corrected_with_a_warning(
    declared: str, shown: str, now: list[str | None], tmp_path: Path
) -> None:
    data = {"x": normal(3, 1, 16, 32, seed=1), "s": np.full((3, 2), [16, 32])}
    text = TEXT.format(declared=declared)
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
