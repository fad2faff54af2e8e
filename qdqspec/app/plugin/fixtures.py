"""Fixtures of the plugin. Each may be overridden in a conftest, for specs and plain tests alike.

``qdq_session``, ``qdq_backend``, ``qdq_calibration``, ``qdq_data``, ``qdq_metrics`` and ``qdq_model`` determine
the input of the checks of specs; the others return results. Fixtures about one case are function-scoped, because
pytest has no scope for a case; the session caches results, so that a second request costs nothing. On a plain
test, ``@pytest.mark.qdq("specs/a.qdq.yaml::int8-b8")`` names the case they are about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pytest

from qdqspec._core.units import origin_text
from qdqspec.app.cases import find_case
from qdqspec.app.cluster import open_session
from qdqspec.app.plugin.collect import unchanged_cases
from qdqspec.app.plugin.hooks import device_key
from qdqspec.app.plugin.run import CheckItem, model_path, show_progress, with_calibration
from qdqspec.app.plugin.state import settings_of, state_of
from qdqspec.types import (
    Case,
    DataSource,
    Evidence,
    EvidenceKind,
    LatencyEvidence,
    Loader,
    Metric,
    ParityEvidence,
    Region,
    RunRecord,
    SearchResult,
)

T = TypeVar("T")

if TYPE_CHECKING:
    from qdqspec.app.session import Session
    from qdqspec.graph import Model


@pytest.fixture(scope="session")
def qdq_backend(pytestconfig: pytest.Config) -> str:
    """Name of the backend that runs the models."""
    return settings_of(pytestconfig).backend


@pytest.fixture(scope="session")
def qdq_session(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, qdq_backend: str
) -> Iterator[Session]:
    """The session that tunes, measures and judges; one a run (and one a worker of pytest-xdist)."""
    settings = replace(settings_of(pytestconfig), backend=qdq_backend)
    session = open_session(
        settings, unchanged_cases(request.session.items), device_key=partial(device_key, pytestconfig)
    )
    state_of(pytestconfig).add_session(session)
    yield session
    session.close()


@pytest.fixture
def qdq_metrics() -> Mapping[str, Metric]:
    """Your own task metrics, by the name that specs use: empty, until a conftest defines some.

    Each is called as ``metric(outputs, labels)``, with arrays over all evaluation samples, and returns a
    number, where higher is better.
    """
    return {}


@pytest.fixture
def qdq_data() -> Mapping[str, Loader]:
    """Your own data loaders, by the name that specs use (``{loader: NAME}``): empty, until a conftest defines some.

    Each is called without arguments and returns arrays by input name with samples along the first axis, or yields
    mappings from input names to arrays, one a sample; ``labels`` may be among them.
    """
    return {}


@pytest.fixture
def _qdq_own(qdq_metrics: Mapping[str, Metric], qdq_data: Mapping[str, Loader]) -> Callable[[Case], Case]:
    """Adds your own metrics and data loaders to a case."""
    return partial(replace, metrics=qdq_metrics, loaders=qdq_data)


@pytest.fixture
def _qdq_the_case(request: pytest.FixtureRequest, _qdq_own: Callable[[Case], Case]) -> Case:
    """The case a fixture is about: the one of the check, or the one that marker ``qdq`` names."""
    if isinstance(request.node, CheckItem):
        return _qdq_own(request.node.case)
    marker = request.node.get_closest_marker("qdq")
    if marker is None or not marker.args:
        raise pytest.UsageError(
            f"{request.node.nodeid} uses a qdq fixture without a case; "
            'mark it @pytest.mark.qdq("specs/a.qdq.yaml::case")'
        )
    return _qdq_own(find_case(str(marker.args[0]), settings_of(request.config), request.config.rootpath))


@pytest.fixture
def qdq_calibration(_qdq_the_case: Case) -> DataSource | None:
    """The case's calibration data; ``None`` if its spec names none."""
    return _qdq_the_case.inputs.calibration


@pytest.fixture
def qdq_model(qdq_session: Session, _qdq_the_case: Case) -> Model:
    """The case's model, as loaded. An overriding one must have a file."""
    return qdq_session.model(_qdq_the_case)


@pytest.fixture
def _qdq_judged_case(
    request: pytest.FixtureRequest, _qdq_the_case: Case, qdq_calibration: DataSource | None
) -> Case:
    """The case with the model and the calibration data of the fixtures, as its checks judge it."""
    case = with_calibration(_qdq_the_case, qdq_calibration)
    return replace(case, model=model_path(request, case))


@pytest.fixture
def qdq_regions(qdq_session: Session, _qdq_judged_case: Case) -> tuple[Region, ...]:
    """The regions of the case's model."""
    return qdq_session.regions(_qdq_judged_case)


@pytest.fixture
def qdq_tuned(qdq_session: Session, _qdq_judged_case: Case, pytestconfig: pytest.Config) -> SearchResult:
    """The result of the search for the case. Searches, unless a winner is cached."""
    return CaseView(case=_qdq_judged_case, session=qdq_session, _pytest_config=pytestconfig).search


@pytest.fixture
def qdq_parity(qdq_session: Session, _qdq_judged_case: Case, pytestconfig: pytest.Config) -> ParityEvidence:
    """The outputs of the tuned model compared with the reference's."""
    return CaseView(case=_qdq_judged_case, session=qdq_session, _pytest_config=pytestconfig).parity


@pytest.fixture
def qdq_latency(qdq_session: Session, _qdq_judged_case: Case, pytestconfig: pytest.Config) -> LatencyEvidence:
    """The final measurement of the tuned model and the reference."""
    with _show_and_record(pytestconfig, qdq_session):
        return _require_measured(qdq_session.evidence(_qdq_judged_case, frozenset({"latency"})).latency)


@pytest.fixture
def qdq_case(
    qdq_session: Session, _qdq_own: Callable[[Case], Case], pytestconfig: pytest.Config
) -> Callable[[str], CaseView]:
    """Return ``qdq_case("specs/a.qdq.yaml::int8-b8")``: a `CaseView`; the file is relative to the root.

    The model and the calibration data are those of the spec, also where ``qdq_model`` or ``qdq_calibration`` replace
    them in its checks.
    """

    def view(reference: str) -> CaseView:
        case = _qdq_own(find_case(reference, settings_of(pytestconfig), pytestconfig.rootpath))
        return CaseView(case=case, session=qdq_session, _pytest_config=pytestconfig)

    return view


@pytest.fixture
def qdq_report(pytestconfig: pytest.Config) -> Callable[[str], str | bytes]:
    """Return ``qdq_report("markdown")``: a report, in a format by name, of all judged so far in this process."""

    def render(name: str = "markdown") -> str | bytes:
        from qdqspec.app.report.write import format_named

        nothing = RunRecord(version="", started="", seconds=0.0, cases=())
        return format_named(name).render(state_of(pytestconfig).whole_record() or nothing)

    return render


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyView:
    """The final measurement in numbers: medians in milliseconds, and reference over tuned.

    ``speedup_low`` and ``speedup_high`` are its prediction interval, ``speedup_at_least`` is the bound that is proved.
    """

    median_ms: float
    reference_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float
    speedup_at_least: float | None
    provenance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseView:
    """The results of one case; each attribute is measured on first use and cached."""

    case: Case
    session: Session
    _pytest_config: pytest.Config

    @property
    def latency(self) -> LatencyView:
        """The tuned model's latency and the reference's."""
        measured = _require_measured(self._gather("latency").latency)
        return LatencyView(
            median_ms=measured.median_ms("tuned"),
            reference_ms=measured.median_ms("reference"),
            speedup=measured.speedup.median,
            speedup_low=measured.speedup.low,
            speedup_high=measured.speedup.high,
            speedup_at_least=measured.at_least,
            provenance=origin_text(measured.provenance),
        )

    @property
    def parity(self) -> ParityEvidence:
        """The outputs of the tuned model compared with the reference's."""
        return _require_measured(self._gather("parity").parity)

    @property
    def search(self) -> SearchResult:
        """The result of the search."""
        with _show_and_record(self._pytest_config, self.session):
            return self.session.search(self.case)

    @property
    def evidence(self) -> Evidence:
        """The evidence that the checks of the case judge."""
        return self._gather("latency", "parity", "placement", "size")

    def _gather(self, *needs: EvidenceKind) -> Evidence:
        with _show_and_record(self._pytest_config, self.session):
            return self.session.evidence(self.case, frozenset(needs))


def _show_and_record(config: pytest.Config, session: Session) -> AbstractContextManager[None]:
    """Show the session's progress in the block, and include its results in the table and in ``result.json``."""
    state_of(config).add_session(session)
    return show_progress(config, session)


def _require_measured(piece: T | None) -> T:
    """The evidence requested; skips the test in a run without timing."""
    if piece is None:
        pytest.skip("not measured in this run: --qdq-mode=verify and plan take no timing")
    return piece
