"""Objectives other than latency: coverage, without timing, and the models of a Pareto front or of regions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from sessions import Open, contents
from written_cases import check_of, digits_case, normal, written_case

from qdqspec.app.report.charts import layers_chart, search_chart
from qdqspec.app.report.write import write_results
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.errors import BackendError, ConfigError, StateError
from qdqspec.graph.model import load_model
from qdqspec.types import Case, Evidence, LayerTime, QuantizeRules, TuneRules

CHECKS = (
    check_of("speedup", min=1.1),
    check_of("latency", max_ms=100.0),
    check_of("regression", max=0.05),
    check_of("parity", min_sqnr_db=20),
)


@pytest.fixture
def covered(models: Path, tmp_path: Path) -> Case:
    return digits_case(models, tmp_path, 16, tune=TuneRules(objective="coverage"), checks=CHECKS)


def evidence_of(session: Session, case: Case) -> Evidence:
    for each in case.checks:
        session.judge(case, each)
    (record,) = session.record().cases
    return record.evidence


def test_a_placement_selected_by_coverage_has_no_time_anywhere(session: Session, covered: Case) -> None:
    found = evidence_of(session, covered)
    assert found.status == "untimed"
    assert found.latency is None
    assert found.search.coverage.quantized > 0.5 * found.search.coverage.multiplications
    assert found.parity.sqnr_db >= 20
    write_results(session.record())
    record = json.loads((session.output(covered) / "result.json").read_text(encoding="utf-8"))
    assert record["status"] == "untimed"
    assert record["speedup"] is record["latency"] is record["tuned"] is record["reference"] is None
    assert record["provenance"]["source"] == "untimed"
    assert record["search"]["coverage"]["quantized"] == found.search.coverage.quantized
    assert all(trial.ratio is None and not trial.samples.wall_ms for trial in found.search.trials)
    assert not any(layer.milliseconds for trial in found.search.trials for layer in trial.layers)
    assert search_chart(found.search) == layers_chart(found.graph) == ""
    verdicts = {each.kind: session.judge(covered, each).verdict for each in covered.checks}
    assert verdicts.pop("parity").outcome == "pass"
    assert {verdict.outcome for verdict in verdicts.values()} == {"inconclusive"}
    assert all("selected by coverage, not timed" in verdict.headline for verdict in verdicts.values())


def test_a_known_placement_is_read_from_the_cache_and_timed_in_mode_measure(
    session: Session, covered: Case, tmp_path: Path
) -> None:
    result = session.tune(covered)
    assert repr(result).startswith("Result(untimed: ")
    with pytest.raises(StateError, match="selected by its coverage"):
        _ = result.latency
    winner = result.search.winner
    tuned = onnx.load(session.output(covered) / "tuned.onnx")
    assert sum(node.op_type == "QuantizeLinear" for node in tuned.graph.node) >= winner.pairs
    with Session(root=tmp_path) as again:
        known = evidence_of(again, covered)
    assert known.search.winner == winner
    assert known.search.provenance.source == "cached"
    assert known.status == "untimed"
    with Session(root=tmp_path, mode="measure") as measuring:
        timed = evidence_of(measuring, covered)
    assert timed.status == "tuned"
    assert timed.latency.samples["tuned"].wall_ms
    assert timed.search.winner == winner


def test_no_accurate_placement_leaves_the_model_unchanged(session: Session, covered: Case) -> None:
    strict = replace(covered, tune=TuneRules(objective="coverage", min_sqnr_db=150.0))
    found = evidence_of(session, strict)
    assert found.status == "unchanged"
    assert "no placement with an SQNR of at least 150 dB" in found.reason


def test_coverage_counts_operators_behind_tensors_whose_shapes_only_a_run_shows(
    session: Session, tmp_path: Path
) -> None:
    text = """g (float[n,64,32] x) => (float[n,64,16] y) { a = MatMul(x, w)  b = com.microsoft.QuickGelu(a)
        c = Einsum<equation = "bij,jk->bik">(b, w)  y = MatMul(c, v) }"""
    rules = TuneRules(objective="coverage", trials=3)
    weights = {"w": normal(32, 32, deviation=0.2), "v": normal(32, 16, deviation=0.2)}
    case = written_case(tmp_path, text, {"x": normal(8, 64, 32)}, rules, **weights)
    found = session.tune(case).search.coverage
    products, einsum = 64 * 32 * (32 + 16), 64 * 32 * 32
    assert (found.quantized, found.multiplications) == (products, products + einsum)


# ---- a compiler, which runs and times nothing ------------------------------------------------------


@pytest.fixture
def clockless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Session]:
    able = replace(FakeDevice().capabilities(), runs=False, has_clock=False)
    monkeypatch.setattr(FakeDevice, "capabilities", lambda *_: able)
    with Session(backend="fake", root=tmp_path) as opened:
        yield opened


def compute_in_float(monkeypatch: pytest.MonkeyPatch, which: Callable[[LayerTime], bool]) -> None:
    """Make these kernels of the simulated device float ones."""
    own = FakeEngine.layers

    def layers(self: FakeEngine, runs: int, profile: int = 0) -> tuple[LayerTime, ...]:
        found = own(self, runs, profile)
        return tuple(replace(each, integer=each.integer and not which(each)) for each in found)

    monkeypatch.setattr(FakeEngine, "layers", layers)


def test_a_unit_whose_kernel_is_float_is_not_counted(
    clockless: Session, covered: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activations of format int8 are of type uint8 here, as on CPUs and NPUs."""
    left = "/layer2/layer2.0/conv1/Conv"
    compute_in_float(monkeypatch, lambda layer: left in layer.nodes)
    evidence = evidence_of(clockless, replace(covered, tune=TuneRules()))
    found = evidence.search.coverage
    assert list(found.refused) == [left]
    assert found.quantized < found.multiplications
    assert evidence.parity.computed_by == "onnxruntime"
    assert evidence.parity.sqnr_db >= 20


def test_a_format_that_no_runtime_here_has_is_covered_by_the_reference_implementation(
    clockless: Session, tmp_path: Path
) -> None:
    text, rules = "g (float[4,32] x) => (float[4,16] y) { y = MatMul(x, w) }", TuneRules(min_sqnr_db=10.0)
    case = written_case(tmp_path, text, {"x": normal(32, 4, 32)}, rules, w=normal(32, 16, deviation=0.2))
    checks = (check_of("parity", min_sqnr_db=10.0),)
    found = evidence_of(clockless, replace(case, quantize=QuantizeRules(format="nvfp4"), checks=checks))
    assert found.search.coverage.quantized == found.search.coverage.multiplications == 4 * 32 * 16
    assert 10 < found.parity.sqnr_db < 30
    assert found.parity.computed_by == "onnxruntime and ONNX's reference implementation"
    odd = written_case(tmp_path, text.replace("32", "24"), {"x": normal(8, 4, 24)}, rules, w=normal(24, 16))
    reason = clockless.tune(replace(odd, quantize=QuantizeRules(format="int4"))).reason
    assert "the backend quantizes none of its operators to int4" in reason


@pytest.fixture
def given(covered: Case) -> Case:
    """A quantized model, and one build for it."""
    path = Path(__file__).parents[2] / "data" / "qdq_nncf_digits_resnet.onnx"
    return replace(covered, model=path, tune=TuneRules(trials=1, min_sqnr_db=None))


@pytest.mark.parametrize("is_float", [False, True], ids=["integer kernels", "float kernels"])
def test_a_model_given_quantized_is_judged_as_it_is_with_one_build(
    clockless: Session, given: Case, monkeypatch: pytest.MonkeyPatch, *, is_float: bool
) -> None:
    if is_float:
        compute_in_float(monkeypatch, lambda _: True)
    found = evidence_of(clockless, given)
    assert found.search.winner.given
    whole = found.search.coverage.multiplications
    assert found.search.coverage.quantized == 0 if is_float else 0 < found.search.coverage.quantized < whole
    share = found.search.coverage.quantized / whole
    assert found.reason.startswith(f"the given model's own placement: {share:.1%}".replace("%", " %"))
    assert found.parity.sqnr_db < 100
    tuned = load_model(clockless.output(given) / "tuned.onnx")
    assert [node.outputs for node in tuned.nodes] == [node.outputs for node in load_model(given.model).nodes]


def test_a_model_that_neither_runtime_runs_is_refused_with_the_reason(
    clockless: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = replace(FakeDevice().capabilities(), observes=False)
    monkeypatch.setattr(FakeDevice, "capabilities", lambda *_: able)
    text = """g (float[4,32] x) => (float[4,16] y) {
        b = Cast<to = 16>(x)  v = Cast<to = 16>(w)  c = MatMul(b, v)  y = Cast<to = 1>(c) }"""
    case = written_case(tmp_path, text, {"x": normal(32, 4, 32)}, w=normal(32, 16))
    with pytest.raises(
        BackendError, match=r"onnxruntime cannot run it .*MatMul.* and fake runs nothing"
    ) as caught:
        clockless.tune(case)
    assert "convert the model to float32" in str(caught.value.cure)


@pytest.mark.parametrize("trials", [1, 3])
def test_a_model_given_quantized_that_does_not_build_is_not_replaced_unsaid(
    clockless: Session, given: Case, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(given, tune=replace(given.tune, trials=trials))
    build = FakeDevice.build

    def refuse(device: FakeDevice, model: Path, options: BuildOptions) -> FakeEngine:
        if sum(node.op_type == "QuantizeLinear" for node in load_model(model).nodes) > 15:
            raise BackendError("asymmetric")
        return build(device, model, options)

    monkeypatch.setattr(FakeDevice, "build", refuse)
    if trials == 1:
        with pytest.raises(BackendError, match=r"does not build as it is given quantized: .*asymmetric"):
            clockless.tune(given)
    else:
        reason = clockless.tune(given).reason
        assert "the given model's own placement does not build: " in reason
        assert "asymmetric" in reason


@pytest.mark.parametrize("objective", ["latency", "pareto"])
def test_objectives_of_times_and_studies_need_a_clock(
    clockless: Session, covered: Case, objective: Any
) -> None:
    with pytest.raises(ConfigError, match=f"objective '{objective}' needs times") as caught:
        clockless.search(replace(covered, tune=TuneRules(objective=objective)))
    assert "coverage" in str(caught.value.cure)
    with pytest.raises(ConfigError, match="a study times its candidates"):
        clockless.study(covered)


# ---- the folders ``front/`` (two objectives) and ``regions/`` (strategy `region`) -----------------


@pytest.fixture
def case(case: Case) -> Case:
    return replace(case, tune=TuneRules(trials=12, objective="pareto"))


def test_a_front_is_written_as_models_and_a_table(open_session: Open, case: Case, tmp_path: Path) -> None:
    session = open_session()
    result = session.tune(case)
    front = result.search.front
    assert len(front) > 1
    names = {f"{number}.onnx" for number in range(1, len(front) + 1)}
    written = contents(session.output(case) / "front")
    assert set(written) == {*names, "front.csv"}
    assert contents(result.save(tmp_path / "saved") / "front") == written
    again = open_session(output=tmp_path / "elsewhere")
    assert again.search(case).provenance.source == "cached"
    assert contents(again.output(case) / "front") == written


def test_a_search_removes_the_front_of_an_earlier_one(open_session: Open, case: Case) -> None:
    session = open_session()
    session.search(case)
    front = session.output(case) / "front"
    longer = {"9.onnx": b"of yesterday", "9.onnx.data": b"its weights"}
    mine = {"notes.txt": b"of the user", "10.onnx": b"another model", "../beside.onnx": b"not in it"}
    for name, content in (longer | mine).items():
        (front / name).write_bytes(content)
    with (front / "front.csv").open("a") as table:
        table.write("9.onnx,b7c1,3,0.9,0.8,1.0,31.0,\n../beside.onnx,b7c1,3,0.9,0.8,1.0,31.0,\n")
    alone = replace(case, tune=replace(case.tune, objective="latency"))
    open_session().search(alone)
    assert contents(session.output(case) / "front") == {
        "notes.txt": b"of the user",
        "10.onnx": b"another model",
    }
    assert (session.output(case) / "beside.onnx").exists()


def test_removing_a_front_keeps_the_input_model(open_session: Open, case: Case) -> None:
    session = open_session()
    session.search(case)
    model = session.output(case) / "front" / "2.onnx"
    again = replace(case, model=model, tune=TuneRules(trials=2))
    open_session(output=session.output(case), layout="").search(again)
    assert set(contents(session.output(case) / "front")) == {"2.onnx"}


def test_models_of_regions_are_written_on_request(open_session: Open, case: Case, tmp_path: Path) -> None:
    rules = TuneRules(trials=8, strategy="region", min_sqnr_db="none")
    session = open_session()
    session.search(replace(case, tune=rules))
    assert not (session.output(case) / "regions").exists()
    asked = replace(case, tune=replace(rules, region_models=True))
    open_session().search(asked)
    folder = session.output(case) / "regions"
    rows = list(csv.DictReader((folder / "regions.csv").read_text().splitlines()))
    assert {path.name for path in folder.iterdir()} == {"regions.csv", *(row["file"] for row in rows)}
    assert [row["pattern"] for row in rows] == list(dict.fromkeys(row["pattern"] for row in rows))
    again = open_session(output=tmp_path / "elsewhere")
    assert again.search(asked).provenance.source == "cached"
    assert contents(again.output(case) / "regions") == contents(session.output(case) / "regions")
    open_session().search(case)
    assert not folder.exists(), "a model of an earlier search"
