"""Checks request evidence with parameters, also those of other packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from pydantic import Field

from qdqspec import load_spec
from qdqspec._core import registry
from qdqspec._core.config import Settings
from qdqspec.app.cluster.request import pack
from qdqspec.app.report.record import case_from_json, case_to_json, record_to_json
from qdqspec.app.report.tables import summary_table
from qdqspec.app.report.write import format_named
from qdqspec.app.session import Session
from qdqspec.checks.base import CheckParams, baseline_entries, unmeasured, verdict
from qdqspec.errors import ConfigError
from qdqspec.types import Case, CheckSpec, Evidence, EvidenceKind, Section, TuneRules, Verdict
from qdqspec.types.requests import (
    BaselineRequest,
    ComparedModels,
    FigureRequest,
    LintRequest,
    Request,
    ScoreRequest,
)

MODEL = Path(__file__).parents[3] / "specs" / "models" / "digits_resnet.onnx"
CALLS: list[str] = []  # keys of the measurements made


def mean_shift(models: ComparedModels) -> Mapping[str, float]:
    """The largest shift of the mean of an output, and the number of inputs."""
    CALLS.append("mean-shift")
    assert models.reference.is_file()
    assert models.tuned.is_file()
    shifts = [
        abs(float(np.mean(tuned[name]) - np.mean(values)))
        for _, reference, tuned in models.outputs()
        for name, values in reference.items()
    ]
    return {"largest": max(shifts), "inputs": float(len(shifts)), "constant": 123.25}


class ShiftParams(CheckParams):
    """The allowed shift of the mean of an output."""

    kind: Literal["mean-shift"]
    max: float = Field(description="Largest shift of the mean.")


class ShiftCheck:
    """A check of another package: it defines its own figures, and requests the lint findings of a target."""

    Params: ClassVar[type[CheckParams]] = ShiftParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"size"})

    def requests(self, params: CheckParams) -> tuple[Request, ...]:
        return FigureRequest(key="mean-shift", measure=mean_shift), LintRequest(target="onnxruntime-cpu")

    def judge(self, params: CheckParams, evidence: Evidence) -> Verdict:
        assert isinstance(params, ShiftParams)
        found = evidence.figures.get("mean-shift")
        if found is None:
            return unmeasured("no shift was measured", "Run the case again.")
        shift = found["largest"]
        outcome: Literal["pass", "fail"] = "pass" if shift <= params.max else "fail"
        table = Section(title="Shift", headers=("largest",), rows=((f"{shift:.3g}",),))
        return verdict(outcome, f"the mean moved by {shift:.3g}", table, numbers=found, advice="Allow more.")


check = ShiftCheck()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The check, or another object of this file, registered as by an installed package."""
    value = f"{__name__}{getattr(request, 'param', ':check')}"
    point = importlib.metadata.EntryPoint("mean-shift", value, "qdqspec.checks")
    known = registry._entry_points

    def entry_points(kind: registry.RegistryKind) -> dict[str, importlib.metadata.EntryPoint]:
        return {**known(kind), **({"mean-shift": point} if kind == "check" else {})}

    monkeypatch.setattr(registry, "_entry_points", entry_points)
    CALLS.clear()


def shift(id: str = "mean-shift", **params: Any) -> CheckSpec:  # noqa: A002 - the field's name
    values = ShiftParams.model_validate({"kind": "mean-shift", **params})
    return CheckSpec(id=id, kind="mean-shift", params=values)


def judged(tmp_path: Path, *checks: CheckSpec) -> Session:
    """A session that judged these checks of a case on the simulated device."""
    case = Case(id="default", model=MODEL, tune=TuneRules(trials=2, min_sqnr_db="none"), checks=checks)
    session = Session(backend="fake", root=tmp_path, cache_dir=tmp_path / "cache", output=tmp_path / "out")
    with session:
        for check in checks:
            session.judge(case, check)
    return session


@pytest.mark.usefixtures("engine_threads", "installed")
def test_figures_of_an_installed_check_are_in_evidence_records_and_reports(tmp_path: Path) -> None:
    session = judged(tmp_path, shift(max=1e9), shift("twice", max=0.0))
    record = session.record()
    (case,) = record.cases
    assert [result.verdict.outcome for result in case.results] == ["pass", "fail"]
    assert CALLS == ["mean-shift"], "equal requests are measured once"
    figures = case.evidence.figures["mean-shift"]
    assert figures["inputs"] > 0
    assert case.evidence.lint.keys() == {"onnxruntime-cpu"}, "a request needs no entry in `needs`"
    assert case.evidence.size_bytes.keys() == {"reference", "tuned"}
    written = record_to_json(record)["cases"][0]
    assert written["figures"] == {"mean-shift": figures}
    assert case_from_json(case_to_json(case)).evidence.figures == {"mean-shift": figures}
    assert "mean-shift" in summary_table(record)
    for name in ("markdown", "html", "csv", "json"):
        text = format_named(name).render(record)
        assert "123.25" in (text if isinstance(text, str) else text.decode()), name


class PaceCheck:
    """A check of another package that compares with the baseline and scores a metric of the project."""

    Params: ClassVar[type[CheckParams]] = ShiftParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset()

    def requests(self, _: CheckParams) -> tuple[Request, ...]:
        return BaselineRequest(key="pace", allowed=0.05), ScoreRequest(metric="our-own")

    def judge(self, params: CheckParams, evidence: Evidence) -> Verdict:
        raise NotImplementedError


pace = PaceCheck()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("installed", [":pace"], indirect=True)
def test_requests_of_an_installed_check_are_used_for_baselines_and_clusters(tmp_path: Path) -> None:
    """They are not found by the names `regression` and `accuracy` of checks."""
    case = Case(id="int8", model=MODEL, checks=(shift(max=1.0),), metrics={"our-own": lambda *_: 1.0})
    assert baseline_entries([case]) == {("int8", "pace")}
    with pytest.raises(ConfigError, match="the metric our-own is Python code"):
        pack(case, Settings(root=tmp_path))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("installed", "problem"),
    [(":chek", "AttributeError"), ("", "TypeError: it is a module")],
    indirect=["installed"],
)
def test_a_wrong_entry_point_is_an_error_that_names_it(tmp_path: Path, problem: str) -> None:
    spec = tmp_path / "a.qdq.yaml"
    spec.write_text("qdqspec: 1\nmodel: m.onnx\nchecks: [{kind: mean-shift, max: 1}]\n")
    with pytest.raises(ConfigError, match=f"check 'mean-shift'.*{problem}.*\n.*group qdqspec.checks"):
        load_spec(spec)
