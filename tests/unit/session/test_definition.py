"""Models that a runtime refuses, or does not compute as ONNX defines them: lint, warnings, and parity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from arrays import arrays_of
from onnx_text import parsed, saved
from refused_models import (
    integers_with_other_values,
    mixed_float_types,
    pad_that_no_run_survives,
    pair_that_no_build_takes,
)
from stand_ins import Doubling
from written_cases import normal

from qdqspec._core import hooks
from qdqspec.app.cli import main
from qdqspec.app.evidence.builds import lint_and_load
from qdqspec.app.preparation.runtimes import compared_with_definition
from qdqspec.app.session import Session
from qdqspec.backends.base import Availability, BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.backends.tensorrt.engine import TensorRt
from qdqspec.graph.check import type_problem
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.lint.rules import named_node
from qdqspec.testing.backends import small_model
from qdqspec.types import DefinitionEvidence, Finding


@pytest.fixture
def integer_input(tmp_path: Path) -> Path:
    """A model that ONNX Runtime 1.32 computes otherwise when it optimizes it, with data."""
    values = np.random.default_rng(11).integers(-2000, 2000, size=(8, 4, 16, 16)).astype(np.int32)
    np.savez(tmp_path / "data.npz", x=values)
    return integers_with_other_values(tmp_path / "integer_input.onnx")


def compared(
    folder: Path, text: str, runtime: OnnxRuntime, **constants: np.ndarray
) -> DefinitionEvidence | None:
    model = load_model(saved(folder / "model.onnx", text, opset=17, ir_version=8, **constants))
    feeds = [{"x": normal(2, 16, seed=number)} for number in range(8)]
    return compared_with_definition(model, feeds, runtime, BuildOptions())


def test_a_run_that_differs_from_the_definition_is_found(tmp_path: Path) -> None:
    """Random outputs are not compared, nor those that are zero by definition: rounding has no size to compare with."""
    weight = {"w": normal(16, 8)}
    linear = "g (float[2,16] x) => (float[2,8] y) { y = MatMul(x, w) }"
    assert compared(tmp_path, linear, OnnxRuntime(), **weight).holds
    found = compared(tmp_path, linear, Doubling(), **weight)
    assert (found.holds, found.output) == (False, "y")
    assert found.sqnr_db == pytest.approx(0, abs=0.01)
    random = "g (float[2,16] x) => (float[2,16] y) { r = RandomNormalLike(x)  y = Add(x, r) }"
    assert compared(tmp_path, random, OnnxRuntime()) is None
    zero = "g (float[2,16] x) => (float[2,16] zero, float[2,16] y) { zero = Sub(x, x)  y = Identity(x) }"
    assert compared(tmp_path, zero, Doubling()).output == "y"


def test_tuning_verify_and_lint_judge_by_the_definition(
    session: Session, integer_input: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = {"x": arrays_of(tmp_path / "data.npz")["x"][0]}
    if compared_with_definition(load_model(integer_input), [feed], OnnxRuntime(), BuildOptions()).holds:
        pytest.skip("this ONNX Runtime computes the model as ONNX defines it")
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
    (finding,) = refused(integer_input)
    assert (finding.id, finding.node) == ("RUN003", "MatMul_y")
    assert "dB against its definition at output 'y'" in finding.message
    assert "computes other values" in lint_and_load(load_model(integer_input), TARGET).note


def test_the_errors_of_integer_operators_are_the_runtime_s(session: Session, tmp_path: Path) -> None:
    """The split into quantization and runtime takes the values that ONNX defines for QLinearConv."""
    weight = np.clip(np.rint(normal(8, 8, 3, 3, deviation=60)), -127, 127).astype(np.int8)
    text = "g (float[1,8,8,8] x) => (float[1,8,6,6] y) {{ {} }}"
    floats = weight.astype(np.float32) * np.float32(0.002)
    plain = saved(tmp_path / "float.onnx", text.format("y = Conv(x, w)"), w=floats)
    nodes = """q = QuantizeLinear(x, xs, xz)  c = QLinearConv(q, xs, xz, w, ws, wz, ys, yz)
        y = DequantizeLinear(c, ys, yz)"""
    constants = {"xs": np.float32(8 / 255), "xz": np.uint8(0), "ys": np.float32(0.04), "yz": np.uint8(128)}
    constants |= {"w": weight, "ws": np.full(8, 0.002, np.float32), "wz": np.zeros(8, np.int8)}
    quantized = saved(tmp_path / "quantized.onnx", text.format(nodes), **constants)
    np.savez(tmp_path / "data.npz", x=np.abs(normal(8, 1, 8, 8, 8)))
    case = session.case(plain, {"evaluation": tmp_path / "data.npz"})
    parity = session.work(case).parity_with(quantized)
    (quantization,) = parity.quantization
    assert quantization.sqnr_db > 25


TARGET = "onnxruntime-cpu"


def refused(model: Path, target: str = TARGET) -> list[Finding]:
    findings = lint_and_load(load_model(model), target).findings
    return [finding for finding in findings if finding.severity == "refused"]


@pytest.mark.parametrize(
    ("write", "rule", "words"),
    [
        (pair_that_no_build_takes, "RUN001", "output_dtype INT8 does not match"),
        (pad_that_no_run_survives, "RUN002", "idx=4 must be within"),
    ],
)
def test_a_failure_of_the_optimized_model_alone_is_refused(
    write: Callable[[Path], Path], rule: str, words: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.onnx")
    found = refused(path)
    if not found:
        pytest.skip("this ONNX Runtime optimizes the model to one that runs")
    (finding,) = found
    assert finding.id == rule
    assert words in finding.message
    assert not any(text in finding.message for text in ("\n", str(tmp_path)))
    assert "without the runtime's optimizations" in finding.cure
    assert finding.source.startswith("runtime: onnxruntime ")


@pytest.mark.parametrize("target", hooks.all_names("lint_targets"))
def test_a_node_of_two_float_types_is_refused_on_every_target_once(target: str, tmp_path: Path) -> None:
    path = mixed_float_types(tmp_path / "mixed.onnx")
    assert not [f for f in lint_model(load_model(path), target) if f.severity == "refused"]
    nodes = [finding.node for finding in refused(path, target)]
    assert nodes[0] == "Conv_y"
    assert nodes.count("Conv_y") == 1


def test_a_model_that_the_runtime_loads_is_not_refused_for_the_checker(tmp_path: Path) -> None:
    """A wrong shape of an output: ONNX's checker refuses it, ONNX Runtime gives the right one.

    A run that fails without optimizations too is no finding: random values may be wrong for a model.
    """
    proto = small_model()
    assert lint_and_load(Model(proto), TARGET, feed={"x": np.ones((1, 2, 8, 8), np.float32)}).loaded
    proto.graph.output[0].type.tensor_type.shape.dim[-1].dim_value = 777
    found = lint_and_load(Model(proto), TARGET)
    assert found.loaded
    assert [(f.id, f.severity) for f in found.findings if f.id == "ONX001"] == [("ONX001", "note")]
    assert next(f.id for f in lint_and_load(Model(proto), TARGET, loads=False).findings) == "ONX001"


@pytest.mark.parametrize(("operator", "is_found"), [("com.microsoft.FastGelu", False), ("Softplus", True)])
def test_results_of_a_runtimes_operators_that_have_no_type_for_the_checker_are_no_finding(
    operator: str, *, is_found: bool
) -> None:
    """A voice detector with a dynamic kernel in a branch: ONNX's checker knows no type of what the branch gives."""
    proto = parsed(
        f"""g (bool c, float[1,1,4] x) => (float[1,1,4] y) {{
            h = If(c) <then_branch: graph = a () => (float[1,1,4] p) {{ p = {operator}(x) }},
                       else_branch: graph = b () => (float[1,1,4] q) {{ q = Identity(x) }}>
            y = Identity(h) }}""",
        17,
    ).proto
    for attribute in proto.graph.node[0].attribute:
        attribute.g.output[0].ClearField("type")
    if is_found:
        proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    assert bool(type_problem(proto)) is is_found


def test_a_model_is_not_loaded_where_the_runtime_is_missing_slow_or_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = load_model(mixed_float_types(tmp_path / "mixed.onnx"))
    found = lint_and_load(slow, TARGET, options=BuildOptions(build_seconds=1e-6))
    assert found.missing.endswith("took longer than 1e-06 s")
    model = load_model(pair_that_no_build_takes(tmp_path / "pair.onnx"))
    missing = Availability(usable=False, why="onnxruntime is not installed")
    monkeypatch.setattr(OnnxRuntime, "probe", lambda *_: missing)
    found = lint_and_load(model, TARGET)
    assert found.note == "static rules only, not loaded: onnxruntime is not installed"
    assert found.findings == lint_model(model, TARGET)
    here = Availability(usable=True, facts={"tensorrt": "11.0.1"})
    monkeypatch.setattr(TensorRt, "probe", lambda *_: here)
    assert lint_and_load(model, "tensorrt-10.9").missing == "tensorrt 11.0.1 is installed, not 10.9"
    assert "is installed, not" not in lint_and_load(model, "tensorrt-11").missing


def test_a_runtime_that_needs_shapes_is_left_out_where_they_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched = load_model(pair_that_no_build_takes(tmp_path / "pair.onnx", rows="n"))
    proto = onnx.load(tmp_path / "pair.onnx")
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "k"
    unknown = Model(proto)
    assert lint_and_load(unknown, TARGET).missing == ""
    able = OnnxRuntime.capabilities
    monkeypatch.setattr(OnnxRuntime, "capabilities", lambda *each: replace(able(*each), needs_shapes=True))
    left_out = lint_and_load(unknown, TARGET)
    assert left_out.missing.endswith("needs the size of each dimension of its inputs")
    assert left_out.refusal is None
    assert lint_and_load(batched, TARGET).missing == ""


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("(op_type:Relu, node name: two): W has inconsistent type", "two"),
        ("Type Error: bound to different types in node (two).", "two"),
        ("Node (two_q) Op (QuantizeLinear)", ""),
        ("Cannot compile for target(s) sm86: the same type. In compileGraph at codeGenerator.cpp:2012)", ""),
        ("Cannot compile operation 'type' for Turing", "type"),
        ("Quantized constant (s) is only allowed before DQ", "type"),
        ("No kernel for node two.", "two"),
        ("Mismatched type for tensor 2012.1_myl0_2, f8 vs. expected type:i8", "two"),
    ],
)
def test_a_node_is_found_in_the_words_of_a_runtime(tmp_path: Path, text: str, node: str) -> None:
    """Names of tensors may be numbers, and words."""
    graph = "g (float[4] x) => (float[4] y) { [type] s = Relu(x) [two] a = Relu(s) [three] y = Relu(a) }"
    proto = onnx.load(saved(tmp_path / "m.onnx", graph))
    proto.graph.node[1].output[0] = proto.graph.node[2].input[0] = "2012"
    assert named_node(Model(proto), text) == node
