"""A session whose cases run on the workers of a cluster.

It has the interface of `Session`. The client alone writes journals, results, baselines and the cache: a worker
sends its measurements, and keeps nothing.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from qdqspec._core.codec import from_data
from qdqspec._core.config import Settings, claim_folder
from qdqspec._core.files import copy_whole, explained
from qdqspec.app.cluster.address import Address, require_distributed
from qdqspec.app.cluster.case_process import Answer
from qdqspec.app.cluster.client import Cluster
from qdqspec.app.cluster.inventory import Device
from qdqspec.app.cluster.request import CACHE, OUTPUT, Package, pack
from qdqspec.app.preparation.build_logs import HEADER, BuildLogs, open_journal
from qdqspec.app.preparation.cached import CORRECTIONS, JOURNAL, about
from qdqspec.app.report.record import record_from_json
from qdqspec.app.session import Session
from qdqspec.app.session.session import case_key
from qdqspec.backends.base import Availability
from qdqspec.checks.baseline.store import Renewal
from qdqspec.errors import ConfigError, QdqspecError
from qdqspec.search.journal import trial_from_json
from qdqspec.timing.lock import RunLock
from qdqspec.timing.store import MANIFEST, Store
from qdqspec.types import (
    Case,
    CaseRecord,
    CheckResult,
    CheckSpec,
    Evidence,
    EvidenceKind,
    Progress,
    RunRecord,
    SearchResult,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A case that has run: its record, baselines to write, and the errors of its checks."""

    record: CaseRecord
    renewals: tuple[Renewal, ...] = ()
    errors: Mapping[str, QdqspecError] = field(default_factory=dict)


class ClusterSession(Session):
    """Runs each case as one task on a worker. ``expected`` are cases of this run that may be started ahead of time.

    Raises `QdqspecError` if no scheduler answers, or no worker has the backend or device.
    """

    def __init__(self, settings: Settings, *, expected: Iterable[Case] = (), **more: Any) -> None:
        assert settings.cluster is not None
        require_distributed()
        super().__init__(settings, **more)
        self._cluster = Cluster(
            Address.parse(settings.cluster), settings.root / settings.cluster_tls, note=self._note
        )
        try:
            self._expected = tuple(expected)
            wanted = {case.backend or settings.backend for case in self._expected} or {settings.backend}
            self._devices: dict[str, Device] = {}
            if len(wanted) == 1:  # else each case reports the device that it lacks
                self._device_named(*wanted)
            slots = max(1, len(self._cluster.workers()))
        except BaseException:
            self._cluster.close()
            raise
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="qdqspec-case")
        self._futures: dict[object, Future[_Outcome]] = {}
        self._judged: dict[object, set[str]] = {}
        self._watching = threading.Lock()
        self._notes: list[str] = []

    def availability(self, case: Case) -> Availability:
        """Whether the device of the cluster has one of the case's formats."""
        device = self._device_named(case.backend or self.settings.backend)
        here, other = f"on {device.key}", "another device"
        found = Availability(usable=True, facts=device.facts)
        return found.with_formats(case, device.formats, device.lacking, (device.backend, here, other))

    def target(self, case: Case) -> str:
        """The backend of a case and its variant, on the workers."""
        return self._device_named(case.backend or self.settings.backend).target

    def _device_named(self, backend: str) -> Device:
        if backend not in self._devices:
            self._devices[backend] = self._cluster.device(backend, self.settings.cluster_device)
        return self._devices[backend]

    def search(self, case: Case) -> SearchResult:
        """The result of the search."""
        found = self._record_of(case).evidence.search
        if found is None:
            raise QdqspecError("the search did not finish", where=case.name)
        return found

    def evidence(self, case: Case, needs: frozenset[EvidenceKind]) -> Evidence:  # noqa: ARG002 - a worker gathers all
        """The evidence of a case."""
        return self._record_of(case).evidence

    def judge(self, case: Case, check: CheckSpec) -> CheckResult:
        """The verdict of a check, judged on the worker. Raises its error."""
        outcome = self._outcome(case)
        self._judged.setdefault(case_key(case), set()).add(check.id)
        if check.id in outcome.errors:
            raise outcome.errors[check.id]
        return next(result for result in outcome.record.results if result.id == check.id)

    def output(self, case: Case) -> Path:
        """The output folder of the case."""
        return claim_folder(self.settings, case)

    def record(self) -> RunRecord:
        """The record of all cases that were asked for; of their checks, those that were judged."""
        cases = []
        for key, judged in self._judged.items():
            future = self._futures[key]
            if future.done() and future.exception() is None:
                record = future.result().record
                results = tuple(result for result in record.results if result.id in judged)
                cases.append(replace(record, results=results))
        return self._run_record((*cases, *self._skipped.values()))

    def renewals(self) -> tuple[Renewal, ...]:
        """Baseline entries measured on the workers."""
        done = (self._futures[key] for key in self._judged)
        found = (future.result() for future in done if future.done() and future.exception() is None)
        return tuple(renewal for outcome in found for renewal in outcome.renewals)

    def close(self) -> None:
        """Stop all jobs on the workers, and disconnect."""
        for future in self._futures.values():
            future.cancel()
        self._cluster.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cluster.close()
        super().close()

    def _record_of(self, case: Case) -> CaseRecord:
        outcome = self._outcome(case)
        self._judged.setdefault(case_key(case), set())
        return outcome.record

    def _outcome(self, case: Case) -> _Outcome:
        """The outcome of a case; it is started now unless it was started ahead, with the other expected ones."""
        first = self._future(case)
        for other in self._expected:
            self._future(other)
        self._expected = ()
        return first.result()

    def _future(self, case: Case) -> Future[_Outcome]:
        key = case_key(case)
        if key not in self._futures:
            self._futures[key] = self._pool.submit(self._run, case)
        return self._futures[key]

    def _run(self, case: Case) -> _Outcome:
        device = self._device_named(case.backend or self.settings.backend)
        with RunLock(self.output(case), self._note):
            run = _CaseRun(self, case, self.output(case))
            try:
                self._cluster.run(run, device, case.name, self.settings.build_limit)
            finally:
                run.close()
        return run.outcome()

    def _note(self, text: str) -> None:
        """Show a remark at once: on the progress display if there is one, else in the log."""
        self._tell(Progress(case="cluster", phase="waiting", done=0, total=0, waiting=text))

    def tell(self, progress: Progress) -> None:
        """Show progress; cases run in several threads."""
        with self._watching:
            if self.watch is not None:
                self.watch(progress)

    def settings_left(self) -> Settings:
        """The settings, with the remaining time limit of the run."""
        return replace(self.settings, time_limit=self._seconds_left())

    @property
    def store(self) -> Store:
        """The cache of finished searches."""
        return self._store


class _CaseRun:
    """One case on the client: its journal, its results, and the package for each attempt."""

    def __init__(self, session: ClusterSession, case: Case, folder: Path) -> None:
        self._session, self._case, self._folder = session, case, folder
        self._opened = ExitStack()
        self._journal: BuildLogs | None = None
        self._written = 0  # lines of the journal
        self._position = 0  # lines received in this attempt
        self._held: list[
            tuple[dict[str, Any], str]
        ] = []  # lines of the confirmation, until the results are written
        self._host = ""
        self._notes: list[str] = []
        self._answer: Answer | None = None
        self._package: Package | None = None

    def package(self) -> Package:
        """The case's files, with the journal as it is now and the cached searches of this case.

        The journal is sent without its header, which the worker writes when its case opens the journal.
        """
        settings = self._session.settings_left()
        if self._package is None:
            self._package = pack(self._case, settings)
        base = self._package
        package = Package(case=base.case, settings=base.settings, files=[*base.files], local=dict(base.local))
        for name in (JOURNAL, CORRECTIONS):
            if (self._folder / name).is_file():
                package.add(f"{OUTPUT}/{name}", self._folder / name)
        if not settings.no_cache:
            for manifest in sorted(self._session.store.folder.glob(f"[!.]*/{MANIFEST}")):
                if about(manifest.parent).get("case") == self._case.name:
                    package.add_folder(f"{CACHE}/{manifest.parent.name}", manifest.parent)
        return package

    def begin(self, worker: str, host: str) -> None:  # noqa: ARG002 - the host is what is recorded
        """An attempt begins: its lines are counted anew, and those known already are dropped."""
        self._position, self._host = 0, host
        self._held.clear()

    def news(self, news: Mapping[str, Any]) -> None:
        """Write new trials to the journal, and show progress."""
        for entry in news["entries"]:
            self._position += 1
            if self._position <= self._lines(news["header"]):
                continue
            if entry["phase"] == "confirm":
                self._held.append((entry, self._host))
            else:
                self._write(entry, self._host)
        if news["progress"] is not None:
            self._session.tell(from_data(Progress, news["progress"]))

    def _lines(self, header: Mapping[str, Any]) -> int:
        """The lines known so far; the journal is opened with the worker's header."""
        if self._journal is None:
            own = {name: value for name, value in header.items() if name != "schema_version"}
            self._journal = self._opened.enter_context(open_journal(self._folder, own, self._notes))
            self._written = len(self._journal.trials())
        return self._written + len(self._held)

    def _write(self, entry: dict[str, Any], host: str) -> None:
        assert self._journal is not None
        role = {"role": entry["role"]} if "role" in entry else {}
        self._journal.append(trial_from_json(entry), **role, host=host)
        self._written += 1

    def corrections(self, file: Path) -> None:
        """Write the corrections beside the journal."""
        with explained("the corrections", self._folder):
            copy_whole(file, self._folder / CORRECTIONS)

    def results(self, files: Mapping[str, Path], answer: Answer) -> None:
        """Write the results, then the lines that mark the journal as finished, then the cache."""
        own = (JOURNAL, HEADER)
        entries: dict[str, dict[str, Path]] = {}
        for name, path in files.items():
            top, _, rest = name.partition("/")
            if top == CACHE and rest.count("/"):
                key, _, inner = rest.partition("/")
                entries.setdefault(key, {})[inner] = path
            elif top == OUTPUT and not (rest in own and self._journal is not None):
                with explained("the results", self._folder):
                    (self._folder / rest).parent.mkdir(parents=True, exist_ok=True)
                    copy_whole(path, self._folder / rest)
        for entry, host in self._held:
            self._write(entry, host)
        self._held.clear()
        if not self._session.settings.no_cache:
            for key, parts in entries.items():
                if MANIFEST in parts:
                    self._session.store.discard(key)  # the worker has just measured it
                    self._session.store.put(key, partial(_fill, parts))
        self._answer = answer

    def outcome(self) -> _Outcome:
        """The outcome, with the client's paths. Raises the failure of the case."""
        answer = self._answer
        assert answer is not None
        if answer.failure is not None:
            raise _here(answer.failure.error(), self._mapped)
        if answer.skipped:
            raise ConfigError(f"the worker cannot run the case: {answer.skipped}", where=self._case.name)
        record = record_from_json(self._mapped(answer.record)).cases[0]
        evidence = replace(
            record.evidence,
            case=self._case,
            output=self._folder,
            warnings=(*record.evidence.warnings, *self._notes),
        )
        return _Outcome(
            record=replace(record, evidence=evidence),
            renewals=tuple(from_data(Renewal, self._mapped(each)) for each in answer.renewals),
            errors={name: _here(failure.error(), self._mapped) for name, failure in answer.errors.items()},
        )

    def _mapped(self, data: Any) -> Any:
        """Data with the paths of the job's folder replaced by the client's."""
        if self._answer is None or not self._answer.folder:
            return data
        text, folder = json.dumps(data), self._answer.folder
        assert self._package is not None
        places = [(OUTPUT, self._folder), (CACHE, self._session.store.folder), *self._package.places]
        for sent, own in sorted(places, reverse=True):
            text = text.replace(json.dumps(f"{folder}/{sent}")[1:-1], json.dumps(str(own))[1:-1])
        found: Any = json.loads(text)
        return found

    def close(self) -> None:
        """Close the journal."""
        self._opened.close()


def _here(error: QdqspecError, mapped: Any) -> QdqspecError:
    return type(error)(mapped(error.what), where=mapped(error.where), cure=mapped(error.cure))


def _fill(parts: Mapping[str, Path], folder: Path) -> None:
    """Copy the files of a cache entry, without its manifest, which the store writes."""
    for name, path in parts.items():
        if name != MANIFEST:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
