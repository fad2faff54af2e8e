"""Models that a runtime does not compute as ONNX defines them: a warning, and figures against the definition."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from arrays import arrays_of
from doubling import Doubling
from onnx import TensorProto, helper, numpy_helper
from refused_models import integers_with_other_values

from qdqspec._core.arrays import Array
from qdqspec.app.cli import main
from qdqspec.app.preparation.definition import compared_with_definition
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import load_model

RANDOM = np.random.default_rng(11)


def saved(
    path: Path, nodes: list[onnx.NodeProto], inputs: list, outputs: list, constants: Mapping[str, object]
) -> Path:
    values = [[helper.make_tensor_value_info(*each) for each in ends] for ends in (inputs, outputs)]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", *values, stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def integer_input(tmp_path: Path) -> Path:
    """A model that ONNX Runtime 1.32 computes otherwise when it optimizes it, with data."""
    values = RANDOM.integers(-2000, 2000, size=(8, 4, 16, 16)).astype(np.int32)
    np.savez(tmp_path / "data.npz", x=values)
    return integers_with_other_values(tmp_path / "integer_input.onnx")


def feeds(count: int = 8) -> list[dict[str, Array]]:
    return [{"x": RANDOM.normal(size=(2, 16)).astype(np.float32)} for _ in range(count)]


def test_a_run_that_differs_from_the_definition_is_found(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    weight = {"w": RANDOM.normal(size=(16, 8)).astype(np.float32)}
    ends = [("x", TensorProto.FLOAT, [2, 16])], [("y", TensorProto.FLOAT, [2, 8])]
    linear = load_model(saved(tmp_path / "linear.onnx", [node], *ends, weight))
    same = compared_with_definition(linear, feeds(), OnnxRuntime(), BuildOptions())
    assert same.holds
    found = compared_with_definition(linear, feeds(), Doubling(), BuildOptions())
    assert not found.holds
    assert found.sqnr_db == pytest.approx(0, abs=0.01)
    assert found.output == "y"


def test_random_outputs_are_not_compared(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["r"], "noise"),
        helper.make_node("Add", ["x", "r"], ["y"], "sum"),
    ]
    ends = [("x", TensorProto.FLOAT, [2, 16])], [("y", TensorProto.FLOAT, [2, 16])]
    model = load_model(saved(tmp_path / "random.onnx", nodes, *ends, {}))
    assert compared_with_definition(model, feeds(), OnnxRuntime(), BuildOptions()) is None


def test_outputs_that_are_zero_by_definition_are_not_judged(tmp_path: Path) -> None:
    """The rounding of a difference of equal values has no size to be compared with."""
    nodes = [
        helper.make_node("Sub", ["x", "x"], ["zero"], "difference"),
        helper.make_node("Identity", ["x"], ["y"], "copy"),
    ]
    ends = [("zero", TensorProto.FLOAT, [2, 16]), ("y", TensorProto.FLOAT, [2, 16])]
    model = load_model(saved(tmp_path / "zero.onnx", nodes, [("x", TensorProto.FLOAT, [2, 16])], ends, {}))
    found = compared_with_definition(model, feeds(), Doubling(), BuildOptions())
    assert found.output == "y"


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
    assert result.parity.sqnr_db < 20
    assert result.unchanged
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
    ends = [("x", TensorProto.FLOAT, [1, 8, 8, 8])], [("y", TensorProto.FLOAT, [1, 8, 6, 6])]
    floats = helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    plain = saved(tmp_path / "float.onnx", [floats], *ends, {"w": weight.astype(np.float32) * 0.002})
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"], "Q"),
        helper.make_node("QLinearConv", ["q", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["c"], "conv"),
        helper.make_node("DequantizeLinear", ["c", "ys", "yz"], ["y"], "DQ"),
    ]
    constants = {
        "xs": np.float32(8 / 255),
        "xz": np.uint8(0),
        "w": weight,
        "ws": np.full(8, 0.002, np.float32),
    }
    constants |= {"wz": np.zeros(8, np.int8), "ys": np.float32(0.04), "yz": np.uint8(128)}
    quantized = saved(tmp_path / "quantized.onnx", nodes, *ends, constants)
    np.savez(tmp_path / "data.npz", x=np.abs(RANDOM.normal(size=(8, 8, 8, 8))).astype(np.float32)[:, None])
    with Session() as session:
        case = session.case(plain, {"evaluation": tmp_path / "data.npz"})
        parity = session.work(case).parity_with(quantized)
    (quantization,) = parity.quantization
    assert quantization.sqnr_db > 25
