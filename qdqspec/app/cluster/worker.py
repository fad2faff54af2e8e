"""Runs a scheduler; or a worker: a Nanny, which restarts the worker's process if it ends, with one thread."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec._core.codec import from_data, to_data
from qdqspec._core.config import Settings
from qdqspec.app.cluster.address import Address
from qdqspec.app.cluster.inventory import ANNOUNCED, Announcement, announce
from qdqspec.app.cluster.jobs import Jobs
from qdqspec.errors import ConfigError

if TYPE_CHECKING:
    from distributed import Security, Worker


_ENTRY = "qdqspec.app.cluster.worker"
_CONFIG = (
    "qdqspec"  # section of Dask's configuration, through which the Nanny passes it to the worker's process
)
_REACH_S = 30.0  # for an answer of the scheduler
_START_S = 120.0  # for the start of its process; importing all took more than 30 s on a loaded machine
_WORKER_TTL = "60s"  # a worker that is silent for so long is removed; Dask's own default is five minutes
_JOBS: list[Jobs] = []  # of this process; one, set by `dask_setup`
_HANDLERS = ("ask", "put", "get", "stop")  # methods of `Jobs` that the client calls, as qdqspec_ask


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
    )
    _JOBS[:] = [jobs]
    worker.startup_information[ANNOUNCED] = lambda _: known
    worker.metrics[ANNOUNCED] = lambda _: jobs.free_bytes
    for method in _HANDLERS:
        worker.handlers[f"qdqspec_{method}"] = getattr(jobs, method)


def run_case(request: str) -> str:
    """The task of a case."""
    return _JOBS[0].run(request)


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
