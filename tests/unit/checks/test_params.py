"""Parameters of checks, and the evidence that checks request with parameters."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from other_fake import register
from pydantic import ValidationError

from qdqspec import load_spec
from qdqspec._core.config import Settings
from qdqspec.app.cluster.request import pack
from qdqspec.app.evidence.baselines import baseline_entries
from qdqspec.checks.base import CheckParams
from qdqspec.errors import ConfigError
from qdqspec.testing.records import params_of
from qdqspec.types import Case, CheckSpec, Evidence, EvidenceKind, Verdict
from qdqspec.types.requests import BaselineRequest, Request, ScoreRequest


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("latency", {"max_ms": float("inf")}, "finite"),
        ("latency", {"max_ms": {"onnxrutime-cpu": 3}}, r"no backend, .*\(did you mean 'onnxruntime'\?\)"),
        ("latency", {"max_ms": {"any": {"p101": 3}}}, "'p101' is no percentile"),
        ("parity", {"min_sqnr_db": "25"}, "valid number"),
        ("placement", {}, "nothing to check"),
        ("survival", {"through": []}, "nothing to check"),
        ("accuracy", {"min": 97}, "top1 is a share, and 97 of it is no valid limit: write 97% or 0.97"),
        ("parity", {}, "nothing to check"),
        ("parity", {"runtime": {"outputs": ["x"]}}, "Extra inputs"),
        ("parity", {"min_agreement": 1, "search": 9}, "nothing to search for"),
        ("parity", {"min_cosine": 1, "search": {"values": {"x": [1, 0]}}}, "no range"),
        ("accuracy", {"min": "high%"}, "not a percentage"),
        ("placement", {"require": {"Conv": "many"}}, "a number of nodes, or 'all'"),
        ("placement", {"min_pairs": 3, "max_pairs": 2}, "min_pairs 3 is above max_pairs 2"),
        ("survival", {"through": ["onnxruntime"]}, "^1 validation error"),
        ("survival", {"through": ["onnxslim", "onnxslim"]}, "onnxslim: named twice"),
        ("lint", {"target": ["tensorrt-9"]}, "unknown lint target 'tensorrt-9'"),
        ("lint", {"target": "tensorrt-11", "ignore": ["zero points"]}, "should match pattern"),
        ("size", {"max_bytes": "1e999MiB"}, "is not a size such as 4MiB"),
        ("partition", {}, "nothing to check"),
        ("regression", {"max": "-1%"}, "max"),
        ("regression", {"max": 5}, "less than 1"),
        ("latency", {"max_ms": 5, "percentile": 0.99}, "0.99 is not between 1 and 100: write 99"),
    ],
)
def test_checks_without_a_limit_or_with_an_impossible_one_are_refused(kind, values, words) -> None:
    with pytest.raises(ValidationError, match=words):
        params_of(kind, **values)


def test_checks_with_equal_limits_share_a_search() -> None:
    def key(search: object, **words: object) -> str:
        return params_of("parity", max_abs=1, search=search, **words).evidence_key  # type: ignore[attr-defined]

    assert key(30) == key({"examples": 30}) == key(30, id="mine", severity="warn")
    assert key(30) != key({"examples": 30, "values": {"x": [0, 1]}})


MODEL = Path(__file__).parents[3] / "specs" / "models" / "digits_resnet.onnx"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The check, or another object of this file, registered as by an installed package."""
    register(monkeypatch, "check", "mean-shift", f"{__name__}{getattr(request, 'param', ':pace')}")


class PaceCheck:
    """A check of another package that compares with the baseline and scores a metric of the project."""

    Params: ClassVar[type[CheckParams]] = type(params_of("regression"))
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset()

    def requests(self, _: CheckParams) -> tuple[Request, ...]:
        return BaselineRequest(key="pace", allowed=0.05), ScoreRequest(metric="our-own")

    def judge(self, params: CheckParams, evidence: Evidence) -> Verdict:
        raise NotImplementedError


pace = PaceCheck()


@pytest.mark.usefixtures("installed")
def test_requests_of_an_installed_check_are_used_for_baselines_and_clusters(tmp_path: Path) -> None:
    """They are not found by the names `regression` and `accuracy` of checks."""
    check = CheckSpec(id="mean-shift", kind="mean-shift", params=params_of("regression"))
    case = Case(id="int8", model=MODEL, checks=(check,), metrics={"our-own": lambda *_: 1.0})
    assert baseline_entries([case]) == {("int8", "pace")}
    with pytest.raises(ConfigError, match="the metric our-own is Python code"):
        pack(case, Settings(root=tmp_path), tmp_path)


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
