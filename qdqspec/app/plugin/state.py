"""The settings and the state of a pytest run in one process, and what workers of pytest-xdist send to the controller.

Imports pytest and the standard library only; all checks of a case run on one worker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from qdqspec._core.config import OPTIONS, Settings, flags_given, load_settings
from qdqspec._core.records import from_data, to_data
from qdqspec.app.cases import find_specs, is_spec, load_cases
from qdqspec.app.plugin._compat import is_worker
from qdqspec.errors import OutputError, QdqspecError
from qdqspec.types import Case, CaseRecord, CheckResult, CheckSpec, DeviceKey, Evidence, RunRecord

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

    from qdqspec.app.evidence.baselines import Name, Renewal
    from qdqspec.app.session import Session

# Options that may load native code or name a scheduler.
_GUARDED = [option for option in OPTIONS if option.command_line or option.name == "backend-option"]
_SETTINGS = pytest.StashKey[Settings]()
_SENT = "qdqspec"  # key in a worker's output

CaseName: TypeAlias = tuple[str, str]  # of a spec and a case


# ---- settings ------------------------------------------------------------------------------------


def asked_for(config: pytest.Config) -> bool:
    """Whether any ``--qdq-*`` option was given."""
    return bool(flags_given(vars(config.option)))


def settings_of(config: pytest.Config) -> Settings:
    """The settings of this run. Reads environment and ``pyproject.toml`` on first use; may raise `ConfigError`.

    Options of ``addopts`` that can load native code count as configured by a file. In a worker of pytest-xdist all
    options come from the controller, which has checked them.
    """
    if _SETTINGS in config.stash:
        return config.stash[_SETTINGS]
    flags, configured = flags_given(vars(config.option)), {}
    words = [*map(str, config.invocation_params.args)]
    for guarded in _GUARDED if not is_worker(config) else ():
        key, option, values = guarded.key, f"--qdq-{guarded.name}", flags.get(guarded.key)
        written: set[object] = {
            word.removeprefix(f"{option}=") for word in words if word.startswith(f"{option}=")
        }
        written |= {value for word, value in pairwise(words) if word == option}
        if values is not None and not written.issuperset(values if isinstance(values, list) else [values]):
            configured[key] = flags.pop(key)
    config.stash[_SETTINGS] = load_settings(
        config.rootpath, flags=flags, configured=configured, cwd=config.invocation_params.dir
    )
    return config.stash[_SETTINGS]


# ---- state ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of a run, as far as this process knows it.

    ``unfinished`` counts the selected checks of each case that did not run yet, ``finished`` are the cases that
    `pytest_qdq_case_finished` was called for. ``obsolete`` are baseline entries that no check uses. ``troubles`` are
    errors that are reported with the results, and make the run fail. ``errors`` are failed checks that the session has
    not recorded: an error in a fixture, ``pytest.fail`` in a metric, a timeout of pytest-timeout.
    """

    sessions: list[Session] = field(default_factory=list)
    unfinished: Counter[CaseName] = field(default_factory=Counter)
    finished: set[CaseName] = field(default_factory=set)
    obsolete: set[tuple[Path, Name]] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)
    errors: dict[tuple[CaseName, str], CaseRecord] = field(default_factory=dict)
    interrupted: bool = False
    # of workers of pytest-xdist
    judged: dict[tuple[str, CaseName], RunRecord] = field(default_factory=dict)  # by worker: a case so far
    received: list[RunRecord] = field(default_factory=list)  # all of a worker, from its end
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

    def note_error(self, case: Case, check: CheckSpec, backend: str, error: BaseException) -> None:
        """Record a check as failed with an error that its session may not have seen."""
        from qdqspec.checks import raised

        name = case.backend or backend
        evidence = Evidence(case=case, backend=name, target=name, device=DeviceKey(key=""), model_sha256="")
        result = CheckResult(id=check.id, kind=check.kind, severity=check.severity, verdict=raised(error))
        self.errors[name_of(case), check.id] = CaseRecord(evidence=evidence, results=(result,))

    def own_record(self) -> RunRecord | None:
        """The record of this process. The folders of a case are known only in its own process."""
        records = [session.record() for session in self.sessions]
        if records and self.errors:
            records.insert(0, replace(records[0], cases=tuple(self.errors.values()), runtimes=()))
        return merge_records(records)

    def whole_record(self) -> RunRecord | None:
        """The record of this run over all processes; ``None`` if nothing was judged."""
        own = self.own_record()
        return merge_records([*self.judged.values(), *self.received, *([own] if own else [])])

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
    """Merge the parts of a run's record, sorted by case; parts of a case are joined, and the last result counts."""
    cases: dict[CaseName, CaseRecord] = {}
    for piece in (case for record in records for case in record.cases):
        name = name_of(piece.evidence.case)
        earlier = cases.get(name, piece)
        missing = {
            field.name: getattr(earlier.evidence, field.name)
            for field in fields(Evidence)
            if getattr(piece.evidence, field.name) in (None, "", (), {}, DeviceKey(key=""))
        }
        results = {result.id: result for result in (*earlier.results, *piece.results)}
        cases[name] = CaseRecord(evidence=replace(piece.evidence, **missing), results=tuple(results.values()))
    if not cases:
        return None
    return RunRecord(
        version=records[0].version,
        started=min(record.started for record in records),
        seconds=max(record.seconds for record in records),
        cases=tuple(cases[name] for name in (cases if len(records) == 1 else sorted(cases))),
        runtimes=tuple(found for record in records for found in record.runtimes),
    )


# ---- pytest-xdist --------------------------------------------------------------------------------


def case_so_far(config: pytest.Config, case: Case) -> str | None:
    """In a worker: the record of a case so far, for the controller: a worker that ends early sends no other."""
    record = state_of(config).own_record()
    if record is None:
        return None
    from qdqspec.app.report.record import record_to_json

    cases = tuple(each for each in record.cases if name_of(each.evidence.case) == name_of(case))
    worker: Any = config
    sent = [worker.workerinput["workerid"], *name_of(case), record_to_json(replace(record, cases=cases))]
    return json.dumps(sent)


def receive_case(config: pytest.Config, sent: str) -> None:
    """In the controller: receive the record of a case so far."""
    from qdqspec.app.report.record import record_from_json

    worker, spec, case, record = json.loads(sent)
    state_of(config).judged[worker, (spec, case)] = record_from_json(record)


def hand_over(config: pytest.Config) -> None:
    """In a worker: write the results of its cases; send its record and its baseline entries."""
    state = state_of(config)
    record, sent = state.own_record(), dict[str, Any]()
    if record is not None:
        from qdqspec.app.report.record import record_to_json
        from qdqspec.app.report.write import annotation_lines, write_results

        # Paths of specs and lines of checks are not part of a record.
        sent["annotations"] = annotation_lines(record, config.rootpath)
        sent["record"] = json.dumps(record_to_json(record))
        try:
            write_results(record)
        except OutputError as error:
            state.troubles.append(str(error))
    worker: Any = config
    worker.workeroutput[_SENT] = {
        **sent,
        "troubles": state.troubles,
        "renewals": to_data(state.all_renewals()),
        "obsolete": [[str(file), *name] for file, name in sorted(state.obsolete)],
    }


def receive(config: pytest.Config, worker_output: dict[str, Any]) -> None:
    """In the controller: receive the message of a worker. A worker that crashed has sent none."""
    sent = worker_output.get(_SENT)
    if sent is None:
        return
    state = state_of(config)
    state.troubles += sent["troubles"]
    state.obsolete.update((Path(file), (case, check)) for file, case, check in sent["obsolete"])
    if "record" in sent:
        from qdqspec.app.report.record import record_from_json

        state.received.append(record_from_json(json.loads(sent["record"])))
        state.annotations += sent["annotations"]
    if sent["renewals"]:
        from qdqspec.app.evidence.baselines import Renewal

        state.renewals += [from_data(Renewal, data) for data in sent["renewals"]]


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

        def remove_node(self, node: Any) -> Any:
            """Remove a worker; after a crash, its finished units are not assigned again, as units without tests."""
            units = self.assigned_work[node].items()
            self.assigned_work[node] = {name: unit for name, unit in units if not all(unit.values())}
            return super().remove_node(node)

        def schedule(self) -> None:
            """Assign units. A worker waits until it has two tests, or the end, also one that replaces another."""
            super().schedule()
            for node in self.nodes if self.collection else ():
                while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                    self._reschedule(node)

    return CaseScheduling(config, log)


def unit_of(nodeid: str, one_unit: Callable[[str], bool]) -> str:
    """The unit of work of a test: its spec if the spec is ``one_unit``, else its case; a plain test is its own unit."""
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
