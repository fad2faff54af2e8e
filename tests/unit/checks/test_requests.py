"""Checks request evidence with parameters, also those of other packages."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import ClassVar

import pytest

from qdqspec import load_spec
from qdqspec._core import registry
from qdqspec._core.config import Settings
from qdqspec.app.cluster.request import pack
from qdqspec.checks.base import CheckParams, baseline_entries
from qdqspec.errors import ConfigError
from qdqspec.testing.records import params_of
from qdqspec.types import Case, CheckSpec, Evidence, EvidenceKind, Verdict
from qdqspec.types.requests import (
    BaselineRequest,
    Request,
    ScoreRequest,
)

MODEL = Path(__file__).parents[3] / "specs" / "models" / "digits_resnet.onnx"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The check, or another object of this file, registered as by an installed package."""
    value = f"{__name__}{getattr(request, 'param', ':pace')}"
    point = importlib.metadata.EntryPoint("mean-shift", value, "qdqspec.checks")
    known = registry._entry_points

    def entry_points(kind: registry.RegistryKind) -> dict[str, importlib.metadata.EntryPoint]:
        return {**known(kind), **({"mean-shift": point} if kind == "check" else {})}

    monkeypatch.setattr(registry, "_entry_points", entry_points)


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
