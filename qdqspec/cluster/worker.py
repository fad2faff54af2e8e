"""Runs a worker: a Nanny, which restarts the worker's process if it ends, with one thread."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.cluster.address import Address
from qdqspec.cluster.case_process import WorkerOptions
from qdqspec.cluster.inventory import ANNOUNCED, Announcement, announce
from qdqspec.cluster.jobs import Job, Jobs
from qdqspec.cluster.relay import Relay
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
_JOBS: list[Jobs] = []  # of this process; one, set by `dask_setup`
HANDLERS = {
    "ask": "qdqspec_ask", "put": "qdqspec_put", "get": "qdqspec_get", "stop": "qdqspec_stop",
    "help": "qdqspec_help", "exchange": "qdqspec_exchange",
}  # fmt: skip


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
    given = [str(folder), json.dumps(to_data(WorkerOptions.of(settings))), json.dumps(found.to_data())]

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
        raise ConfigError(
            f"no scheduler answers at {address}: {error}", cure="start one with: qdqspec cluster start"
        ) from None
    await found.close()


def dask_setup(worker: Worker) -> None:
    """Prepare the worker's process; called by Dask before it connects to the scheduler."""
    import dask

    folder, options, announcement = dask.config.get(f"{_CONFIG}.given")
    known = json.loads(announcement)
    jobs = Jobs(
        Path(folder),
        from_data(WorkerOptions, json.loads(options)),
        lambda topic, message: worker.log_event(
            topic, {**message, "worker": worker.address, "host": platform.node()}
        ),
        from_data(Announcement, known),
        lambda job: relayed(worker, job),
    )
    _JOBS[:] = [jobs]
    worker.startup_information[ANNOUNCED] = lambda _: known
    worker.metrics[ANNOUNCED] = lambda _: jobs.free_bytes
    for method, name in HANDLERS.items():
        worker.handlers[name] = getattr(jobs, method)


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
