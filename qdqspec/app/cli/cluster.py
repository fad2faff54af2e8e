"""Commands ``cluster`` and ``worker``: run a scheduler, list its workers, make certificates, run a worker."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec._core import registry
from qdqspec._core.config import BUILD_OPTIONS
from qdqspec._core.records import to_data
from qdqspec._core.units import count_text, size_text
from qdqspec.app.cli.arguments import argument, settings_from, verb
from qdqspec.app.cli.output import FINE, answer, complain, end_on_sigterm, note
from qdqspec.errors import ConfigError

if TYPE_CHECKING:
    from qdqspec.app.cluster.inventory import Announcement, WorkerInfo

_PORT = 8786


@verb(
    "cluster",
    "qdqspec cluster start --host 10.0.0.5",
    argument(
        "action",
        text="start: run the scheduler and print its address; list: the devices of the workers at ADDRESS; "
        "certificates: make the certificates for tls, in the folder of --cluster-tls.",
        choices=("start", "list", "certificates"),
    ),
    argument("address", "ADDRESS", "The scheduler, for list.", nargs="?"),
    argument(
        "--host",
        text="Address on which start listens (default: 127.0.0.1, this machine only).",
        default="127.0.0.1",
    ),
    argument("--port", "N", f"Port of start (default: {_PORT}).", type=int, default=_PORT),
    argument("--days", "N", "Validity of certificates in days (default: 365).", type=int, default=365),
    options=("cluster-tls",),
)
def cluster(arguments: argparse.Namespace) -> int:
    """Run a scheduler, list its workers, or make certificates."""
    from qdqspec.app.cluster.address import Address, require_distributed

    settings = settings_from(arguments)
    require_distributed()
    if arguments.action == "certificates":
        return _certificates(arguments, settings.cluster_tls)
    if arguments.action == "list":
        if arguments.address is None:
            raise ConfigError("list needs the address of the scheduler", cure="qdqspec cluster list ADDRESS")
        return _list(arguments, settings.cluster_tls)
    from qdqspec.app.cluster.worker import run_scheduler

    host = f"[{arguments.host}]" if ":" in arguments.host.removeprefix("tls://") else arguments.host
    address = Address.parse(f"{host}:{arguments.port}")
    end_on_sigterm()
    run_scheduler(address, settings.cluster_tls, lambda at: _started(arguments, at))
    return FINE


def _started(arguments: argparse.Namespace, address: str) -> None:
    add = f"qdqspec worker {address}"
    answer(arguments, {"address": address, "add_devices_with": add}, address)
    if not arguments.json:
        complain(f"The scheduler runs. Add devices with: {add}")
    sys.stdout.flush()


def _certificates(arguments: argparse.Namespace, folder: Path) -> int:
    from qdqspec.app.cluster.address import make_certificates

    paths = make_certificates(folder, arguments.days)
    note(
        "copy these files to each machine of the cluster; the key gives the right to run code on all of them"
    )
    files = [str(path) for path in paths]
    answer(arguments, {"files": files, "days": arguments.days}, "\n".join(files))
    return FINE


def _list(arguments: argparse.Namespace, certificates: Path) -> int:
    from qdqspec.app.cluster.address import Address
    from qdqspec.app.cluster.client import Cluster

    address = Address.parse(arguments.address)
    with closing(Cluster(address, certificates)) as connection:
        workers = connection.workers()
    lines = [f"{address}: {count_text(len(workers), 'worker')}"]
    for each in workers:
        own = each.announcement
        silent = f", silent for {each.silent_seconds:.0f} s" if each.silent_seconds > 10 else ""
        free = f"{size_text(each.free_bytes)} free{silent}"
        lines.append(f"{own.host} ({own.system}, qdqspec {own.version}, {free})")
        lines += [f"  {device.backend}: {device.key}" for device in own.devices]
    answer(arguments, {"address": str(address), "workers": list(map(_row, workers))}, "\n".join(lines))
    return FINE


def _row(worker: WorkerInfo) -> dict[str, Any]:
    return {
        "address": worker.address,
        "free_bytes": worker.free_bytes,
        "silent_seconds": round(worker.silent_seconds, 1),
        **to_data(worker.announcement),
    }


@verb(
    "worker",
    "qdqspec worker tls://10.0.0.5:8786",
    argument("address", "ADDRESS", "The scheduler, as `qdqspec cluster start` printed it."),
    argument(
        "--backend",
        text="Offer only this backend. Repeatable (default: all that are usable).",
        action="append",
        choices=registry.names("backend"),
    ),
    argument(
        "--folder",
        "DIR",
        "Folder of received models and running cases (default: .qdqspec/worker); workers of a machine may share it.",
        type=Path,
    ),
    options=("cluster-tls", "device", *BUILD_OPTIONS),
)
def worker(arguments: argparse.Namespace) -> int:
    """Offer this machine's devices to a cluster until interrupted."""
    from qdqspec.app.cluster.address import Address, require_distributed

    require_distributed()
    from qdqspec.app.cluster.worker import run_worker

    settings = settings_from(arguments)
    folder = (arguments.folder or settings.root / ".qdqspec" / "worker").absolute()

    def ready(found: Announcement) -> None:
        lines = [f"{found.host} offers:", *(f"  {device.backend}: {device.key}" for device in found.devices)]
        answer(arguments, to_data(found), "\n".join(lines))
        sys.stdout.flush()

    end_on_sigterm()
    run_worker(
        Address.parse(arguments.address),
        settings.cluster_tls,
        settings,
        folder,
        tuple(arguments.backend or ()),
        ready,
    )
    return FINE
