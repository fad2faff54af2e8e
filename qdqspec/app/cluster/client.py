"""The client's side of a cluster: finds workers, runs a case on one of them, and transfers its files.

Each attempt of a case is one task. The client asks the worker for news every second: an attempt whose worker does not
answer for the lease, or whose case makes no progress until its deadline, is given up, and the case is run elsewhere
with the trials known so far.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qdqspec import __version__
from qdqspec._core.codec import from_data, to_data
from qdqspec._core.files import file_digest
from qdqspec.app.cluster.address import Address
from qdqspec.app.cluster.case_process import Answer
from qdqspec.app.cluster.content import fetch_file, send_file
from qdqspec.app.cluster.inventory import Device, WorkerInfo
from qdqspec.app.cluster.request import FileEntry, Package
from qdqspec.app.cluster.worker import run_case
from qdqspec.errors import BackendUnavailableError, ConfigError, QdqspecError, StateError

if TYPE_CHECKING:
    from distributed import Client, Future

ATTEMPTS = 4
LEASE = 30.0  # seconds without an answer after which a worker counts as lost, and a client as gone
STUCK = (
    3600.0  # seconds without progress, beside the build limit, after which an attempt of a case is given up
)
_ASK = 0.5  # seconds between questions
_CONNECT = 10.0
_MISSING = 20.0  # seconds for which a device may have no worker: a Nanny restarts its own within a few


class LostError(Exception):
    """An attempt failed because of its worker: the case can run elsewhere."""


@contextmanager
def _transfer(worker: str) -> Iterator[None]:
    """A transfer: errors of the connection mean that the worker is lost."""
    try:
        yield
    except (OSError, TimeoutError, KeyError) as error:
        raise LostError(f"worker {worker} was lost during a transfer ({error})") from None


class Listener(Protocol):
    """Receives the reports of a case while it runs. Only the current attempt of the case calls it."""

    def package(self) -> Package:
        """The files for the next attempt, with all trials known so far."""
        ...

    def begin(self, worker: str, host: str) -> None:
        """An attempt begins on a worker; its journal is counted from the first line."""
        ...

    def news(self, news: Mapping[str, Any]) -> None:
        """News of the job."""
        ...

    def corrections(self, file: Path) -> None:
        """The corrections that the search found, for another attempt; the file is removed after this call."""
        ...

    def results(self, files: Mapping[str, Path], answer: Answer) -> None:
        """The case is done; the files are removed after this call."""
        ...


@dataclass(slots=True)
class _Started:
    """The worker of a job, once it has begun."""

    event: threading.Event
    worker: str = ""
    host: str = ""


class Cluster:
    """A connection to a scheduler. Raises `ConfigError` if none answers. ``note`` receives remarks on lost workers."""

    def __init__(
        self,
        address: Address,
        certificates: Path,
        *,
        lease: float | None = None,
        stuck: float = STUCK,
        note: Callable[[str], None] | None = None,
    ) -> None:
        from distributed import Client

        self.address = address
        self.closing = threading.Event()
        self._lease, self._stuck = lease or LEASE, stuck
        self._note = note or logging.getLogger("qdqspec").warning
        self._topic = f"qdqspec-{secrets.token_hex(8)}"
        self._jobs: dict[str, _Started] = {}
        logging.getLogger("distributed").setLevel(logging.ERROR)
        try:
            self._client: Client = Client(
                str(address),
                security=address.security(certificates),
                timeout=_CONNECT,
                set_as_default=False,
                name="qdqspec",
            )
        except (OSError, TimeoutError, ValueError) as error:
            raise address.unanswered(error) from None
        self._client.subscribe_topic(self._topic, self._on_event)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The connected workers of qdqspec, by host and address."""
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        found = (WorkerInfo.of(address, each, time.time()) for address, each in known.items())
        return tuple(
            sorted((w for w in found if w is not None), key=lambda w: (w.announcement.host, w.address))
        )

    def device(self, backend: str, key: str | None = None) -> Device:
        """The device that a backend's cases run on: the one with that key, or the only one there is.

        Raises `BackendUnavailableError` or `ConfigError`, naming the backends and devices of the workers.
        """
        devices = (each for worker in self._fitting() for each in worker.announcement.devices)
        found = {each.key: each for each in devices if each.backend == backend}
        if key is not None:
            found = {each: device for each, device in found.items() if each == key}
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

    def slots(self, device: Device) -> int:
        """The number of workers with a device."""
        return len(self._with(device, ()))

    def run(self, listener: Listener, device: Device, name: str, limit: float | None = None) -> None:
        """Run a case on a device; it is run elsewhere if its worker is lost.

        ``limit`` is the build limit of the case, in seconds. Raises `StateError` if no worker completes it.
        """
        lost: list[str] = []
        for _ in range(ATTEMPTS):
            job = secrets.token_hex(8)
            try:
                self._attempt(job, listener, device, lost, self._stuck + 2 * (limit or 0.0))
                return
            except LostError as error:
                lost.append(self._jobs[job].worker)
                self._note(f"{name}: {error}; the case is run elsewhere with the trials known so far")
            finally:
                del self._jobs[job]
        raise StateError(
            f"{name}: {ATTEMPTS} workers were lost while they ran this case",
            cure="see the logs of the workers; run again to continue with the trials known so far",
        )

    def stop(self) -> None:
        """Stop all jobs of this client. Threads in `run` end within seconds; `close` is called after them."""
        self.closing.set()
        for name, job in list(self._jobs.items()):
            if job.worker:
                with suppress(Exception):
                    self._call(job.worker, "stop", 2.0, job=name, taken=False)

    def close(self) -> None:
        """Disconnect."""
        self.stop()
        with suppress(Exception):
            self._client.close(timeout=5)

    def _attempt(
        self, job: str, listener: Listener, device: Device, lost: Iterable[str], stuck: float
    ) -> None:
        started = self._jobs[job] = _Started(threading.Event())
        package = listener.package()
        request = json.dumps(to_data(package.request(job, self._topic, self._lease)))
        future = self._client.submit(
            run_case,
            request,
            key=f"qdqspec-{job}",
            workers=self._with(device, lost),
            resources={device.resource: 1},
            pure=False,
            retries=0,
        )
        try:
            self._wait(started, future, device)
            listener.begin(started.worker, started.host)
            self._follow(job, started.worker, listener, package, stuck)
        except BaseException:
            if started.worker:
                with suppress(Exception):
                    self._call(started.worker, "stop", 2.0, job=job, taken=False)
            raise
        finally:
            with suppress(Exception):
                future.cancel(force=True)

    def _wait(self, started: _Started, future: Future, device: Device) -> None:
        """Wait until the task has begun; it may wait for other cases on the device as long as there is a worker."""
        seen = time.monotonic()
        while not started.event.wait(0.5):
            self._require_open()
            if future.status == "error" and isinstance(error := future.exception(), QdqspecError):
                raise error
            if future.status in ("error", "lost", "cancelled"):
                raise LostError(f"a worker of {device.key} was lost before the case began ({future.status})")
            if self._with(device, ()):
                seen = time.monotonic()
            elif time.monotonic() - seen > _MISSING:
                raise BackendUnavailableError(
                    f"no worker at {self.address} has device {device.key} any more",
                    cure=f"there is: {self._inventory()}",
                )

    def _follow(self, job: str, worker: str, listener: Listener, package: Package, stuck: float) -> None:
        """Ask for news until the case is done, send the files it needs, and fetch its results."""
        seen, state, moved = 0, None, time.monotonic()
        known = {entry.sha256 for entry in package.files}
        while True:
            self._require_open()
            news = self._ask(worker, job, seen)
            now = (news["phase"], news["progress"], len(news["entries"]))
            if news["entries"] or now != state:
                state, moved = now, time.monotonic()
            if time.monotonic() - moved > stuck:
                raise LostError(f"worker {worker} made no progress for {stuck:.0f} s")
            listener.news(news)
            seen += len(news["entries"])
            if seen and news["corrections"] and news["corrections"]["sha256"] not in known:
                known.add(news["corrections"]["sha256"])
                with self._fetched(worker, job, [news["corrections"]], {}) as files:
                    listener.corrections(*files.values())
            if news["phase"] == "done":
                break
            if news["need"]:
                self._send(worker, job, news["need"], package.local)
                moved = time.monotonic()
            else:
                time.sleep(_ASK)
        with self._fetched(worker, job, news["files"], package.local) as files:
            listener.results(files, from_data(Answer, news["answer"]))
        with suppress(LostError), _transfer(worker):
            self._call(worker, "stop", 5.0, job=job, taken=True)

    @contextmanager
    def _fetched(
        self, worker: str, job: str, entries: Iterable[Any], own: Mapping[str, Path]
    ) -> Iterator[Mapping[str, Path]]:
        """Fetched files of a job, by name; they are removed afterwards."""
        from qdqspec._core.temporary import TemporaryFolder

        found = tuple(from_data(FileEntry, entry) for entry in entries)
        with TemporaryFolder() as folder:
            with _transfer(worker):
                self._client.sync(self._fetch, worker, job, found, folder, dict(own))
            yield {entry.path: entry.below(folder) for entry in found}

    def _ask(self, worker: str, job: str, seen: int) -> dict[str, Any]:
        """News of a job. Raises `LostError` if the worker does not answer for the lease, or knows the job no more."""
        silent = time.monotonic()
        while True:
            self._require_open()
            left = self._lease - (time.monotonic() - silent)
            if left <= 0:
                raise LostError(f"worker {worker} did not answer for {self._lease:.0f} s")
            try:
                news: dict[str, Any] = self._call(worker, "ask", min(left, 5.0), job=job, seen=seen)
                return news
            except KeyError:
                raise LostError(f"worker {worker} has given up the case") from None
            except OSError as error:  # TimeoutError too: Dask connects again until its time limit
                if worker not in self._client.scheduler_info(n_workers=-1)["workers"]:
                    raise LostError(f"worker {worker} was lost ({str(error) or 'no answer'})") from None
                time.sleep(0.2)

    def _send(self, worker: str, job: str, need: Iterable[str], local: Mapping[str, Path]) -> None:
        for digest in need:
            if digest not in local:
                raise StateError(f"worker {worker} asks for a file that is not of this case")
            self._require_open()
            with _transfer(worker):
                self._client.sync(self._send_file, worker, job, digest, local[digest])

    async def _send_file(self, worker: str, job: str, digest: str, path: Path) -> None:
        sent = await send_file(self._client.rpc(worker), job, digest, path, self._lease + 60)
        if not sent and await asyncio.to_thread(file_digest, path) != digest:
            raise StateError("this file was changed while it was sent", where=path, cure="run again")

    async def _fetch(
        self, worker: str, job: str, entries: Iterable[FileEntry], folder: Path, own: dict[str, Path]
    ) -> None:
        """Fetch results and verify each file; those of a known digest are copied from the ``own`` files."""
        for entry in entries:
            path = entry.below(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry.sha256 in own:
                await asyncio.to_thread(shutil.copyfile, own[entry.sha256], path)
                if await asyncio.to_thread(file_digest, path) == entry.sha256:
                    continue  # else it has changed since
            remote = self._client.rpc(worker)
            found = await fetch_file(remote, job, entry.path, entry.size, path, self._lease)
            if found != entry.sha256:
                raise OSError(f"{entry.path} differs from the file of the worker")
            own[entry.sha256] = path

    def _call(self, worker: str, method: str, timeout: float, **words: Any) -> Any:
        async def call() -> Any:
            handler = getattr(self._client.rpc(worker), f"qdqspec_{method}")
            return await asyncio.wait_for(handler(**words), timeout)

        return self._client.sync(call)

    def _fitting(self) -> tuple[WorkerInfo, ...]:
        """The workers of this version: another one may measure and store otherwise."""
        return tuple(w for w in self.workers() if w.announcement.version == __version__)

    def _with(self, device: Device, lost: Iterable[str]) -> list[str]:
        """Addresses of the workers with a device, without those lost if there are others."""
        wanted = (device.backend, device.key)
        found = [
            worker.address
            for worker in self._fitting()
            if any((each.backend, each.key) == wanted for each in worker.announcement.devices)
        ]
        return [address for address in found if address not in set(lost)] or found

    def _inventory(self) -> str:
        """The devices of all workers, as text."""
        found: Counter[str] = Counter()
        for worker in self.workers():
            other = worker.announcement.version
            differs = f" with qdqspec {other}, which differs from {__version__} here"
            note = "" if other == __version__ else differs
            found.update(f"{each.backend} on {each.key}{note}" for each in worker.announcement.devices)
        return ", ".join(f"{text} ({count})" for text, count in sorted(found.items())) or "no worker at all"

    def _require_open(self) -> None:
        if self.closing.is_set():
            raise StateError("the run was interrupted")

    def _on_event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        _, message = event
        job = self._jobs.get(str(message.get("job")))
        if job is not None and not job.event.is_set():
            job.worker, job.host = str(message["worker"]), str(message["host"])
            job.event.set()
