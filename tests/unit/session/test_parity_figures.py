"""Figures of parity beside the SQNR of outputs, of cases that ONNX Runtime runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from doubling import Doubling

from qdqspec import verify
from qdqspec.accuracy.parity import compare_models
from qdqspec.accuracy.tails import with_tails
from qdqspec.backends.base import BuildOptions
from qdqspec.config import Settings
from qdqspec.preparation.case import CaseSetup
from qdqspec.preparation.resources import Resources
from qdqspec.report.facts import case_tables
from qdqspec.report.record import case_to_json
from qdqspec.session import Session
from qdqspec.spec.kinds import params_of
from qdqspec.types import (
    Case,
    CaseRecord,
    CheckSpec,
    DeviceKey,
    Inputs,
    ParityEvidence,
    QuantizeRules,
    TuneRules,
)


def coverage_case(model: Path, data: Path, **limits: float) -> Case:
    """A case whose selected model has all pairs that its limits allow, without timing."""
    limits = {"min_sqnr_db": 20, **limits}
    params = params_of("parity").model_validate({"kind": "parity", **limits})
    return Case(
        id="default",
        model=model,
        inputs=Inputs(calibration=data),
        quantize=QuantizeRules(outputs=True),
        tune=TuneRules(objective="coverage", trials=3),
        checks=(CheckSpec(id="parity", kind="parity", params=params),),
    )


@pytest.fixture
def heads(tmp_path: Path) -> tuple[Path, Path]:
    """One convolution whose output has four channels of hundreds and two channels below one, and data for it."""
    random = np.random.default_rng(3)
    sizes = np.float32([300] * 4 + [0.3] * 2).reshape(6, 1, 1, 1)
    weight = (random.normal(size=(6, 16, 3, 3)) / 12).astype(np.float32) * sizes
    text = """<ir_version: 9, opset_import: ["": 17]>
        net (float[1,16,16,16] x) => (float[1,6,16,16] y) { y = Conv <pads = [1, 1, 1, 1]> (x, w) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "heads.onnx")
    np.savez(tmp_path / "data.npz", x=random.normal(size=(16, 16, 16, 16)).astype(np.float32))
    return tmp_path / "heads.onnx", tmp_path / "data.npz"


def test_a_case_notes_a_slice_far_below_its_output(heads: tuple[Path, Path], tmp_path: Path) -> None:
    case = coverage_case(*heads)
    with Session(root=tmp_path, backend="onnxruntime") as session:
        assert session.judge(case, case.checks[0]).verdict.outcome == "pass"
        evidence = session.work(case).record.evidence
    assert evidence.parity is not None
    (found,) = evidence.parity.outputs
    assert found.sqnr_db > 30
    worst = found.far_slice()
    assert worst is not None
    assert worst.axis == 1
    assert worst.index in (4, 5)
    (noted,) = [line for line in evidence.warnings if "slice" in line]
    assert f"slice {worst.index} of axis 1" in noted


def test_a_case_with_a_limit_on_slices_fails_without_a_note(heads: tuple[Path, Path], tmp_path: Path) -> None:
    case = coverage_case(*heads, min_slice_sqnr_db=10)
    with Session(root=tmp_path, backend="onnxruntime") as session:
        assert session.judge(case, case.checks[0]).verdict.outcome == "fail"
        warnings = session.work(case).record.evidence.warnings
    assert not any("slice" in line for line in warnings)


def classifier(tail: str, name: str = "logits") -> onnx.ModelProto:
    """A layer of large values with operators at its output."""
    text = f"""<ir_version: 9, opset_import: ["": 17]>
        net (float[N,64] x) => (float[N,10] y) {{ {name} = MatMul(x, w)  {tail} }}"""
    proto = onnx.parser.parse_model(text)
    weight = np.random.default_rng(3).normal(size=(64, 10)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return proto


def rounded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with weights of few digits."""
    (weight,) = (t for t in proto.graph.initializer if t.name == "w")
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array((np.rint(values / 0.05) * np.float32(0.05)), "w"))
    return proto


PAIR = "s = Constant<value_float = 0.5>()  q = QuantizeLinear(logits, s, z)  d = DequantizeLinear(q, s, z)"


def compared(
    folder: Path, given: onnx.ModelProto, tuned: onnx.ModelProto
) -> tuple[ParityEvidence, list[np.ndarray]]:
    onnx.save(given, folder / "given.onnx")
    onnx.save(tuned, folder / "tuned.onnx")
    data = list(np.random.default_rng(4).normal(size=(20, 1, 64)).astype(np.float32))
    np.savez(folder / "data.npz", x=np.concatenate(data))
    found = verify(
        folder / "given.onnx", folder / "tuned.onnx", evaluation=folder / "data.npz", backend="onnxruntime"
    )
    return found, data


def logits_of(proto: onnx.ModelProto, data: list[np.ndarray]) -> np.ndarray:
    weight = next(onnx.numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == "w")
    return np.concatenate(data[:8]) @ weight


def test_the_sqnr_before_a_softmax_is_that_of_its_input(tmp_path: Path) -> None:
    given, tuned = classifier("y = Softmax(logits)"), rounded(classifier("y = Softmax(logits)"))
    found, data = compared(tmp_path, given, tuned)
    (tail,) = found.before_tails
    exact, other = logits_of(given, data), logits_of(tuned, data)
    expected = 10 * np.log10(np.square(exact).sum() / np.square(exact - other).sum())
    assert (tail.output, tail.tensor, tail.operator, tail.samples) == ("y", "logits", "Softmax", 8)
    assert tail.sqnr_db == pytest.approx(expected, abs=0.01)


def test_a_pair_before_the_softmax_is_included(tmp_path: Path) -> None:
    tuned = classifier(f"{PAIR}  y = Softmax(d)")
    tuned.graph.initializer.append(onnx.numpy_helper.from_array(np.int8(0), "z"))
    given = classifier("y = Softmax(logits)")
    found, data = compared(tmp_path, given, tuned)
    exact = logits_of(given, data)
    noise = np.square(exact - np.clip(np.rint(exact / 0.5), -128, 127) * 0.5).sum()
    (tail,) = found.before_tails
    assert tail.sqnr_db == pytest.approx(10 * np.log10(np.square(exact).sum() / noise), abs=0.05)


@pytest.mark.parametrize(
    ("tail", "tuned_tail", "name"),
    [
        ("y = Identity(logits)", "y = Identity(logits)", "logits"),
        ("y = Softmax(logits)", "y = Softmax(renamed)", "renamed"),
        ("y = Softmax(logits)", "e = Exp(logits)  y = Identity(e)", "logits"),
    ],
)
def test_without_a_tensor_to_compare_there_is_no_figure(
    tail: str, tuned_tail: str, name: str, tmp_path: Path
) -> None:
    found, _ = compared(tmp_path, classifier(tail), rounded(classifier(tuned_tail, name)))
    assert len(found.outputs) == 1
    assert found.before_tails == ()


def test_a_case_shows_the_sqnr_before_a_softmax(tmp_path: Path) -> None:
    onnx.save(classifier("y = Softmax(logits)"), tmp_path / "net.onnx")
    random = np.random.default_rng(4)
    np.savez(tmp_path / "data.npz", x=random.normal(size=(32, 64)).astype(np.float32))
    case = coverage_case(tmp_path / "net.onnx", tmp_path / "data.npz", min_sqnr_db=1)
    with Session(root=tmp_path, backend="onnxruntime") as session:
        result = session.judge(case, case.checks[0])
        record = session.work(case).record
    assert record.evidence.parity is not None
    (tail,) = record.evidence.parity.before_tails
    (row,) = [row for row in result.verdict.sections[0].rows if row[0].startswith("- before Softmax")]
    assert row[:2] == (f"- before Softmax '{tail.node}' (8 inputs)", f"{tail.sqnr_db:.1f} dB")
    assert case_to_json(record)["parity"]["before_tails"][0]["tensor"] == "logits"
    assert f"{tail.sqnr_db:.1f} before Softmax '{tail.node}'" in "\n".join(map(str, parity_rows(record)))


def parity_rows(record: CaseRecord) -> list[tuple[str, ...]]:
    """The rows of the table of parity in reports."""
    tables = [
        table for table in case_tables(record.evidence) if table.title.startswith("Parity with the reference")
    ]
    return [row for table in tables for row in table.rows]


def test_the_definition_is_compared_before_a_softmax_if_the_given_model_runs_otherwise(
    tmp_path: Path,
) -> None:
    """The tuned model's logits are doubled too, so that their noise is as large as the defined logits."""
    onnx.save(classifier("y = Softmax(logits)"), tmp_path / "given.onnx")
    onnx.save(rounded(classifier("y = Softmax(logits)")), tmp_path / "tuned.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32))
    case = coverage_case(tmp_path / "given.onnx", tmp_path / "data.npz")
    resources = Resources(
        backend=Doubling(),  # type: ignore[arg-type]  # a backend in this process
        options=BuildOptions(),
        settings=Settings(root=tmp_path),
    )
    setup = CaseSetup(case, resources, DeviceKey(key="here"))
    found = with_tails(setup, tmp_path / "tuned.onnx", compare_models(setup, tmp_path / "tuned.onnx"))
    assert found.definition is not None
    assert not found.definition.holds
    (tail,) = found.before_tails
    assert tail.sqnr_db == pytest.approx(0, abs=0.5)
