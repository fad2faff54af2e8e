"""The client's side of a cluster: finds workers, runs each case on one of them, and is a session for its callers.

A case is one task of Dask. A worker returns the answer of a case and the files that the case wrote. The client writes
them, with the baselines and the cache; a worker keeps nothing.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future as Outcome, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec import __version__
from qdqspec._core.config import Settings, claim_folder
from qdqspec._core.files import write_whole
from qdqspec._core.locks import RunLock
from qdqspec._core.records import from_data
from qdqspec._core.store import MANIFEST
from qdqspec.app.cluster.address import Address, require_distributed
from qdqspec.app.cluster.request import DISK, Answer, pack
from qdqspec.app.cluster.worker import Device, WorkerInfo, run_case
from qdqspec.app.evidence.baselines import Renewal
from qdqspec.app.preparation.stored import CORRECTIONS, HEADER, JOURNAL, about
from qdqspec.app.report.record import record_from_json
from qdqspec.app.session import Session
from qdqspec.app.session.session import case_key
from qdqspec.backends import Availability
from qdqspec.errors import BackendUnavailableError, ConfigError, QdqspecError, StateError
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

if TYPE_CHECKING:
    from distributed import Client, Future

ATTEMPTS = 4
_CONNECT = 10.0
_LOOK = 0.1  # seconds between looks at a case
_MISSING = 20.0  # seconds for which a device may have no worker: a Nanny restarts its own within a few


class _LostError(Exception):
    """An attempt failed because of its worker: the case can run elsewhere."""


@dataclass(slots=True)
class _Run:
    """One attempt of a case: its task, and the worker that runs it, once it has begun."""

    watch: Callable[[Progress], None]
    future: Future | None = None
    worker: str = ""


class Cluster:
    """A connection to a scheduler. Raises `ConfigError` if none answers. ``note`` receives remarks on lost workers."""

    def __init__(
        self, address: Address, certificates: Path, *, note: Callable[[str], None] | None = None
    ) -> None:
        from distributed import Client

        self.address = address
        self._note = note or logging.getLogger("qdqspec").warning
        self._topic = f"qdqspec-{secrets.token_hex(8)}"
        self._runs: dict[str, _Run] = {}
        self._closing = threading.Event()
        logging.getLogger("distributed").setLevel(logging.ERROR)
        try:
            self._client: Client = Client(
                str(address),
                security=address.security(certificates),
                timeout=_CONNECT,
                set_as_default=False,
                direct_to_workers=True,
                name="qdqspec",
            )
        except (OSError, TimeoutError, ValueError) as error:
            raise address.unanswered(error) from None
        self._client.subscribe_topic(self._topic, self._on_event)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The connected workers of qdqspec, by host and address."""
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        found = (WorkerInfo.of(address, each, time.time()) for address, each in known.items())
        return tuple(sorted((w for w in found if w is not None), key=lambda w: (w.host, w.address)))

    def device(self, backend: str, key: str | None = None) -> Device:
        """The device that a backend's cases run on: the one with that key, or the only one there is.

        Workers with another version of qdqspec are not used, because that may measure and store otherwise. Raises
        `BackendUnavailableError` or `ConfigError`, naming the backends and devices of the workers.
        """
        fitting = [each for each in self.workers() if each.version == __version__]
        devices = [device for each in fitting for device in each.devices if device.backend == backend]
        found = {each.key: each for each in devices if key is None or each.key == key}
        if not found:
            wanted = f"backend {backend}" + (f" on device {key}" if key is not None else "")
            raise BackendUnavailableError(
                f"no worker at {self.address} has {wanted}", cure=f"there is: {self._inventory()}"
            )
        if len(found) > 1:
            raise ConfigError(
                f"backend {backend} has several devices at {self.address}, and one is wanted",
                cure=f"choose with --qdq-cluster-device: {', '.join(sorted(found))}",
            )
        return next(iter(found.values()))

    def run(
        self,
        request: Mapping[str, Any],
        files: Mapping[str, bytes],
        device: Device,
        name: str,
        watch: Callable[[Progress], None],
    ) -> tuple[Any, Mapping[str, bytes]]:
        """Run a case, again if its worker is lost; its answer and files by path. Raises `StateError` after four."""
        for _ in range(ATTEMPTS):
            key = f"qdqspec-{secrets.token_hex(8)}"
            run = self._runs[key] = _Run(watch)
            try:
                return self._attempt(key, run, {**request, "topic": self._topic}, files, device)
            except _LostError:
                self._note(f"{name}: worker {run.worker} was lost; the case is run elsewhere")
            finally:
                del self._runs[key]
                if run.future is not None:
                    with suppress(Exception):
                        run.future.cancel()
        raise StateError(
            f"{name}: {ATTEMPTS} workers were lost while they ran this case",
            cure="see the logs of the workers, and run the case again",
        )

    def close(self) -> None:
        """Stop the cases of this client, and disconnect."""
        self._closing.set()
        with suppress(Exception):
            self._client.cancel([run.future for run in list(self._runs.values()) if run.future is not None])
            self._client.close(timeout=5)

    def _attempt(
        self, key: str, run: _Run, request: Mapping[str, Any], files: Mapping[str, bytes], device: Device
    ) -> tuple[Any, Mapping[str, bytes]]:
        """Run the task of a case. Its files are sent to a worker directly, so that the scheduler does not hold them."""
        from distributed import KilledWorker

        try:
            (sent,) = self._client.scatter([dict(files)], workers=self._workers_with(device), hash=False)
        except (OSError, TimeoutError):
            raise _LostError from None
        run.future = self._client.submit(
            run_case, dict(request), sent, key=key, resources={device.resource: 1}, pure=False
        )
        while not run.future.done():
            self._workers_with(device)
            time.sleep(_LOOK)
        if run.future.status == "finished":
            found: tuple[Any, Mapping[str, bytes]] = run.future.result()
            return found
        self._require_open()
        error = run.future.exception() if run.future.status == "error" else None
        if error is None or isinstance(error, KilledWorker):
            raise _LostError
        if isinstance(error, QdqspecError):
            raise error
        raise StateError(f"the case was not completed: {error}", cure="run it again") from error

    def _workers_with(self, device: Device) -> list[str]:
        """The addresses of the workers with a device; waits for one. Raises `BackendUnavailableError` without one."""
        end = time.monotonic() + _MISSING
        while True:
            self._require_open()
            found = [each.address for each in self.workers() if each.offers(device)]
            if found:
                return found
            if time.monotonic() > end:
                raise BackendUnavailableError(
                    f"no worker at {self.address} has device {device.key} any more",
                    cure=f"there is: {self._inventory()}",
                )
            time.sleep(_LOOK)

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise StateError("the run was interrupted")

    def _inventory(self) -> str:
        """The devices of all workers, as text."""
        found: Counter[str] = Counter()
        for worker in self.workers():
            differs = f" with qdqspec {worker.version}, which differs from {__version__} here"
            note = differs if worker.version != __version__ else ""
            found.update(f"{each.backend} on {each.key}{note}" for each in worker.devices)
        return ", ".join(f"{text} ({count})" for text, count in sorted(found.items())) or "no worker at all"

    def _on_event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Receive a message of a case: that it begins on a worker, or its progress."""
        _, message = event
        run = self._runs.get(message["job"])
        if run is None:
            return
        run.worker = message["worker"]
        if message["progress"] is not None:
            run.watch(from_data(Progress, message["progress"]))


# ---- the session ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
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
        self._futures: dict[object, Outcome[_Result]] = {}
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

    def _done(self) -> Iterator[tuple[set[str], _Result]]:
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

    def _outcome(self, case: Case) -> _Result:
        """The outcome of a case; it is started now unless it was started ahead, with the other expected ones."""
        future, *_ = map(self._future, (case, *self._expected))
        self._expected = ()
        outcome = future.result()
        self._judged.setdefault(case_key(case, self.settings.output), set())
        return outcome

    def _future(self, case: Case) -> Outcome[_Result]:
        key = case_key(case, self.settings.output)
        if key not in self._futures:
            self._futures[key] = self._pool.submit(self._run, case)
        return self._futures[key]

    def _run(self, case: Case) -> _Result:
        """Send the files of a case to a worker, and write what the case wrote there: its results, then the cache.

        An unfinished journal with its corrections and the cached searches of the case are sent too.
        """
        folder, device = self.output(case), self._device_named(case.backend or self.settings.backend)
        with RunLock(folder, self._note):
            more = [folder / name for name in (JOURNAL, HEADER, CORRECTIONS) if (folder / name).is_file()]
            if not self.settings.no_cache:
                manifests = sorted(self._store.folder.glob(f"[!.]*/{MANIFEST}"))
                more += [each.parent for each in manifests if about(each.parent).get("case") == case.name]
            settings = replace(self.settings, time_limit=self._seconds_left())
            request, sent = pack(case, settings, folder, more)
            contents = {name: path.read_bytes() for name, path in sent.items()}
            data, files = self._cluster.run(request, contents, device, case.name, self._tell)
            # each path in the job's folder becomes the path here
            inner, own = (json.dumps(path)[1:-1] for path in (f"{data['folder']}/", folder.anchor))
            answer = from_data(Answer, json.loads(json.dumps(data).replace(inner, own)))
            if answer.failure is not None:
                raise answer.failure.error()
            self._write({Path(folder.anchor, name.removeprefix(f"{DISK}/")): files[name] for name in files})
        record = record_from_json(answer.record).cases[0]
        return _Result(
            record=replace(record, evidence=replace(record.evidence, case=case, output=folder)),
            renewals=tuple(from_data(Renewal, each) for each in answer.renewals),
            errors={name: failure.error() for name, failure in answer.errors.items()},
        )

    def _write(self, files: Mapping[Path, bytes]) -> None:
        """Write the results of a case, then the cache; the store writes the manifest of an entry."""
        entries: dict[str, dict[Path, bytes]] = {}
        for path, content in files.items():
            if not path.is_relative_to(self._store.folder):
                write_whole(path, content, what="the result", make_folder=True)
            elif len((place := path.relative_to(self._store.folder)).parts) > 1:
                entries.setdefault(place.parts[0], {})[Path(*place.parts[1:])] = content
        if self.settings.no_cache:
            return

        def fill(entry: Path, parts: Mapping[Path, bytes]) -> None:
            for name, content in parts.items():
                if name != Path(MANIFEST):
                    (entry / name).parent.mkdir(parents=True, exist_ok=True)
                    (entry / name).write_bytes(content)

        for key, parts in entries.items():
            if Path(MANIFEST) in parts:
                self._store.discard(key)  # the worker has just measured it
                self._store.put(key, partial(fill, parts=parts))

    def _note(self, text: str) -> None:
        """Show a remark at once: on the progress display if there is one, else in the log."""
        self._tell(Progress(case="cluster", phase="waiting", done=0, total=0, waiting=text))

    def _tell(self, progress: Progress) -> None:
        with self._watching:  # cases run in several threads
            super()._tell(progress)
