"""Runs all checks of a case on one worker of ``pytest -n``, merges the results of all sessions, writes the reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qdqspec.cases import find_specs, is_spec, load_cases
from qdqspec.config import Settings
from qdqspec.errors import OutputError, QdqspecError
from qdqspec.plugin.options import settings_of
from qdqspec.types import CaseRecord, Evidence, RunRecord

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

    from qdqspec.session import Session

_SESSIONS = pytest.StashKey[list["Session"]]()
_RECEIVED = pytest.StashKey[list[RunRecord]]()
TROUBLES = pytest.StashKey[list[str]]()  # errors of any process that are reported with the results
_ANNOTATIONS = pytest.StashKey[list[str]]()
_RECORD, _TROUBLES, _LINES = (
    "qdqspec_record",
    "qdqspec_troubles",
    "qdqspec_annotations",
)  # in a worker's output


def note_session(config: pytest.Config, session: Session) -> None:
    """Register a session whose record is part of the report."""
    known = config.stash.setdefault(_SESSIONS, [])
    if not any(session is other for other in known):
        known.append(session)


def sessions_of(config: pytest.Config) -> list[Session]:
    """The sessions of this process."""
    return config.stash.get(_SESSIONS, [])


def record_of(config: pytest.Config) -> RunRecord | None:
    """The merged record of this run over all processes; ``None`` if nothing was judged."""
    own = own_record(config)
    return merge_records([*config.stash.get(_RECEIVED, []), *([own] if own is not None else [])])


def own_record(config: pytest.Config) -> RunRecord | None:
    """The record of this process. The folders of a case are known only in its own process."""
    return merge_records([session.record() for session in sessions_of(config)])


def annotations_of(config: pytest.Config) -> list[str]:
    """The annotations for GitHub of all processes. Paths of specs and lines of checks are not part of a record."""
    from qdqspec.report.write import MOST_ANNOTATIONS, annotation_lines

    own = own_record(config)
    lines = [*config.stash.get(_ANNOTATIONS, []), *(annotation_lines(own, config.rootpath) if own else [])]
    return lines[:MOST_ANNOTATIONS]


def compare_runtimes(config: pytest.Config) -> None:
    """Compare the runtimes of cases that this process judged; an error is reported with the results."""
    for session in sessions_of(config):
        try:
            if session.compare_runtimes():  # which starts processes again
                session.find_common()
                session.close()
        except QdqspecError as error:
            session.close()
            config.stash.setdefault(TROUBLES, []).append(str(error))


def hand_over(config: pytest.Config) -> None:
    """In a worker of pytest-xdist: write the results of its cases, and send the record."""
    from qdqspec.report.record import record_to_json

    record = own_record(config)
    if record is None:
        return
    worker: Any = config
    worker.workeroutput[_RECORD] = json.dumps(record_to_json(record))
    worker.workeroutput[_LINES] = annotations_of(config)
    troubles = config.stash.setdefault(TROUBLES, [])
    try:
        write_results(record)
    except OutputError as error:
        troubles.append(str(error))
    worker.workeroutput[_TROUBLES] = troubles


def receive(config: pytest.Config, worker_output: dict[str, Any]) -> None:
    """In the controller: receive the message of a worker. A worker that crashed has sent none."""
    if _RECORD in worker_output:
        from qdqspec.report.record import record_from_json

        config.stash.setdefault(_RECEIVED, []).append(record_from_json(json.loads(worker_output[_RECORD])))
        config.stash.setdefault(_ANNOTATIONS, []).extend(worker_output[_LINES])
        config.stash.setdefault(TROUBLES, []).extend(worker_output[_TROUBLES])


def merge_records(records: Sequence[RunRecord]) -> RunRecord | None:
    """Merge the parts of a run's record; a case whose checks ran in several processes is joined.

    Parts arrive in the order in which workers end, so their cases are sorted.
    """
    cases: dict[tuple[object, str], CaseRecord] = {}
    for piece in (case for record in records for case in record.cases):
        key = (piece.evidence.case.spec, piece.evidence.case.name)
        cases[key] = _joined(cases[key], piece) if key in cases else piece
    if not cases:
        return None
    return RunRecord(
        version=records[0].version,
        started=min(record.started for record in records),
        seconds=max(record.seconds for record in records),
        cases=tuple(cases[key] for key in (cases if len(records) == 1 else sorted(cases, key=str))),
        runtimes=tuple(found for record in records for found in record.runtimes),
        common=tuple(found for record in records for found in record.common),
    )


def _joined(first: CaseRecord, second: CaseRecord) -> CaseRecord:
    missing = {
        field.name: getattr(second.evidence, field.name)
        for field in fields(Evidence)
        if getattr(first.evidence, field.name) in (None, (), {})
    }
    known = {result.id for result in first.results}
    added = tuple(result for result in second.results if result.id not in known)
    return CaseRecord(evidence=replace(first.evidence, **missing), results=first.results + added)


def write_results(record: RunRecord) -> None:
    """Write ``result.json`` of each case, and ``tune.json`` of cases on several runtimes."""
    from qdqspec.report.write import write_comparisons
    from qdqspec.report.write import write_results as write

    write(record)
    write_comparisons(record)


def write_reports(record: RunRecord, settings: Settings) -> list[Path]:
    """Write the files of ``--qdq-report`` and ``--qdq-json``, and return their paths."""
    from qdqspec.report.write import is_github, write_json
    from qdqspec.report.write import write_reports as write

    write(record, settings.report)
    files = [path for path in settings.report if not is_github(path)]
    if settings.json is None:
        return files
    write_json(record, settings.json)
    return [*files, settings.json]


def case_scheduling(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """The scheduler for ``--dist load``, which ``-n`` implies, if the run has specs; else ``None``.

    A case is one unit of work, and so is a spec whose cases choose their runtimes, because these are timed together at
    the end. Every other test is a unit of its own, as with pytest-xdist's scheduler. Another ``--dist`` is not changed.
    """
    named = (config.invocation_params.dir / arg.partition("::")[0] for arg in config.args)
    if config.getoption("dist") != "load" or not any(map(is_spec, find_specs(filter(Path.exists, named)))):
        return None
    from xdist.scheduler import LoadScopeScheduling

    settings = settings_of(config)

    @lru_cache
    def one_unit(spec: str) -> bool:
        return chooses_runtimes(config.rootpath / spec, settings)

    class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
        """Tests in units of work."""

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid, one_unit)

    return CaseScheduling(config, log)


def unit_of(nodeid: str, one_unit: Callable[[str], bool]) -> str:
    """The unit of work of a test: its case, its spec where that is ``one_unit``, or itself."""
    file, _, rest = nodeid.partition("::")
    if not rest or not is_spec(Path(file)):
        return nodeid
    return file if one_unit(file) else nodeid.rpartition("::")[0]


def chooses_runtimes(spec: Path, settings: Settings) -> bool:
    """Whether cases of a spec name their runtimes; false for a spec with errors."""
    try:
        return any(case.backend is not None for case in load_cases(spec, settings))
    except QdqspecError:  # the worker that collects the spec reports it
        return False
