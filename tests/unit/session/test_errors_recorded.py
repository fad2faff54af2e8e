"""A check that raises an error is in the record, and unusable data is found before a search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from chains import chain_model
from sessions import Open
from written_cases import check_of, normal

from qdqspec.app.report.record import record_from_json, record_to_json
from qdqspec.app.report.tables import summary_table
from qdqspec.app.report.write import write_results
from qdqspec.app.session import Session
from qdqspec.errors import DataError, QdqspecError
from qdqspec.types import Case, Inputs, RunRecord, TuneRules


@pytest.fixture
def case(case: Case, project: Path) -> Case:
    """A model with four evaluation samples, and a check of accuracy beside one of size."""
    np.savez(project / "data.npz", x=normal(4, 8, 12, 12), labels=np.full(4, 7_000_000))
    return replace(
        case,
        spec=project / "a.qdq.yaml",
        inputs=Inputs(calibration=project / "data.npz", evaluation=project / "data.npz"),
        tune=TuneRules(trials=2),
        checks=(check_of("size", max_ratio=2.0), check_of("accuracy", metric="mine", min=0.0)),
    )


class Fails:
    """A metric that raises from its ``first`` call on."""

    def __init__(self, first: int) -> None:
        self.left = first - 1

    def __call__(self, outputs, labels) -> float:
        self.left -= 1
        if self.left < 0:
            raise KeyError("boxes")
        return 1.0


def judge_all(session: Session, case: Case) -> RunRecord:
    for check in case.checks:
        try:
            session.judge(case, check)
        except QdqspecError:
            continue
    return session.record()


def test_an_error_of_a_metric_is_in_table_record_and_result(open_session: Open, case: Case) -> None:
    session = open_session(metrics={"mine": Fails(2)})
    record = judge_all(session, case)
    (entry,) = record.cases
    size, accuracy = entry.results
    assert (size.verdict.outcome, accuracy.verdict.outcome) == ("pass", "fail")
    assert accuracy.verdict.headline == "not judged: metric 'mine' raised KeyError: 'boxes'"
    assert "accuracy FAIL, 1 passed" in summary_table(record)
    write_results(record)
    written = json.loads((session.output(case) / "result.json").read_text())
    assert written["checks"][1]["verdict"] == "fail"
    assert "KeyError" in written["checks"][1]["sections"][0]["text"]
    again = record_from_json(record_to_json(record)).cases[0].results[1].verdict
    assert again.headline == accuracy.verdict.headline
    with pytest.raises(DataError):
        session.judge(case, case.checks[1])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"metric": "mine"}, "raised KeyError"),
        ({"metric": "min"}, r":7: .*unknown metric 'min' \(did you mean 'mine'\?\)"),
        ({"metric": "top1"}, "has values of shape"),
        ({"metric": "top1", "evaluation": None}, ":7: .*there is no evaluation data"),
        ({"metric": "top1", "evaluation": "unlabelled.npz"}, "no array 'labels'"),
    ],
)
def test_an_error_of_a_metric_fails_only_the_check_that_needs_it(
    open_session: Open, case: Case, project: Path, change: dict[str, Any], problem: str
) -> None:
    """If no other check needs a search, the error is raised before it."""
    np.savez(project / "unlabelled.npz", x=normal(4, 8, 12, 12))
    name = change.pop("evaluation", "data.npz")
    case = replace(case, inputs=replace(case.inputs, evaluation=name and project / name))
    accuracy = replace(check_of("accuracy", min=0.0, **change), line=7)
    alone, beside = replace(case, checks=(accuracy,)), replace(case, checks=(case.checks[0], accuracy))
    session = open_session(metrics={"mine": Fails(1)})
    with pytest.raises(QdqspecError, match=problem):
        session.judge(alone, accuracy)
    assert session.record().cases[0].evidence.search is None
    session = open_session(metrics={"mine": Fails(1)})
    assert session.judge(beside, case.checks[0]).verdict.outcome == "pass"
    with pytest.raises(QdqspecError, match=problem):
        session.judge(beside, accuracy)
    assert "accuracy FAIL, 1 passed" in summary_table(session.record())


def test_unusable_data_is_found_before_the_search(open_session: Open, case: Case, tmp_path: Path) -> None:
    bad = normal(4, 8, 12, 12)
    bad[3, 0, 0, 0] = np.nan
    np.savez(tmp_path / "bad.npz", x=bad)
    inputs = replace(case.inputs, evaluation=tmp_path / "bad.npz")
    case = replace(case, inputs=inputs, checks=case.checks[:1])
    session = open_session()
    with pytest.raises(DataError, match="holds NaN"):
        session.judge(case, case.checks[0])
    assert session.record().cases[0].evidence.search is None
    write_results(session.record())
    written = json.loads((session.output(case) / "result.json").read_text())
    assert written["checks"][0]["headline"].startswith("not judged: array 'x' holds NaN")
    case.model.write_bytes(b"no model")
    assert "FAIL" in summary_table(judge_all(open_session(), case))


# ---- samples that do not fill a batch -----------------------------------------------------------


def test_samples_that_do_not_fill_a_batch_are_scored_once_and_noted(open_session: Open, case: Case) -> None:
    proto = chain_model()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 3
    onnx.save(proto, case.model)
    images = np.random.default_rng(1).integers(0, 255, size=(4, 8, 12, 12), dtype=np.uint8)
    np.savez(case.model.with_name("data.npz"), x=images, labels=np.arange(4))
    session = open_session(metrics={"mine": lambda outputs, labels: len(outputs["y"]) + labels.sum() / 10})
    numbers = session.judge(case, case.checks[1]).verdict.numbers
    assert (numbers["samples"], numbers["tuned"]) == (4, 4.6)
    notes = [text for text in session.record().cases[0].evidence.warnings if text.startswith("data.npz")]
    assert len(notes) == 2  # samples that are repeated, and integers


# ---- the time limit of a run --------------------------------------------------------------------


def test_a_failing_check_is_inconclusive_if_the_time_limit_ended_the_search(
    open_session: Open, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case, checks=(check_of("size", max_ratio=2.0), check_of("speedup", min=50.0)))
    session = open_session(time_limit=100.0)
    left = iter([100.0, 1.0])
    monkeypatch.setattr(Session, "_seconds_left", lambda _: next(left, 0.0))
    assert session.judge(case, case.checks[0]).verdict.outcome == "pass"
    late = session.judge(case, case.checks[1]).verdict
    assert late.outcome == "inconclusive"
    assert late.headline == "not decided within the time limit of 1 min 40 s"
    assert "asked 50.00x" in late.sections[0].text
