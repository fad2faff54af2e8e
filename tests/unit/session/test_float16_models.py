"""Float16 models, which may be tuned as copies in float32, and the float16 form of a model as a reference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_text import saved
from onnx import TensorProto
from sessions import Open

from qdqspec.app.preparation.files import note_float_types
from qdqspec.app.report.record import case_to_json
from qdqspec.app.session import Session
from qdqspec.app.session.study import Study
from qdqspec.backends.onnxruntime.engine import everything
from qdqspec.graph.conversion import computes_in_float16, is_converted, with_integer_kernels
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.scheme_file import apply_scheme, read_scheme, write_scheme
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Case, CaseRecord, Interval, LatencyEvidence, RatioTest, TuneRules
from tests.support.arrays import arrays_of
from tests.support.changed_models import in_float16

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
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    root = tmp_path_factory.mktemp("root")
    with Session(backend="onnxruntime", root=root, no_cache=True) as opened:
        yield opened


def study_of(session: Session, half: Path) -> Study:
    return session.study(half, calibration=half.with_name("data.npz"), min_sqnr_db="none", corrections="none")


@pytest.fixture(scope="module")
def quantized(session: Session, half: Path) -> Path:
    """The model with everything quantized; its scheme is beside it."""
    with study_of(session, half) as study:
        placement = study.space.resolve(study.space.everything())
        study.export(half.with_name("scheme.json"), placement)
        return study.export(half.with_name("tuned.onnx"), placement)


def test_pairs_of_a_float16_model_run_in_integers(half: Path, quantized: Path, tmp_path: Path) -> None:
    optimized = load_model(everything(quantized, tmp_path))
    kernels = {node.op_type for node in optimized.nodes}
    assert kernels & {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QLinearConv", "QLinearMatMul"}
    assert not kernels & {"Conv", "FusedConv", "Gemm", "MatMul"}
    samples = arrays_of(half.with_name("data.npz"))["x"]
    given, tuned = (outputs_of(path, samples) for path in (half, quantized))
    assert given.dtype == tuned.dtype == np.float16
    noise = tuned.astype(np.float64) - given
    assert 10 * np.log10((given.astype(np.float64) ** 2).sum() / (noise**2).sum()) > 20


def outputs_of(path: Path, samples: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"x": sample[None]})[0] for sample in samples])


def test_the_tuned_model_keeps_the_float16_inputs_and_outputs(half: Path, quantized: Path) -> None:
    onnx.checker.check_model(str(quantized), full_check=True)
    tuned, given = load_model(quantized), load_model(half)
    assert list(tuned.proto.graph.input) == list(given.proto.graph.input)
    assert list(tuned.proto.graph.output) == list(given.proto.graph.output)
    assert is_converted(tuned)
    assert not computes_in_float16(tuned)
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
    assert json.loads(scheme.read_text())["converted_from"] == read_scheme(scheme).converted_from == "float16"
    applied = apply_scheme(given, scheme)
    assert applied.proto == tuned.proto
    assert "converted from float16 to float32, as tuning does" in applied.notes
    found = diff_models(given, tuned)
    assert (bool(found.added), found.removed) == (True, ())
    assert (found.skeleton.differs, found.skeleton.converted) == (False, True)
    for original in (given, None):
        imported = import_placement(tuned, original)
        write_scheme(
            half.with_name("imported.json"),
            imported.placement,
            imported.pairs,
            "imported",
            imported.positions,
            factors=imported.equalized,
            is_converted=imported.is_converted,
        )
        assert diff_models(tuned, Model(apply_scheme(given, half.with_name("imported.json")).proto)).same


def test_the_result_compares_all_with_the_float16_model(session: Session, half: Path) -> None:
    rules = TuneRules(trials=4, preset="quick")
    evidence = session.evidence(Case(id="default", model=half, tune=rules), frozenset({"latency", "parity"}))
    assert {"reference", "tuned", "float32"} <= evidence.latency.samples.keys()
    assert evidence.search.converted_from == "float16"
    assert "converted to float32 without pairs it takes" in evidence.search.reason
    assert evidence.parity.sqnr_db >= 20
    recorded = case_to_json(CaseRecord(evidence=evidence))
    assert "float32" in {other["role"] for other in recorded["others"]}
    assert any("pairs are inserted into a copy in float32" in warning for warning in evidence.warnings)
    output = evidence.output
    assert output is not None
    assert is_converted(load_model(output / "float32.onnx"))
    assert (output / "reference.onnx").read_bytes() == half.read_bytes()
    tuned = load_model(output / "tuned.onnx")
    assert computes_in_float16(tuned) == evidence.search.unchanged
    assert "float32," in (output / "layers.csv").read_text()
    applied = apply_scheme(load_model(half), output / "scheme.json").proto
    assert is_converted(Model(applied)) != evidence.search.unchanged


def test_float16_models_stay_on_a_backend_with_kernels_for_them(tmp_path: Path, half: Path) -> None:
    with (
        Session(backend="fake", root=tmp_path, no_cache=True) as session,
        session.study(half, min_sqnr_db="none") as study,
    ):
        placement = study.space.resolve(study.space.everything())
        path = study.export(tmp_path / "tuned.onnx", placement)
        assert not [warning for warning in study.warnings if "float16" in warning]
    assert computes_in_float16(load_model(path))


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
    assert with_integer_kernels(model, quantizes_half=True) == (model, "")


# ---- the float16 form of a float32 model as another reference -----------------------------------------

EVIDENCE = frozenset({"latency", "parity"})


@pytest.fixture
def model(project: Path) -> Path:
    return project / "chain.onnx"


def case_of(model: Path, **rules: bool) -> Case:
    return Case(id="default", model=model, tune=TuneRules(trials=4, **rules))


@pytest.mark.parametrize(
    ("computes", "asked", "timed"),
    [(False, True, True), (True, None, True), (True, False, False), (False, None, False)],
)
def test_the_float16_reference_is_timed_on_request_or_if_the_backend_computes_in_float16(
    open_session: Open,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    computes: bool,
    asked: bool | None,
    timed: bool,
) -> None:
    session = open_session()
    known = session.runtime().backend.capabilities(session.runtime().options)
    able = replace(known, computes_in_half=computes)
    monkeypatch.setattr(session.runtime().backend, "capabilities", lambda *_: able)
    evidence = session.evidence(case_of(model, **({} if asked is None else {"float16": asked})), EVIDENCE)
    assert ("float16" in evidence.latency.samples) == timed
    recorded = case_to_json(CaseRecord(evidence=evidence))
    assert ("float16" in {other["role"] for other in recorded["others"]}) == timed
    notes = [warning for warning in evidence.warnings if "few float16 kernels" in warning]
    assert len(notes) == (timed and not computes)
