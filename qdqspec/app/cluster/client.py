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
from qdqspec._core.codec import from_data
from qdqspec.app.cluster.address import Address
from qdqspec.app.cluster.inventory import Device, WorkerInfo
from qdqspec.app.cluster.worker import ATTEMPTS, run_case
from qdqspec.errors import BackendUnavailableError, ConfigError, QdqspecError, StateError
from qdqspec.types import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Client, Future

_CONNECT = 10.0
_LOOK = 0.1  # seconds between looks at a case
_MISSING = 20.0  # seconds for which a device may have no worker: a Nanny restarts its own within a few


@dataclass(slots=True)
class _Run:
    """A case that was submitted: its task, and the worker that runs it, once that has begun."""

    name: str
    watch: Callable[[Progress], None]
    future: Future | None = None
    worker: str = ""


class Cluster:
    """A connection to a scheduler. Raises `ConfigError` if none answers. ``note`` receives remarks on lost workers."""

    def __init__(
        self, address: Address, certificates: Path, *, note: Callable[[str], None] | None = None
    ) -> None:
        import dask
        from distributed import Client

        self.address = address
        self._note = note or logging.getLogger("qdqspec").warning
        self._topic = f"qdqspec-{secrets.token_hex(8)}"
        self._runs: dict[str, _Run] = {}
        self._closing = threading.Event()
        logging.getLogger("distributed").setLevel(logging.ERROR)
        dask.config.set(
            {"distributed.admin.large-graph-warning-threshold": "1 TiB"}
        )  # a task carries its files
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
        """Run a case on a device; returns its answer and the files that it wrote, by their paths.

        Dask runs the case elsewhere if its worker is lost. Raises `StateError` if no worker completes the case.
        """
        key = f"qdqspec-{secrets.token_hex(8)}"
        run = self._runs[key] = _Run(name, watch)
        run.future = self._client.submit(
            run_case,
            {**request, "topic": self._topic},
            dict(files),
            key=key,
            resources={device.resource: 1},
            pure=False,
        )
        try:
            return self._result(run.future, device, name)
        finally:
            del self._runs[key]
            with suppress(Exception):
                run.future.cancel()

    def close(self) -> None:
        """Stop the cases of this client, and disconnect."""
        self._closing.set()
        with suppress(Exception):
            self._client.cancel([run.future for run in list(self._runs.values()) if run.future is not None])
            self._client.close(timeout=5)

    def _result(self, future: Future, device: Device, name: str) -> tuple[Any, Mapping[str, bytes]]:
        from distributed import KilledWorker

        seen = time.monotonic()
        while not future.done():
            if self._closing.is_set():
                raise StateError("the run was interrupted")
            if any(each.offers(device) for each in self.workers()):
                seen = time.monotonic()
            elif time.monotonic() - seen > _MISSING:
                raise BackendUnavailableError(
                    f"no worker at {self.address} has device {device.key} any more",
                    cure=f"there is: {self._inventory()}",
                )
            time.sleep(_LOOK)
        try:
            found: tuple[Any, Mapping[str, bytes]] = future.result()
            return found
        except QdqspecError:
            raise
        except KilledWorker:
            raise StateError(
                f"{name}: {ATTEMPTS} workers were lost while they ran this case",
                cure="see the logs of the workers, and run the case again",
            ) from None
        except Exception as error:
            raise StateError(f"{name}: the case was not completed: {error}", cure="run it again") from error

    def _inventory(self) -> str:
        """The devices of all workers, as text."""
        found: Counter[str] = Counter()
        for worker in self.workers():
            other = worker.announcement.version
            differs = f" with qdqspec {other}, which differs from {__version__} here"
            note = "" if other == __version__ else differs
            found.update(f"{each.backend} on {each.key}{note}" for each in worker.announcement.devices)
        return ", ".join(f"{text} ({count})" for text, count in sorted(found.items())) or "no worker at all"

    def _on_event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Receive a message of a case: that it begins on a worker, or its progress."""
        _, message = event
        run = self._runs.get(message["job"])
        if run is None:
            return
        worker = message["worker"]
        if run.worker and worker != run.worker:
            self._note(f"{run.name}: worker {run.worker} was lost; the case is run elsewhere")
        run.worker = worker
        if message["progress"] is not None:
            run.watch(from_data(Progress, message["progress"]))
