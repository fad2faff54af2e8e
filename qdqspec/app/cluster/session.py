"""A session whose cases run on the workers of a cluster.

It has the interface of `Session`. A worker returns the answer of a case and the files that the case wrote. The client
writes them, with the baselines and the cache; a worker keeps nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from qdqspec._core.config import Settings, claim_folder
from qdqspec._core.files import write_whole
from qdqspec._core.records import from_data
from qdqspec._core.store import MANIFEST
from qdqspec.app.cluster.address import Address, require_distributed
from qdqspec.app.cluster.client import Cluster
from qdqspec.app.cluster.request import CACHE, OUTPUT, Answer, pack
from qdqspec.app.cluster.worker import Device
from qdqspec.app.preparation.stored import CORRECTIONS, HEADER, JOURNAL, about
from qdqspec.app.report.record import record_from_json
from qdqspec.app.session import Session
from qdqspec.app.session.session import case_key
from qdqspec.backends import Availability
from qdqspec.checks import Renewal
from qdqspec.errors import ConfigError, QdqspecError
from qdqspec.timing import RunLock
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
        found = self._outcome(case).record.evidence.search
        if found is None:
            raise QdqspecError("the search did not finish", where=case.name)
        return found

    def evidence(self, case: Case, needs: frozenset[EvidenceKind]) -> Evidence:  # noqa: ARG002 - a worker gathers all
        """The evidence of a case."""
        return self._outcome(case).record.evidence

    def judge(self, case: Case, check: CheckSpec) -> CheckResult:
        """The verdict of a check, judged on the worker. Raises its error."""
        outcome = self._outcome(case)
        self._judged[case_key(case, self.settings.output)].add(check.id)
        if check.id in outcome.errors:
            raise outcome.errors[check.id]
        return next(result for result in outcome.record.results if result.id == check.id)

    def output(self, case: Case) -> Path:
        """The output folder of the case."""
        return claim_folder(self.settings, case)

    def record(self) -> RunRecord:
        """The record of all requested cases, with the results of the checks that were judged."""
        cases = [
            replace(own.record, results=tuple(result for result in own.record.results if result.id in judged))
            for judged, own in self._done()
        ]
        return self._run_record((*cases, *self._skipped.values()))

    def renewals(self) -> tuple[Renewal, ...]:
        """Baseline entries measured on the workers."""
        return tuple(renewal for _, outcome in self._done() for renewal in outcome.renewals)

    def _done(self) -> Iterator[tuple[set[str], _Outcome]]:
        """The judged checks and the outcome of each requested case that has run."""
        for key, judged in self._judged.items():
            future = self._futures[key]
            if future.done() and future.exception() is None:
                yield judged, future.result()

    def close(self) -> None:
        """Stop all jobs on the workers, and disconnect."""
        for future in self._futures.values():
            future.cancel()
        self._cluster.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _outcome(self, case: Case) -> _Outcome:
        """The outcome of a case; it is started now unless it was started ahead, with the other expected ones."""
        future, *_ = map(self._future, (case, *self._expected))
        self._expected = ()
        outcome = future.result()
        self._judged.setdefault(case_key(case, self.settings.output), set())
        return outcome

    def _future(self, case: Case) -> Future[_Outcome]:
        key = case_key(case, self.settings.output)
        if key not in self._futures:
            self._futures[key] = self._pool.submit(self._run, case)
        return self._futures[key]

    def _run(self, case: Case) -> _Outcome:
        """Send the files of a case to a worker, and write what the case wrote there: its results, then the cache.

        An unfinished journal with its corrections and the cached searches of the case are sent too.
        """
        folder, device = self.output(case), self._device_named(case.backend or self.settings.backend)
        with RunLock(folder, self._note):
            package = pack(case, replace(self.settings, time_limit=self._seconds_left()))
            for name in (JOURNAL, HEADER, CORRECTIONS):
                if (folder / name).is_file():
                    package.files[f"{OUTPUT}/{name}"] = folder / name
            if not self.settings.no_cache:
                for manifest in sorted(self._store.folder.glob(f"[!.]*/{MANIFEST}")):
                    if about(manifest.parent).get("case") == case.name:
                        package.add_folder(f"{CACHE}/{manifest.parent.name}", manifest.parent)
            contents = {name: path.read_bytes() for name, path in package.files.items()}
            data, files = self._cluster.run(package.request, contents, device, case.name, self._tell)
            text = json.dumps(data)  # each path in the job's folder becomes the path here
            for sent, own in sorted(
                [(OUTPUT, folder), (CACHE, self._store.folder), *package.places], reverse=True
            ):
                text = text.replace(json.dumps(f"{data['folder']}/{sent}")[1:-1], json.dumps(str(own))[1:-1])
            answer = from_data(Answer, json.loads(text))
            if answer.failure is not None:
                raise answer.failure.error()
            if answer.skipped:
                raise ConfigError(f"the worker cannot run the case: {answer.skipped}", where=case.name)
            self._write(files, folder)
        record = record_from_json(answer.record).cases[0]
        return _Outcome(
            record=replace(record, evidence=replace(record.evidence, case=case, output=folder)),
            renewals=tuple(from_data(Renewal, each) for each in answer.renewals),
            errors={name: failure.error() for name, failure in answer.errors.items()},
        )

    def _write(self, files: Mapping[str, bytes], folder: Path) -> None:
        """Write the results of a case, then the cache; the store writes the manifest of an entry."""
        entries: dict[str, dict[str, bytes]] = {}
        for name, content in files.items():
            top, _, rest = name.partition("/")
            if top == OUTPUT:
                write_whole(folder / rest, content, what="the result", make_folder=True)
            elif "/" in rest:
                key, _, inner = rest.partition("/")
                entries.setdefault(key, {})[inner] = content
        if self.settings.no_cache:
            return

        def fill(entry: Path, parts: Mapping[str, bytes]) -> None:
            for name, content in parts.items():
                if name != MANIFEST:
                    (entry / name).parent.mkdir(parents=True, exist_ok=True)
                    (entry / name).write_bytes(content)

        for key, parts in entries.items():
            if MANIFEST in parts:
                self._store.discard(key)  # the worker has just measured it
                self._store.put(key, partial(fill, parts=parts))

    def _note(self, text: str) -> None:
        """Show a remark at once: on the progress display if there is one, else in the log."""
        self._tell(Progress(case="cluster", phase="waiting", done=0, total=0, waiting=text))

    def _tell(self, progress: Progress) -> None:
        with self._watching:  # cases run in several threads
            super()._tell(progress)
