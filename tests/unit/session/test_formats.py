"""Number formats of a session: unsupported and mixed ones, types of plugin outputs, lint, and models in float16."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx_text import outputs_of, saved
from sessions import Open
from written_cases import check_of, normal

from qdqspec.app.evidence.timing import note_float_types
from qdqspec.app.report.record import case_to_json
from qdqspec.app.session import Session
from qdqspec.app.session.study import Study
from qdqspec.backends.onnxruntime.engine import OnnxRuntime, everything
from qdqspec.graph.conversion import with_integer_kernels
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import (
    Case,
    CaseRecord,
    Inputs,
    Interval,
    LatencyEvidence,
    QuantizeRules,
    RatioTest,
    TuneRules,
)
from tests.support.arrays import arrays_of
from tests.support.changed_models import in_float16


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
    static = replace(case, id="static", checks=(check_of("lint", target="onnxruntime-cpu", load=False),))
    session.judge(static, static.checks[0])
    note = "static rules only, not loaded: not asked for"
    assert session.record().cases[1].evidence.lint_loads == {"onnxruntime-cpu": note}


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


PLUGINS = """g (float16[1, 8, 8] x) => (float16[1, 8, 8] y) {
    [a] a = plugins.Rotate(x)  [b] b = plugins.Rotate(a)  [m] c = MatMul(a, b)  [n] d = MatMul(c, b)
    [e] y = plugins.Rotate(d) }"""


def exported(session: Session, folder: Path, **asked: Any) -> tuple[Path, Path, Path]:
    """The model, the same with everything quantized, and the scheme of that."""
    model, scales = saved(folder / "plugin.onnx", PLUGINS), folder / "scales.json"
    scales.write_text(json.dumps(dict.fromkeys("abcd", 2.0)))
    with session.study(model, scales=scales, min_sqnr_db="none", **asked) as study:
        everything = study.space.resolve(study.space.everything())
        files = (study.export(folder / name, everything) for name in ("tuned.onnx", "scheme.json"))
        return model, *files


@pytest.mark.parametrize(
    ("dq_dtype", "elem_type"), [("float16", TensorProto.FLOAT16), ("float32", TensorProto.FLOAT)]
)
def test_scales_and_outputs_have_the_given_type(
    session: Session, tmp_path: Path, dq_dtype: str, elem_type: int
) -> None:
    model, path, scheme = exported(session, tmp_path, dq_dtype=dq_dtype)
    tuned = load_model(path)
    dequantizers = [node for node in tuned.nodes if node.op_type == "DequantizeLinear"]
    assert len(dequantizers) == 4
    assert {tuned.elem_type(node.outputs[0]) for node in dequantizers} == {elem_type}
    assert {tuned.constants[node.inputs[1]].data_type for node in dequantizers} == {elem_type}
    assert SchemeFile.read(scheme).dq_dtype == dq_dtype
    applied = SchemeFile.read(scheme).apply(load_model(model)).proto
    assert list(applied.graph.node) == list(tuned.proto.graph.node)


def test_outputs_of_plugins_are_not_quantized_without_a_given_type(session: Session, tmp_path: Path) -> None:
    _, path, scheme = exported(session, tmp_path)
    assert not any(node.op_type == "DequantizeLinear" for node in load_model(path).nodes)
    assert SchemeFile.read(scheme).dq_dtype is None


# ---- float16 models, which may be tuned as copies in float32 --------------------------------------

MODELS = {
    "convolutions": """g (float[1,16,16,16] x) => (float[1,16] y) {
        c = Conv<pads = [1, 1, 1, 1]>(x, v)  n = BatchNormalization(c, one, zero, zero, one)  r = Relu(n)
        d = Conv<pads = [1, 1, 1, 1]>(r, w)  s = Add(r, d)  t = Relu(s)  p = GlobalAveragePool(t)
        f = Flatten(p)  y = Gemm(f, m, zero) }""",
    "products": """g (float[1,16,64] x) => (float[1,16,64] y) {
        a = MatMul(x, k)  b = Relu(a)  e = MatMul(b, l)  y = Add(e, x) }""",
}
SHAPES = {"v": (16, 16, 3, 3), "w": (16, 16, 3, 3), "m": (16, 16), "k": (64, 256), "l": (256, 64)}


@pytest.fixture(scope="module", params=MODELS)
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a float16 model, whose nodes have no names."""
    text, folder = MODELS[request.param], tmp_path_factory.mktemp("half")
    random = np.random.default_rng(0)
    values = {name: random.normal(size=shape) / np.sqrt(np.prod(shape[1:])) for name, shape in SHAPES.items()}
    values |= {"one": np.ones(16), "zero": np.zeros(16)}
    read = {n: value.astype(np.float32) for n, value in values.items() if re.search(rf"\b{n}\b", text)}
    proto = onnx.load(saved(folder / "half.onnx", text, opset=17, ir_version=8, **read))
    onnx.save(in_float16(proto), folder / "half.onnx")
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    np.savez(folder / "data.npz", x=random.normal(size=(8, *shape[1:])).astype(np.float16))
    return folder / "half.onnx"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    root = tmp_path_factory.mktemp("root")
    with Session(backend="onnxruntime", root=root, no_cache=True) as opened:
        yield opened


def study_of(shared: Session, half: Path) -> Study:
    return shared.study(half, calibration=half.with_name("data.npz"), min_sqnr_db="none", corrections="none")


@pytest.fixture(scope="module")
def quantized(shared: Session, half: Path) -> Path:
    """The model with everything quantized; its scheme is beside it."""
    with study_of(shared, half) as study:
        placement = study.space.resolve(study.space.everything())
        study.export(half.with_name("scheme.json"), placement)
        return study.export(half.with_name("tuned.onnx"), placement)


def test_pairs_of_a_float16_model_run_in_integers(half: Path, quantized: Path, tmp_path: Path) -> None:
    optimized = load_model(everything(quantized, tmp_path))
    kernels = {node.op_type for node in optimized.nodes}
    assert kernels & {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QLinearConv", "QLinearMatMul"}
    assert not kernels & {"Conv", "FusedConv", "Gemm", "MatMul"}
    samples = arrays_of(half.with_name("data.npz"))["x"]
    given, tuned = (
        np.concatenate([outputs_of(path, {"x": sample[None]}, "ENABLE_ALL")[0] for sample in samples])
        for path in (half, quantized)
    )
    assert given.dtype == tuned.dtype == np.float16
    noise = tuned.astype(np.float64) - given
    assert 10 * np.log10((given.astype(np.float64) ** 2).sum() / (noise**2).sum()) > 20


def test_the_tuned_model_keeps_the_float16_inputs_and_outputs(half: Path, quantized: Path) -> None:
    onnx.checker.check_model(str(quantized), full_check=True)
    tuned, given = load_model(quantized), load_model(half)
    assert list(tuned.proto.graph.input) == list(given.proto.graph.input)
    assert list(tuned.proto.graph.output) == list(given.proto.graph.output)
    assert tuned.converted_from
    assert not tuned.float16_nodes
    pairs = [node for node in tuned.nodes if node.op_type == "DequantizeLinear"]
    assert pairs
    assert {tuned.elem_type(node.outputs[0]) for node in pairs} == {TensorProto.FLOAT}


def test_strip_restores_the_float16_model_or_gives_a_float32_one(half: Path, quantized: Path) -> None:
    given = load_model(half)
    stripped = strip_qdq(load_model(quantized), given)
    assert stripped.proto == given.proto
    assert "with the float16 tensors of the reference" in stripped.notes
    alone = strip_qdq(load_model(quantized)).proto
    onnx.checker.check_model(alone, full_check=True)
    assert {tensor.data_type for tensor in alone.graph.initializer} == {TensorProto.FLOAT}


def test_own_and_imported_schemes_apply_to_the_float16_model(half: Path, quantized: Path) -> None:
    scheme = quantized.with_name("scheme.json")
    tuned, given = load_model(quantized), load_model(half)
    assert (
        json.loads(scheme.read_text())["converted_from"]
        == SchemeFile.read(scheme).converted_from
        == "float16"
    )
    applied = SchemeFile.read(scheme).apply(given)
    assert applied.proto == tuned.proto
    assert "converted from float16 to float32, as tuning does" in applied.notes
    found = diff_models(given, tuned)
    assert (bool(found.added), found.removed) == (True, ())
    assert (found.skeleton.differs, found.skeleton.converted) == (False, True)
    for original in (given, None):
        own, path = import_placement(tuned, original), half.with_name("imported.json")
        own.write(path)
        assert diff_models(tuned, Model(SchemeFile.read(path).apply(given).proto)).same


def test_the_result_compares_all_with_the_float16_model(shared: Session, half: Path) -> None:
    rules = TuneRules(trials=4, preset="quick")
    evidence = shared.evidence(Case(id="default", model=half, tune=rules), frozenset({"latency", "parity"}))
    assert {"reference", "tuned", "float32"} <= evidence.latency.samples.keys()
    assert evidence.search.converted_from == "float16"
    assert "converted to float32 without pairs it takes" in evidence.search.reason
    assert evidence.parity.sqnr_db >= 20
    recorded = case_to_json(CaseRecord(evidence=evidence))
    assert "float32" in {other["role"] for other in recorded["others"]}
    assert any("pairs are inserted into a copy in float32" in warning for warning in evidence.warnings)
    output = evidence.output
    assert load_model(output / "float32.onnx").converted_from
    assert (output / "reference.onnx").read_bytes() == half.read_bytes()
    tuned = load_model(output / "tuned.onnx")
    assert bool(tuned.float16_nodes) == evidence.search.unchanged
    assert "float32," in (output / "layers.csv").read_text()
    applied = SchemeFile.read(output / "scheme.json").apply(load_model(half)).proto
    assert bool(Model(applied).converted_from) != evidence.search.unchanged


def test_float16_models_stay_on_a_backend_with_kernels_for_them(
    open_session: Open, tmp_path: Path, half: Path
) -> None:
    with open_session().study(half, min_sqnr_db="none") as study:
        placement = study.space.resolve(study.space.everything())
        path = study.export(tmp_path / "tuned.onnx", placement)
        assert not [warning for warning in study.warnings if "float16" in warning]
    assert load_model(path).float16_nodes


@pytest.mark.parametrize(("plain", "tuned", "warns"), [(0.7, 1, True), (0.7, 0.5, False), (1.1, 1, False)])
def test_a_fastest_float32_copy_is_reported_with_its_file(plain: float, tuned: float, warns: bool) -> None:
    def tested(median: float) -> RatioTest:
        reach = Interval(median=median, low=median - 0.01, high=median + 0.01)
        return RatioTest(mean=reach, enclosing=reach)

    notes: list[str] = []
    one = Interval(median=1, low=1, high=1)
    ratios = {"float32": tested(plain), "tuned": tested(tuned)}
    latency = LatencyEvidence(clock="cpu", samples={}, ratios={}, tested=ratios, speedup=one, builds=1)
    note_float_types(SimpleNamespace(note_once=notes.append), latency)
    assert ["0.70 of the reference" in note and "float32.onnx" in note for note in notes] == [True] * warns


def test_an_operator_of_a_plugin_is_named_if_it_prevents_the_conversion(tmp_path: Path) -> None:
    text = "g (float16[2, 4] x) => (float16[2, 4] y) { [turn] a = plugins.Rotate(x)  y = Relu(a) }"
    model = load_model(saved(tmp_path / "plugin.onnx", text))
    base, note = with_integer_kernels(model, quantizes_half=False)
    assert base is model
    assert "it cannot be converted to float32: node 'turn' of operator plugins:Rotate" in note


# ---- the float16 form of a float32 model as another reference -----------------------------------------


@pytest.mark.parametrize(
    ("computes", "asked", "timed"),
    [(False, True, True), (True, None, True), (True, False, False), (False, None, False)],
)
def test_the_float16_reference_is_timed_on_request_or_if_the_backend_computes_in_float16(
    open_session: Open, case: Case, monkeypatch: pytest.MonkeyPatch, computes: bool, asked: Any, timed: bool
) -> None:
    session = open_session()
    backend = session.runtime().backend
    able = replace(backend.capabilities(session.runtime().options), computes_in_half=computes)
    monkeypatch.setattr(backend, "capabilities", lambda *_: able)
    case = replace(case, tune=TuneRules(trials=4, float16=asked))
    evidence = session.evidence(case, frozenset({"latency"}))
    assert ("float16" in evidence.latency.samples) == timed
    recorded = case_to_json(CaseRecord(evidence=evidence))
    assert ("float16" in {other["role"] for other in recorded["others"]}) == timed
    notes = [warning for warning in evidence.warnings if "few float16 kernels" in warning]
    assert len(notes) == (timed and not computes)
