"""Models that a runtime does not compute as ONNX defines them: a warning, and figures against the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arrays import arrays_of
from doubling import Doubling
from graph_text import saved
from refused_models import integers_with_other_values

from qdqspec._core.arrays import Array
from qdqspec.app.cli import main
from qdqspec.app.preparation.runtimes import compared_with_definition
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import Model, load_model

RANDOM = np.random.default_rng(11)


@pytest.fixture
def integer_input(tmp_path: Path) -> Path:
    """A model that ONNX Runtime 1.32 computes otherwise when it optimizes it, with data."""
    values = RANDOM.integers(-2000, 2000, size=(8, 4, 16, 16)).astype(np.int32)
    np.savez(tmp_path / "data.npz", x=values)
    return integers_with_other_values(tmp_path / "integer_input.onnx")


def feeds(count: int = 8) -> list[dict[str, Array]]:
    return [{"x": RANDOM.normal(size=(2, 16)).astype(np.float32)} for _ in range(count)]


def model_in(folder: Path, text: str, **constants: np.ndarray) -> Model:
    return load_model(saved(folder / "model.onnx", text, opset=17, ir_version=8, **constants))


def test_a_run_that_differs_from_the_definition_is_found(tmp_path: Path) -> None:
    weight = RANDOM.normal(size=(16, 8)).astype(np.float32)
    linear = model_in(tmp_path, "g (float[2,16] x) => (float[2,8] y) { y = MatMul(x, w) }", w=weight)
    same = compared_with_definition(linear, feeds(), OnnxRuntime(), BuildOptions())
    assert same.holds
    found = compared_with_definition(linear, feeds(), Doubling(), BuildOptions())
    assert not found.holds
    assert found.sqnr_db == pytest.approx(0, abs=0.01)
    assert found.output == "y"


def test_random_outputs_are_not_compared(tmp_path: Path) -> None:
    text = "g (float[2,16] x) => (float[2,16] y) { r = RandomNormalLike(x)  y = Add(x, r) }"
    assert compared_with_definition(model_in(tmp_path, text), feeds(), OnnxRuntime(), BuildOptions()) is None


def test_outputs_that_are_zero_by_definition_are_not_judged(tmp_path: Path) -> None:
    """The rounding of a difference of equal values has no size to be compared with."""
    text = "g (float[2,16] x) => (float[2,16] zero, float[2,16] y) { zero = Sub(x, x)  y = Identity(x) }"
    assert (
        compared_with_definition(model_in(tmp_path, text), feeds(), Doubling(), BuildOptions()).output == "y"
    )


def is_mended(integer_input: Path) -> bool:
    """Whether the installed runtime computes the model as defined."""
    data = arrays_of(integer_input.with_name("data.npz"))["x"]
    found = compared_with_definition(
        load_model(integer_input), [{"x": data[0]}], OnnxRuntime(), BuildOptions()
    )
    return found is None or found.holds


def test_tuning_and_verify_judge_by_the_definition(
    integer_input: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_mended(integer_input):
        pytest.skip("this ONNX Runtime computes the model as ONNX defines it")
    with Session() as session:
        result = session.tune(integer_input, calibration=tmp_path / "data.npz", trials=4)
    (warning,) = (each for each in result.warnings if "as ONNX defines it" in each)
    assert "MatMul 'MatMul_y'" in warning
    assert "Do not rely on its outputs here" in warning
    assert result.parity.definition.sqnr_db < 20
    assert result.unchanged == (result.parity.sqnr_db < 20)  # a placement that mends the model may win
    model = str(integer_input)
    code = main(["verify", model, model, "--data", str(tmp_path / "data.npz"), "--min-sqnr-db", "20"])
    text = capsys.readouterr().out
    assert code == 1
    assert "The given model as it runs here" in text
    assert "definition of the given model > Q/DQ arithmetic" in text
    assert "first at MatMul 'MatMul_y'" in text


def test_the_errors_of_integer_operators_are_the_runtime_s(tmp_path: Path) -> None:
    """The split into quantization and runtime takes the values that ONNX defines for QLinearConv."""
    weight = np.clip(np.rint(RANDOM.normal(size=(8, 8, 3, 3)) * 60), -127, 127).astype(np.int8)
    text = "g (float[1,8,8,8] x) => (float[1,8,6,6] y) {{ {} }}"
    plain = saved(
        tmp_path / "float.onnx",
        text.format("y = Conv(x, w)"),
        w=weight.astype(np.float32) * np.float32(0.002),
    )
    nodes = """q = QuantizeLinear(x, xs, xz)  c = QLinearConv(q, xs, xz, w, ws, wz, ys, yz)
        y = DequantizeLinear(c, ys, yz)"""
    constants = {"xs": np.float32(8 / 255), "xz": np.uint8(0), "ys": np.float32(0.04), "yz": np.uint8(128)}
    constants |= {"w": weight, "ws": np.full(8, 0.002, np.float32), "wz": np.zeros(8, np.int8)}
    quantized = saved(tmp_path / "quantized.onnx", text.format(nodes), **constants)
    np.savez(tmp_path / "data.npz", x=np.abs(RANDOM.normal(size=(8, 8, 8, 8))).astype(np.float32)[:, None])
    with Session() as session:
        case = session.case(plain, {"evaluation": tmp_path / "data.npz"})
        parity = session.work(case).parity_with(quantized)
    (quantization,) = parity.quantization
    assert quantization.sqnr_db > 25
