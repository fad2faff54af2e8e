"""The state of a run in one process of pytest, with the results that workers of pytest-xdist have sent to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from qdqspec.types import Case, CaseRecord, Evidence, RunRecord

if TYPE_CHECKING:
    from qdqspec.app.session import Session
    from qdqspec.checks.baselines import Name, Renewal

CaseName: TypeAlias = tuple[str, str]  # of a spec and a case


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of a run, as far as this process knows it.

    ``unfinished`` counts the selected checks of each case that did not run yet, ``finished`` are the cases that
    `pytest_qdq_case_finished` was called for. ``obsolete`` are baseline entries that no check uses. ``troubles`` are
    errors that are reported with the results, and make the run fail.
    """

    sessions: list[Session] = field(default_factory=list)
    unfinished: Counter[CaseName] = field(default_factory=Counter)
    finished: set[CaseName] = field(default_factory=set)
    obsolete: set[tuple[Path, Name]] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)
    interrupted: bool = False
    # of workers of pytest-xdist
    received: list[RunRecord] = field(default_factory=list)
    renewals: list[Renewal] = field(default_factory=list)
    annotations: list[str] = field(default_factory=list)
    # made at the end
    record: RunRecord | None = None  # as reports show it
    reports: list[Path] = field(default_factory=list)
    baseline_lines: list[str] = field(default_factory=list)

    def add_session(self, session: Session) -> None:
        """Make the record of a session part of the report."""
        if not any(session is other for other in self.sessions):
            self.sessions.append(session)

    def own_record(self) -> RunRecord | None:
        """The record of this process. The folders of a case are known only in its own process."""
        return merge_records([session.record() for session in self.sessions])

    def whole_record(self) -> RunRecord | None:
        """The record of this run over all processes; ``None`` if nothing was judged."""
        return merge_records([*self.received, *(session.record() for session in self.sessions)])

    def all_renewals(self) -> list[Renewal]:
        """The baseline entries to write, of all processes."""
        return [*self.renewals, *(renewal for session in self.sessions for renewal in session.renewals())]


_STATE = pytest.StashKey[RunState]()


def state_of(config: pytest.Config) -> RunState:
    """The state of this run."""
    return config.stash.setdefault(_STATE, RunState())


def name_of(case: Case) -> CaseName:
    """The name of a case that is unique in the run."""
    return str(case.spec), case.name


def merge_records(records: Sequence[RunRecord]) -> RunRecord | None:
    """Merge the parts of a run's record, sorted by case; a case whose checks ran in several processes is joined."""
    cases: dict[CaseName, CaseRecord] = {}
    for piece in (case for record in records for case in record.cases):
        name = name_of(piece.evidence.case)
        cases[name] = _join_parts(cases[name], piece) if name in cases else piece
    if not cases:
        return None
    return RunRecord(
        version=records[0].version,
        started=min(record.started for record in records),
        seconds=max(record.seconds for record in records),
        cases=tuple(cases[name] for name in (cases if len(records) == 1 else sorted(cases))),
        runtimes=tuple(found for record in records for found in record.runtimes),
    )


def _join_parts(first: CaseRecord, second: CaseRecord) -> CaseRecord:
    missing = {
        field.name: getattr(second.evidence, field.name)
        for field in fields(Evidence)
        if getattr(first.evidence, field.name) in (None, (), {})
    }
    known = {result.id for result in first.results}
    added = tuple(result for result in second.results if result.id not in known)
    return CaseRecord(evidence=replace(first.evidence, **missing), results=first.results + added)
