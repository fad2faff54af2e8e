"""Runs one item: skips it if nothing can be judged, else judges its check; the progress, and the text of a failure.

The first line of the text is a complete verdict, because pytest's summary and CI annotations show nothing else; the
last lines are the command to reproduce it. What formats it is imported after a failure.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qdqspec._core.config import Settings
from qdqspec._core.progress import Display, Heartbeat, ProgressBar, can_draw, shown_on
from qdqspec._core.units import origin_text
from qdqspec.app.plugin._compat import current_line, is_worker, located_text, reporter_of, uncaptured
from qdqspec.app.plugin.state import name_of, settings_of
from qdqspec.errors import DataError, ModelError, QdqspecError, SpecError
from qdqspec.types import Case, CheckResult, CheckSpec, Data, DataSource, Evidence, Loader, Metric, Verdict

if TYPE_CHECKING:
    from qdqspec.app.session import Session


_DISPLAY = pytest.StashKey[Display | None]()


class CheckFailed(Exception):  # noqa: N818 - it is a verdict, not a malfunction
    """A check failed. ``text`` is the whole text for the user, its first line the verdict."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text.splitlines()[0])


class VerdictWarning(pytest.PytestWarning):
    """A check of ``severity: warn`` failed."""


class CheckItem(pytest.Function):
    """One check of one case."""

    cases: tuple[Case, ...]  # all cases of its spec
    case: Case
    check: CheckSpec

    @classmethod
    def of(
        cls, parent: pytest.Collector, case: Case, check: CheckSpec, like: CheckItem | None = None
    ) -> CheckItem:
        """An item that runs the check through ordinary fixtures; ``like`` is an item of the case that has them."""
        fixtures = None if like is None else like._fixtureinfo  # noqa: SLF001
        item = cls.from_parent(parent, name=check.id, callobj=run_check, fixtureinfo=fixtures)
        item.cases = getattr(parent.parent, "cases", ())
        item.case = case
        item.check = check
        item.extra_keyword_matches.add(check.kind)
        return item

    def reportinfo(self) -> tuple[Path, int, str]:
        """The check's position in the spec, so that editors and annotations point to it."""
        return self.path, self.check.line - 1, f"{self.case.name}::{self.check.id}"


def run_check(
    request: pytest.FixtureRequest,
    qdq_session: Session,
    qdq_backend: str,
    qdq_calibration: DataSource | None,
    qdq_metrics: Mapping[str, Metric],
    qdq_data: Mapping[str, Loader],
) -> None:
    """Judge the check of the requesting item."""
    item: CheckItem = request.node
    qdq_backend = item.case.backend or qdq_backend
    settings = settings_of(item.config)
    _skip_unless(item.case, qdq_backend, qdq_session)
    case = replace(with_calibration(item.case, qdq_calibration), metrics=qdq_metrics, loaders=qdq_data)
    if settings.mode == "plan":
        pytest.skip(f"plan: {qdq_session.planned(replace(case, checks=(item.check,))).text}")
    available = qdq_session.availability(case)
    if not available.usable:
        error = available.error(qdq_backend)
        reason = "; ".join(filter(None, (error.what, error.cure)))
        qdq_session.skip(case, reason)
        if "device" in settings.require:
            raise CheckFailed(f"{reason}\n\nIt fails because of --qdq-require=device.")
        pytest.skip(reason)
    case = replace(case, model=model_path(request, case))
    with show_progress(item.config, qdq_session):
        result = qdq_session.judge(case, item.check)
    found = (record.evidence for record in qdq_session.record().cases)
    evidence = next((one for one in found if name_of(one.case) == name_of(case)), None)
    # by name: pytest-rerunfailures runs one item several times
    item.user_properties[:] = (dict(item.user_properties) | dict(properties(result, evidence))).items()
    _conclude(item, result, settings, evidence)


def _skip_unless(case: Case, backend: str, session: Session) -> None:
    """Skip if the machine or the run does not meet ``skip_unless`` of the spec."""
    wanted = case.skipping.unless.get("backend")
    if wanted is not None and wanted != backend:
        if not wanted.startswith(f"{backend}-"):
            option = f"--qdq-backend={wanted.partition('-')[0]}"
            pytest.skip(f"for backend {wanted}, and this run uses {backend}; run it with {option}")
        target = session.target(case)
        if wanted != target:
            pytest.skip(f"for target {wanted}, and this run is on {target}")
    wanted = case.skipping.unless.get("compute_capability")
    if wanted is not None and not fulfils(session.availability(case).facts.get("compute_capability"), wanted):
        pytest.skip(f"for a GPU of compute capability {wanted}, which {backend} does not have here")


def fulfils(value: str | None, comparison: str) -> bool:
    """Whether a version such as ``8.9`` fulfils ``>=8.6``. An unknown version fulfils nothing."""
    from packaging.specifiers import SpecifierSet

    return value is not None and SpecifierSet(comparison).contains(value)


def with_calibration(case: Case, given: DataSource | str | None) -> Case:
    """The case with the calibration data of fixture ``qdq_calibration``, which a conftest may have replaced."""
    if not isinstance(given, Path | Data | str | None):
        raise DataError(
            f"fixture 'qdq_calibration' returned {type(given).__name__}",
            where=case.name,
            cure="return the path of the data; for arrays name a loader in the spec, {loader: NAME}, and define it "
            "in fixture qdq_data",
        )
    data = Path(given) if isinstance(given, str) else given
    return replace(case, inputs=replace(case.inputs, calibration=data))


def model_path(request: pytest.FixtureRequest, case: Case) -> Path:
    """The user's file of the model of fixture ``qdq_model``, which a conftest may have replaced."""
    from qdqspec.graph import OwnCopy

    model = request.getfixturevalue("qdq_model")
    while isinstance(model, OwnCopy):  # changes such as fixed inputs are made from the case, once
        model = model.origin
    path: Path | None = model.path
    if path is None:
        raise ModelError(
            "the model that fixture 'qdq_model' gave has no file",
            where=case.name,
            cure="save it, and return qdqspec.graph.model.load_model(path)",
        )
    return path


def properties(result: CheckResult, evidence: Evidence | None) -> list[tuple[str, object]]:
    """Properties for junit and other reports, as plain values that pytest-xdist can carry."""
    found: list[tuple[str, object]] = [("qdq.verdict", result.verdict.outcome)]
    if evidence is not None:
        found += [("qdq.backend", evidence.target), ("qdq.device", evidence.device.key)]
        if evidence.search is not None:
            found += [("qdq.scheme", evidence.search.winner.digest), ("qdq.trials", evidence.search.total)]
        if evidence.latency is not None:
            found += [
                ("qdq.latency_ms", evidence.latency.median_ms("tuned")),
                ("qdq.reference_ms", evidence.latency.median_ms("reference")),
                ("qdq.speedup", evidence.latency.speedup.median),
                ("qdq.provenance", origin_text(evidence.latency.provenance)),
            ]
            if evidence.latency.at_least is not None:
                found.append(("qdq.speedup_at_least", evidence.latency.at_least))
        if evidence.parity is not None:
            found.append(("qdq.sqnr_db", evidence.parity.sqnr_db))
    known = {name for name, _ in found}
    numbers = ((f"qdq.{name}", float(value)) for name, value in result.verdict.numbers.items())
    return found + [(name, value) for name, value in numbers if name not in known]


def _conclude(item: CheckItem, result: CheckResult, settings: Settings, evidence: Evidence | None) -> None:
    verdict = result.verdict
    if verdict.outcome == "pass":
        return
    if verdict.outcome == "inconclusive" and "conclusive" not in settings.require:
        cure = f"; run: {verdict.command}" if verdict.command else ""
        pytest.skip(f"inconclusive: {verdict.headline}{cure}")
    if result.severity == "warn":
        try:
            item.warn(VerdictWarning(verdict.headline))
        except VerdictWarning:  # where warnings are errors, it is reported as a verdict too
            text = f"{verdict.headline}\n\nA warning by the spec, an error by filterwarnings."
            raise CheckFailed(text) from None
        return
    if verdict.outcome == "inconclusive":
        verdict = replace(verdict, headline=f"inconclusive: {verdict.headline}")
    raise CheckFailed(failure_text(item, verdict, settings, evidence))


def failure_text(item: CheckItem, verdict: Verdict, settings: Settings, evidence: Evidence | None) -> str:
    """Headline, tables, advice, the place in the spec, and the command that judges this placement again."""
    from qdqspec.app.report.tables import section_text
    from qdqspec.spec import excerpt

    spec, line = item.case.spec, item.check.line
    parts = [verdict.headline, *map(section_text, verdict.sections)]
    parts += [verdict.advice] if verdict.advice else []
    if spec and spec.suffix != ".py":
        column = None
        with suppress(OSError, UnicodeDecodeError, IndexError):  # the caret is after the dash of the list
            text = spec.read_text(encoding="utf-8").splitlines()[line - 1]
            column = len(text) - len(text.lstrip(" -")) + 1
        parts.append(f"Asked for in {spec.name}:{line}\n{excerpt(spec, line, column)}")
    # By names, not by node id: pytest-xdist appends its group to the id.
    names = [node.name for node in item.listchain() if item.path == node.path][1:]
    words = ["pytest", "::".join((os.path.relpath(item.path, item.config.invocation_params.dir), *names))]
    if evidence is not None:
        parts += [f"Models and measurements: {evidence.output}"] if evidence.output is not None else []
        words += [f"--qdq-scheme={evidence.search.winner.digest}"] if evidence.search is not None else []
    words += [f"--qdq-seed={settings.seed}", *settings.device_words]
    parts.append(f"Reproduce with:\n  {shlex.join(words)}")
    return "\n\n".join(part.rstrip("\n") for part in parts)


def without_traceback(error: BaseException, path: Path, line: int) -> Any | None:
    """The text for a verdict or an input error; ``None`` for a bug, which keeps its traceback."""
    if not isinstance(error, CheckFailed | QdqspecError):
        return None
    text = error.text if isinstance(error, CheckFailed) else str(error)
    # The place of a check is before it; that in a spec is more exact.
    headline = str(error) if isinstance(error, CheckFailed | SpecError) else error.what
    return located_text(text, path, line, headline.splitlines()[0])


# ---- progress ------------------------------------------------------------------------------------


def show_progress(config: pytest.Config, session: Any) -> AbstractContextManager[None]:
    """Show the progress of ``session`` while the block runs. A session that already has an observer keeps it.

    It is a live bar on a terminal, else a line a minute; both bypass pytest's capture. ``-q`` removes the bar and keeps
    the line, ``-qq`` removes both.
    """
    if _DISPLAY not in config.stash:  # one for the whole run: the interval of the heartbeat spans short cases
        config.stash[_DISPLAY] = _choose_display(config)
    display = config.stash[_DISPLAY]
    if display is None or getattr(session, "watch", display) is not None:
        return nullcontext()
    return shown_on(display, session)


def _choose_display(config: pytest.Config) -> Display | None:
    verbosity, reporter, terminal = config.get_verbosity(), reporter_of(config), uncaptured(config)
    if verbosity < -1 or (reporter is None and not is_worker(config)):
        return None

    def write(line: str) -> None:
        with terminal():
            if reporter is None:  # a worker of pytest-xdist
                sys.stderr.write(f"\n{line}\n")
                sys.stderr.flush()
            else:
                reporter.ensure_newline()
                if current_line(reporter):  # dots of -q, which no name of a file precedes
                    reporter.write_line("")
                reporter.write_line(line, flush=True)

    if reporter is None or verbosity < 0 or not can_draw(is_terminal=reporter.isatty()):
        return Heartbeat(write)
    return ProgressBar(terminal=terminal, line=lambda: current_line(reporter))
