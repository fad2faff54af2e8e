"""Runs the scheduler of a cluster until it is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from qdqspec.cluster.address import Address
from qdqspec.errors import ConfigError

WORKER_TTL = "60s"  # a worker that is silent for so long is removed; Dask's own default is five minutes


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
        "distributed.scheduler.worker-ttl": WORKER_TTL,
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
