"""Number formats of a session: unsupported and mixed ones, types of plugin outputs, and lint for other targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graph_text import saved
from onnx import TensorProto
from sessions import Open
from written_cases import check_of, normal

from qdqspec.app.session import Session
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import load_model
from qdqspec.qdq.scheme_file import apply_scheme, read_scheme
from qdqspec.types import Case, Inputs, QuantizeRules, TuneRules


@pytest.fixture
def session(open_session: Open) -> Session:
    return open_session()


@pytest.fixture
def case(case: Case) -> Case:
    return replace(case, checks=(check_of("lint", target=["tensorrt-11", "onnxruntime-cpu"]),))


def test_the_tuned_model_is_linted_for_the_requested_targets(session: Session, case: Case) -> None:
    result = session.judge(case, case.checks[0])
    (recorded,) = session.record().cases
    assert set(recorded.evidence.lint) == {"tensorrt-11", "onnxruntime-cpu"}
    assert not recorded.evidence.search.unchanged
    # The simulated device supports asymmetric uint8, TensorRT does not.
    assert result.verdict.outcome == "fail"
    assert result.verdict.headline.startswith("tensorrt-11 refuses x_QuantizeLinear: has zero point")
    version = OnnxRuntime().probe().facts["onnxruntime"]
    assert recorded.evidence.lint_loads["onnxruntime-cpu"] == f"onnxruntime {version} loaded it"
    (loads,) = [section for section in result.verdict.sections if section.title == "Loads"]
    assert dict(loads.rows) == recorded.evidence.lint_loads


def test_the_tuned_model_is_not_loaded_if_no_check_asks_for_it(session: Session, case: Case) -> None:
    check = check_of("lint", target="onnxruntime-cpu", load=False)
    session.judge(replace(case, checks=(check,)), check)
    (recorded,) = session.record().cases
    note = "static rules only, not loaded: not asked for"
    assert dict(recorded.evidence.lint_loads) == {"onnxruntime-cpu": note}


def test_an_unsupported_format_makes_a_case_unavailable_with_the_reason(
    session: Session, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.availability(case).usable
    found = session.availability(replace(case, quantize=QuantizeRules(format="int16")))
    assert not found.usable
    assert found.why == "fake has no int16 on this device"
    assert "int8" in found.install
    reasons = {"nvfp4": "nvfp4 needs compute capability 10.0 (Blackwell), and this GPU has 9.0"}
    backend = session.runtime().backend
    known = backend.capabilities(session.runtime().options)
    here = replace(known, formats=("int8", "fp8"), lacking=reasons)
    monkeypatch.setattr(backend, "capabilities", lambda _: here)
    found = session.availability(replace(case, quantize=QuantizeRules(format="nvfp4")))
    assert found.why == f"fake has no nvfp4 on this device; {reasons['nvfp4']}"


def test_several_formats_are_mixed_and_reported_for_each_pair(session: Session, case: Case) -> None:
    mixed = replace(
        case,
        quantize=QuantizeRules(format="int8+fp8+int16"),
        tune=TuneRules(trials=20, min_sqnr_db=30.0),  # some candidates are below the limit
        checks=(),
    )
    assert session.availability(mixed).usable
    evidence = session.evidence(mixed, frozenset({"parity"}))
    labels = {label for t in evidence.search.trials for _, label in t.placement.labels}
    assert labels == {"in+out", "fp8:in+out"}
    assert evidence.pairs
    assert {pair.site.format for pair in evidence.pairs} <= {"uint8", "int8", "fp8"}
    (note,) = [warning for warning in evidence.warnings if "int16" in warning]
    assert note == (
        "format int16 is left out: fake does not have it on this device; the search chooses among int8, fp8"
    )


@pytest.mark.parametrize(("name", "least", "most"), [("nvfp4", 12.0, 25.0), ("mxfp8", 25.0, 40.0)])
def test_the_sqnr_of_blocked_activations_is_measured_on_a_cpu(
    session: Session, case: Case, tmp_path: Path, name: str, least: float, most: float
) -> None:
    """TensorRT's operators are replaced by equivalent computations."""
    text = "mlp (float[4,256] x) => (float[4,64] y) { a = MatMul(x, u)  b = Relu(a)  y = MatMul(b, v) }"
    weights = {"u": normal(256, 256), "v": normal(256, 64, seed=1)}
    layers = replace(
        case,
        model=saved(tmp_path / "mlp.onnx", text, opset=17, ir_version=8, **weights),
        inputs=Inputs(),
        quantize=QuantizeRules(format=name),
        tune=TuneRules(trials=4, min_sqnr_db="none"),
        checks=(),
    )
    evidence = session.evidence(layers, frozenset({"parity"}))
    assert {pair.site.format for pair in evidence.pairs} == {name}
    assert {pair.site.weight for pair in evidence.pairs} == {True, False}
    assert least < evidence.parity.sqnr_db < most


MODEL = """g (float16[1, 8, 8] x) => (float16[1, 8, 8] y) {
    [a] a = plugins.Rotate(x)  [b] b = plugins.Rotate(a)  [m] c = MatMul(a, b)  [n] d = MatMul(c, b)
    [e] y = plugins.Rotate(d) }"""


@pytest.fixture
def plugin_model(tmp_path: Path) -> Path:
    (tmp_path / "scales.json").write_text(json.dumps(dict.fromkeys("abcd", 2.0)))
    return saved(tmp_path / "plugin.onnx", MODEL)


def exported(plugin_model: Path, **asked: Any) -> tuple[Path, Path]:
    """The plugin_model with everything quantized, and its scheme."""
    given = {"scales": plugin_model.with_name("scales.json"), "min_sqnr_db": "none", **asked}
    with (
        Session(backend="fake", root=plugin_model.parent, no_cache=True) as session,
        session.study(plugin_model, **given) as study,
    ):
        everything = study.space.resolve(study.space.everything())
        return (
            study.export(plugin_model.with_name("tuned.onnx"), everything),
            study.export(plugin_model.with_name("scheme.json"), everything),
        )


@pytest.mark.parametrize(
    ("dq_dtype", "elem_type"), [("float16", TensorProto.FLOAT16), ("float32", TensorProto.FLOAT)]
)
def test_scales_and_outputs_have_the_given_type(plugin_model: Path, dq_dtype: str, elem_type: int) -> None:
    path, scheme = exported(plugin_model, dq_dtype=dq_dtype)
    tuned = load_model(path)
    dequantizers = [node for node in tuned.nodes if node.op_type == "DequantizeLinear"]
    assert len(dequantizers) == 4
    assert {tuned.elem_type(node.outputs[0]) for node in dequantizers} == {elem_type}
    assert {tuned.constants[node.inputs[1]].data_type for node in dequantizers} == {elem_type}
    assert read_scheme(scheme).dq_dtype == dq_dtype
    applied = apply_scheme(load_model(plugin_model), scheme).proto
    assert list(applied.graph.node) == list(tuned.proto.graph.node)


def test_outputs_of_plugins_are_not_quantized_without_a_given_type(plugin_model: Path) -> None:
    path, scheme = exported(plugin_model)
    assert not any(node.op_type == "DequantizeLinear" for node in load_model(path).nodes)
    assert "dq_dtype" not in json.loads(scheme.read_text())
