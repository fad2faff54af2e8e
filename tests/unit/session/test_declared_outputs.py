"""A wrongly declared rank or size of an output is corrected in a copy of the model, with a warning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.app.session import Session
from qdqspec.graph.model import load_model
from qdqspec.types import Case, Inputs, InputShape, ShapeProfile, TuneRules

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[1,16,32] x, int64[k] s) => (float[{declared}] y) {{ [mm] m = MatMul(x, w)  y = Reshape(m, s) }}"""


@pytest.mark.parametrize(
    ("declared", "shown", "now"),
    [("1, 16, 32", "[1, 16, 32]", [None, None]), ("n, 31", "[?, 31]", ["n", None])],
)
def test_a_wrongly_declared_output_shape_is_corrected_with_a_warning(
    declared: str, shown: str, now: list[str | None], tmp_path: Path
) -> None:
    proto = onnx.parser.parse_model(TEXT.format(declared=declared))
    weight = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "odd.onnx")
    given = (tmp_path / "odd.onnx").read_bytes()
    x = np.random.default_rng(1).normal(size=(3, 1, 16, 32)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, s=np.full((3, 2), [16, 32]))
    two = InputShape(min=(2,), opt=(2,), max=(2,))
    case = Case(
        id="default",
        model=tmp_path / "odd.onnx",
        inputs=Inputs(profiles=(ShapeProfile(shapes={"s": two}),), calibration=tmp_path / "data.npz"),
        tune=TuneRules(trials=1),
    )
    with Session(no_cache=True, output=tmp_path / "out") as session:
        result = session.tune(case)
        (output,) = load_model(result.model).proto.graph.output
    dims = output.type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value or None for dim in dims] == now
    warning = f"output 'y': {shown} is declared, [16, 32] is computed; corrected in a copy of the model"
    assert warning in result.evidence.warnings
    assert (tmp_path / "odd.onnx").read_bytes() == given
