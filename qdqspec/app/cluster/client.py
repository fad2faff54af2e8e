"""The client's side of a cluster: finds workers, and runs a case on one of them as one task of Dask."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qdqspec import __version__
from qdqspec._core.records import from_data
from qdqspec.app.cluster.address import Address
from qdqspec.app.cluster.worker import Device, WorkerInfo, run_case
from qdqspec.errors import BackendUnavailableError, ConfigError, QdqspecError, StateError
from qdqspec.types import Progress

if TYPE_CHECKING:
    from pathlib import Path

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
        return tuple(
            sorted((w for w in found if w is not None), key=lambda w: (w.announcement.host, w.address))
        )

    def device(self, backend: str, key: str | None = None) -> Device:
        """The device that a backend's cases run on: the one with that key, or the only one there is.

        Workers with another version of qdqspec are not used, because that may measure and store otherwise. Raises
        `BackendUnavailableError` or `ConfigError`, naming the backends and devices of the workers.
        """
        fitting = [each.announcement for each in self.workers() if each.announcement.version == __version__]
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
            other = worker.announcement.version
            differs = f" with qdqspec {other}, which differs from {__version__} here"
            note = differs if other != __version__ else ""
            found.update(f"{each.backend} on {each.key}{note}" for each in worker.announcement.devices)
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
