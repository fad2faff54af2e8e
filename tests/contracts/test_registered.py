"""The contract suites over everything registered; tests that need an unavailable device are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from installed import require

from qdqspec._core.registry import names, resolve
from qdqspec.app.report.write import format_named
from qdqspec.backends.base import Backend
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.testing.backends import BackendContract
from qdqspec.testing.formats import FormatContract
from qdqspec.testing.records import empty_run, hostile_run, sample_run
from qdqspec.testing.strategies import StrategyContract

RUNS = {"sample": sample_run, "empty": empty_run, "hostile": hostile_run}


class TestBackends(BackendContract):
    @pytest.fixture(params=names("backend"))
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return resolve("backend", request.param)()


@pytest.fixture(scope="module", params=["onnxruntime", "fake", "openvino"])
def isolated(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Engines of ``fake`` in new interpreters, the others in forked processes."""
    require(request.param)
    with Isolated(request.param, fork=False if request.param == "fake" else None) as backend:
        yield backend


class TestIsolated(BackendContract):
    @pytest.fixture
    def backend(self, isolated: Backend) -> Backend:
        return isolated


class TestAttribution(StrategyContract):
    strategy = resolve("strategy", "attribution")


class TestRegion(StrategyContract):
    strategy = resolve("strategy", "region")


class TestExhaustive(StrategyContract):
    strategy = resolve("strategy", "exhaustive")


class TestOptuna(StrategyContract):
    strategy = resolve("strategy", "optuna")


class TestSubgraph(StrategyContract):
    strategy = resolve("strategy", "subgraph")


class TestMarkdown(FormatContract):
    report_format = format_named("markdown")


class TestJson(FormatContract):
    report_format = format_named("json")


class TestCsv(FormatContract):
    report_format = format_named("csv")


class TestHtml(FormatContract):
    report_format = format_named("html")


def test_every_strategy_and_format_has_a_contract() -> None:
    covered = {suite.strategy for suite in StrategyContract.__subclasses__()}
    assert covered == {resolve("strategy", name) for name in names("strategy")}
    suites = (suite for suite in FormatContract.__subclasses__() if "report_format" in vars(suite))
    assert {format_named(name).suffix for name in names("format")} <= {s.report_format.suffix for s in suites}


@pytest.mark.parametrize("name", ["markdown", "json", "csv", "html"])
@pytest.mark.parametrize("run", RUNS)
def test_the_pages_of_report_formats(name: str, run: str, golden) -> None:
    report_format = format_named(name)
    content = report_format.render(RUNS[run]())
    assert isinstance(content, str)
    golden(f"report/{run}{report_format.suffix}", content)
