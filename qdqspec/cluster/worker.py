"""Runs a scheduler; or a worker: a Nanny, which restarts the worker's process if it ends, with one thread.

Messages pass between the process of a case and the processes that help it on twins of its device: the worker of the
case asks the other workers for help whenever they are idle, sends them the case's files, and passes requests and
answers on as lines of JSON. A worker stops helping as soon as a task of its own begins.
"""

from __future__ import annotations

import asyncio
import json
import platform
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec.cluster.address import Address
from qdqspec.cluster.content import send_file
from qdqspec.cluster.inventory import ANNOUNCED, Announcement, announce
from qdqspec.cluster.jobs import Job, Jobs
from qdqspec.cluster.request import INPUTS
from qdqspec.codec import from_data, to_data
from qdqspec.config import Settings
from qdqspec.errors import ConfigError

if TYPE_CHECKING:
    from distributed import Security, Worker


_ENTRY = "qdqspec.cluster.worker"
_CONFIG = (
    "qdqspec"  # section of Dask's configuration, through which the Nanny passes it to the worker's process
)
_REACH_S = 30.0  # for an answer of the scheduler
_START_S = 120.0  # for the start of its process; importing all took more than 30 s on a loaded machine
_RETRY = 5.0  # seconds until a worker that was busy is asked again
_STEP = 0.1  # seconds between messages to a twin
_SILENT = 15.0  # seconds without an answer after which a twin is lost
_WORKER_TTL = "60s"  # a worker that is silent for so long is removed; Dask's own default is five minutes
_JOBS: list[Jobs] = []  # of this process; one, set by `dask_setup`
_HANDLERS = (
    "ask",
    "put",
    "get",
    "stop",
    "help",
    "exchange",
)  # methods of `Jobs` that others call, as qdqspec_ask


def run_worker(
    address: Address,
    certificates: Path,
    settings: Settings,
    folder: Path,
    backends: tuple[str, ...],
    ready: Callable[[Announcement], None],
) -> None:
    """Connect to the scheduler and work until interrupted; ``ready`` is called once, when connected.

    Raises `ConfigError` if no backend is usable, no scheduler answers, or the worker's process does not start in time.
    """
    import dask
    from distributed import Nanny

    security, found = address.security(certificates), announce(settings, backends)
    if not found.devices:
        raise ConfigError(
            "no backend is usable on this machine", cure="qdqspec doctor shows what each of them needs"
        )
    folder.mkdir(parents=True, exist_ok=True)
    given = [str(folder), json.dumps(to_data(settings)), json.dumps(found.to_data())]

    async def serve() -> None:
        await _require_scheduler(address, security)
        try:
            nanny = await Nanny(
                str(address),
                nthreads=1,
                name=None,
                host=address.host if not address.tls else None,
                security=security,
                resources={device.resource: 1.0 for device in found.devices},
                local_directory=str(folder / "dask"),
                memory_limit=0,
                death_timeout=_START_S,
                preload=[_ENTRY],
                config={**dask.config.config, _CONFIG: {"given": given}},
                dashboard_address="127.0.0.1:0",
            )
        except (AssertionError, TimeoutError):
            # Closing a Nanny whose process is still starting fails an assertion of Dask.
            raise ConfigError(
                f"the worker's process has not connected to {address} within {_START_S:.0f} s",
                cure="on a machine with much other work, start the worker again later",
            ) from None
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"the worker's process did not start: {error}", cure="the messages above give the reason"
            ) from None
        async with nanny:
            ready(found)
            await nanny.finished()

    with dask.config.set({"distributed.comm.timeouts.connect": "10s"}):
        asyncio.run(serve())


async def _require_scheduler(address: Address, security: Security | None) -> None:
    """Raise `ConfigError` if no scheduler answers."""
    from distributed import Security
    from distributed.comm import connect

    try:
        found = await connect(
            str(address), timeout=_REACH_S, **(security or Security()).get_connection_args("worker")
        )
    except (OSError, TimeoutError) as error:
        raise address.unanswered(error) from None
    await found.close()


def dask_setup(worker: Worker) -> None:
    """Prepare the worker's process; called by Dask before it connects to the scheduler."""
    import dask

    folder, settings, announcement = dask.config.get(f"{_CONFIG}.given")
    known = json.loads(announcement)
    jobs = Jobs(
        Path(folder),
        from_data(Settings, json.loads(settings)),
        lambda topic, message: worker.log_event(
            topic, {**message, "worker": worker.address, "host": platform.node()}
        ),
        from_data(Announcement, known),
        lambda job: relayed(worker, job),
    )
    _JOBS[:] = [jobs]
    worker.startup_information[ANNOUNCED] = lambda _: known
    worker.metrics[ANNOUNCED] = lambda _: jobs.free_bytes
    for method in _HANDLERS:
        worker.handlers[f"qdqspec_{method}"] = getattr(jobs, method)


def relayed(worker: Worker, job: Job) -> Callable[[], None]:
    """Connect a job's process to its twins; returns a function that ends it."""
    relay = Relay(job, worker.rpc, [each for each in job.request.twins if each != worker.address])
    running = asyncio.run_coroutine_threadsafe(relay.run(), worker.loop.asyncio_loop)

    def end() -> None:
        relay.is_ended = True  # asyncio.wait_for of Python 3.11 may lose a cancellation
        running.cancel()

    return end


def run_case(request: str) -> str:
    """The task of a case."""
    return _JOBS[0].run(request)


class Relay:
    """The connections of a running job to other workers. ``connect`` gives the handlers at an address."""

    def __init__(self, job: Job, connect: Callable[[str], Any], addresses: Iterable[str]) -> None:
        self._job = job
        self._connect = connect
        self._addresses = tuple(addresses)
        self.is_ended = False

    async def run(self) -> None:
        """Serve until `is_ended` is set, which is seen after at most a few seconds, or until cancelled."""
        await asyncio.gather(*(self._serve(address) for address in self._addresses))

    async def _serve(self, address: str) -> None:
        while not self.is_ended:
            name, remote = secrets.token_hex(8), self._connect(address)
            files = tuple(each for each in self._job.request.files if each.path.startswith(f"{INPUTS}/"))
            request = replace(self._job.request, id=name, files=files, twins=(), helps=self._job.device)
            with suppress(OSError, TimeoutError, KeyError):
                text = json.dumps(to_data(request))
                if await asyncio.wait_for(remote.qdqspec_help(request=text), _SILENT):
                    try:
                        await self._exchange(address, name, remote)
                        return  # the case has ended, or the twin's process, which would end again
                    finally:
                        self._job.send({"twin": address, "state": "lost"})
                        with suppress(OSError, TimeoutError):
                            await asyncio.wait_for(remote.qdqspec_stop(job=name, taken=False), 2.0)
            await asyncio.sleep(_RETRY)

    async def _exchange(self, address: str, name: str, remote: Any) -> None:
        """Pass messages in both directions until the other job has ended."""
        received, is_joined = 0, False
        outgoing = self._job.to_twins.setdefault(address, [])
        outgoing.clear()
        while not self.is_ended:
            messages, outgoing[:] = outgoing[:], []
            words = {"job": name, "received": received, "messages": messages}
            news = await asyncio.wait_for(remote.qdqspec_exchange(**words), _SILENT)
            received += len(news["messages"])
            if news["phase"] == "running" and not is_joined:
                is_joined = True
                self._job.send({"twin": address, "state": "joined", "name": news["name"]})
            for message in news["messages"]:
                self._job.send({"twin": address, **message})
            for digest in news["need"]:
                entry = next(each for each in self._job.request.files if each.sha256 == digest)
                await send_file(remote, name, digest, entry.below(self._job.folder), 4 * _SILENT)
            if news["phase"] == "done":
                return
            await asyncio.sleep(_STEP)


def run_scheduler(address: Address, certificates: Path, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; ``ready`` is called with the address for workers and clients.

    Work stealing is off, since a task on a device is timed there. A task whose worker is lost is not restarted by the
    scheduler but by its client, which knows the trials that are already measured. The status page is served on this
    machine only.
    """
    import dask
    from distributed import Scheduler

    security = address.security(certificates)
    rules = {
        "distributed.scheduler.work-stealing": False,
        "distributed.scheduler.worker-ttl": _WORKER_TTL,
        "distributed.scheduler.allowed-failures": 0,
        "distributed.admin.large-graph-warning-threshold": "1 GiB",
    }

    async def serve() -> None:
        try:
            scheduler = await Scheduler(
                host=address.host,
                port=address.port,
                protocol="tls" if address.tls else "tcp",
                security=security,
                dashboard_address="127.0.0.1:0",
            )
        except OSError as error:
            raise ConfigError(
                f"{address} cannot be served: {error.strerror or error}",
                cure="choose another --host or --port",
            ) from None
        async with scheduler:
            ready(str(scheduler.address))
            await scheduler.finished()

    with dask.config.set(rules):
        asyncio.run(serve())
