"""Objective coverage in a session: what is selected, kept, reported and judged when nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from written_cases import check_of, digits_case

from qdqspec.app.report.charts import layers_chart, search_chart
from qdqspec.app.report.write import write_results
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions, Capabilities
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.errors import ConfigError, StateError
from qdqspec.graph.model import load_model
from qdqspec.types import Case, Evidence, LayerTime, TuneRules

CHECKS = (
    check_of("speedup", min=1.1),
    check_of("latency", max_ms=100.0),
    check_of("regression", max=0.05),
    check_of("parity", min_sqnr_db=20),
)


@pytest.fixture
def case(models: Path, tmp_path: Path) -> Case:
    return digits_case(models, tmp_path, 16, tune=TuneRules(objective="coverage"), checks=CHECKS)


def evidence_of(session: Session, case: Case) -> Evidence:
    for each in case.checks:
        session.judge(case, each)
    (record,) = session.record().cases
    return record.evidence


def result_json(session: Session, case: Case) -> dict[str, Any]:
    write_results(session.record())
    found: dict[str, Any] = json.loads((session.output(case) / "result.json").read_text(encoding="utf-8"))
    return found


def test_a_placement_selected_by_coverage_has_no_time_anywhere(session: Session, case: Case) -> None:
    found = evidence_of(session, case)
    assert found.status == "untimed"
    assert found.latency is None
    assert found.search.coverage.quantized > 0.5 * found.search.coverage.multiplications
    assert found.parity.sqnr_db >= 20
    record = result_json(session, case)
    assert record["status"] == "untimed"
    assert record["speedup"] is record["latency"] is record["tuned"] is record["reference"] is None
    assert record["provenance"]["source"] == "untimed"
    assert record["search"]["coverage"]["quantized"] == found.search.coverage.quantized
    assert all(trial.ratio is None and not trial.samples.wall_ms for trial in found.search.trials)
    assert not any(layer.milliseconds for trial in found.search.trials for layer in trial.layers)
    assert search_chart(found.search) == layers_chart(found.graph) == ""
    verdicts = {each.kind: session.judge(case, each).verdict for each in case.checks}
    assert verdicts.pop("parity").outcome == "pass"
    assert {verdict.outcome for verdict in verdicts.values()} == {"inconclusive"}
    assert all("selected by coverage, not timed" in verdict.headline for verdict in verdicts.values())


def test_a_known_placement_is_read_from_the_cache_and_timed_in_mode_measure(
    session: Session, case: Case, tmp_path: Path
) -> None:
    result = session.tune(case)
    assert repr(result).startswith("Result(untimed: ")
    with pytest.raises(StateError, match="selected by its coverage"):
        _ = result.latency
    winner = result.search.winner
    tuned = onnx.load(session.output(case) / "tuned.onnx")
    assert sum(node.op_type == "QuantizeLinear" for node in tuned.graph.node) >= winner.pairs
    with Session(root=tmp_path) as again:
        known = evidence_of(again, case)
    assert known.search.winner == winner
    assert known.search.provenance.source == "cached"
    assert known.status == "untimed"
    with Session(root=tmp_path, mode="measure") as measuring:
        timed = evidence_of(measuring, case)
    assert timed.status == "tuned"
    assert timed.latency.samples["tuned"].wall_ms
    assert timed.search.winner == winner


def test_no_accurate_placement_leaves_the_model_unchanged(session: Session, case: Case) -> None:
    strict = replace(case, tune=TuneRules(objective="coverage", min_sqnr_db=150.0))
    found = evidence_of(session, strict)
    assert found.status == "unchanged"
    assert "no placement with an SQNR of at least 150 dB" in found.reason


# ---- a compiler, which runs and times nothing ------------------------------------------------------


@pytest.fixture
def clockless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Session]:
    own = FakeDevice.capabilities

    def capabilities(self: FakeDevice, options: BuildOptions | None = None) -> Capabilities:
        del options
        return replace(own(self), runs=False, has_clock=False)

    monkeypatch.setattr(FakeDevice, "capabilities", capabilities)
    with Session(backend="fake", root=tmp_path) as opened:
        yield opened


def test_a_unit_whose_kernel_is_float_is_not_counted(
    clockless: Session, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activations of format int8 are of type uint8 here, as on CPUs and NPUs."""
    own, left = FakeEngine.layers, "/layer2/layer2.0/conv1/Conv"

    def layers(self: FakeEngine, runs: int, profile: int = 0) -> tuple[LayerTime, ...]:
        return tuple(
            replace(each, integer=each.integer and left not in each.nodes)
            for each in own(self, runs, profile)
        )

    monkeypatch.setattr(FakeEngine, "layers", layers)
    evidence = evidence_of(clockless, replace(case, tune=TuneRules()))
    found = evidence.search.coverage
    assert list(found.refused) == [left]
    assert found.quantized < found.multiplications
    assert evidence.parity.computed_by == "onnxruntime"
    assert evidence.parity.sqnr_db >= 20


def test_a_model_given_quantized_is_judged_as_it_is_with_one_build(clockless: Session, case: Case) -> None:
    path = Path(__file__).parents[2] / "data" / "qdq_nncf_digits_resnet.onnx"
    given = replace(case, model=path, tune=TuneRules(trials=1, min_sqnr_db=None))
    found = evidence_of(clockless, given)
    assert found.search.winner.given
    assert "the given model's own placement" in found.reason
    assert 0 < found.search.coverage.quantized < found.search.coverage.multiplications
    tuned = load_model(clockless.output(given) / "tuned.onnx")
    assert [node.outputs for node in tuned.nodes] == [node.outputs for node in load_model(path).nodes]


@pytest.mark.parametrize("objective", ["latency", "pareto"])
def test_an_objective_of_times_needs_a_clock(clockless: Session, case: Case, objective: Any) -> None:
    with pytest.raises(ConfigError, match=f"objective '{objective}' needs times") as caught:
        clockless.search(replace(case, tune=TuneRules(objective=objective)))
    assert "coverage" in str(caught.value.cure)


def test_a_study_needs_a_clock(session: Session, case: Case) -> None:
    with pytest.raises(ConfigError, match="a study times its candidates"):
        session.study(case)
