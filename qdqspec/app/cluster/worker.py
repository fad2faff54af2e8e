"""Runs a scheduler; or a worker: a Nanny, which restarts the worker's process if it ends, with one thread.

A worker announces its inventory: the devices of its backends, its versions and free disk space.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec import __version__
from qdqspec._core import registry
from qdqspec._core.config import Settings
from qdqspec._core.files import replace_file
from qdqspec._core.programs import end_program, python_command
from qdqspec._core.records import from_data, to_data
from qdqspec.app.cluster.address import Address
from qdqspec.app.cluster.request import ANSWER, LOG, REQUEST, Answer, Failure
from qdqspec.app.preparation.runtimes import resources_of
from qdqspec.errors import ConfigError, QdqspecError

if TYPE_CHECKING:
    from distributed import Worker


ANNOUNCED = "qdqspec"  # key of a worker's announcement, and of its free disk space among its metrics
_ENTRY = "qdqspec.app.cluster.worker"
_CONFIG = "qdqspec"  # section of Dask's configuration, which the Nanny passes to the worker's process
_REACH_S = 30.0  # for an answer of the scheduler
_START_S = 120.0  # for the start of its process; importing all took more than 30 s on a loaded machine
_WORKER_TTL = "60s"  # a worker that is silent for so long is removed; Dask's own default is five minutes
_STEP = 0.1  # seconds between looks at the process of a case


# ---- inventory -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A backend on a worker and its device key. ``formats`` are from `Capabilities`, ``facts`` from `Availability`."""

    backend: str
    target: str
    key: str
    formats: tuple[str, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def resource(self) -> str:
        """The name of the worker resource that a task on this device takes; workers of another version lack it."""
        return f"{self.backend}:{self.key}:{__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The announcement of a worker when it connects."""

    version: str
    python: str
    host: str
    system: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo(Announcement):
    """A connected worker, as its scheduler knows it."""

    address: str
    free_bytes: int
    silent_seconds: float

    @classmethod
    def of(cls, address: str, known: Mapping[str, Any], now: float) -> WorkerInfo | None:
        """The worker of an entry of the scheduler; ``None`` if it is not a worker of qdqspec."""
        free = int(known.get("metrics", {}).get(ANNOUNCED, 0))
        silent = max(0.0, now - float(known.get("last_seen", now)))
        own = {"address": address, "free_bytes": free, "silent_seconds": round(silent, 1)}
        try:
            return from_data(cls, {**known[ANNOUNCED], **own})
        except (KeyError, TypeError, ValueError):
            return None

    def offers(self, device: Device) -> bool:
        """Whether the worker can run tasks on a device."""
        return self.version == __version__ and device.resource in {each.resource for each in self.devices}


def announce(settings: Settings, backends: tuple[str, ...]) -> Announcement:
    """Probe the backends, all if none is named, with the options of the worker's command line."""
    devices = []
    for name in backends or registry.names("backend"):
        known = resources_of(replace(settings, backend=name))
        available = known.backend.probe(known.options)
        if not available.usable:
            continue
        with suppress(QdqspecError):
            capabilities = known.backend.capabilities(known.options)
            device = Device(
                backend=name,
                target=known.backend.target,
                key=known.device.key,
                formats=capabilities.formats,
                lacking=dict(capabilities.lacking),
                facts=dict(available.facts),
            )
            devices.append(device)
    return Announcement(
        version=__version__,
        python=platform.python_version(),
        host=platform.node(),
        system=f"{platform.system()} {platform.machine()}",
        devices=tuple(devices),
    )


# ---- the worker ----------------------------------------------------------------------------------


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
    from distributed import Nanny, Security
    from distributed.comm import connect

    security, found = address.security(certificates), announce(settings, backends)
    if not found.devices:
        cure = "qdqspec doctor shows what each of them needs"
        raise ConfigError("no backend is usable on this machine", cure=cure)
    folder.mkdir(parents=True, exist_ok=True)
    given = [str(folder), json.dumps(to_data(settings)), json.dumps(to_data(found))]

    async def serve() -> None:
        try:
            words = (security or Security()).get_connection_args("worker")
            answered = await connect(str(address), timeout=_REACH_S, **words)
        except (OSError, TimeoutError) as error:
            raise address.unanswered(error) from None
        await answered.close()
        try:
            nanny = await Nanny(
                str(address),
                nthreads=1,
                name=None,
                host=address.host if not address.tls else None,
                security=security,
                resources={device.resource: 1.0 for device in found.devices},
                local_directory=str(folder),
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


def dask_setup(worker: Worker) -> None:
    """Announce the worker's devices and free disk space; called by Dask before it connects to the scheduler."""
    import dask

    folder, _, announcement = dask.config.get(f"{_CONFIG}.given")
    known = json.loads(announcement)
    worker.startup_information[ANNOUNCED] = lambda _: known
    worker.metrics[ANNOUNCED] = lambda _: shutil.disk_usage(folder).free


# ---- a case --------------------------------------------------------------------------------------


def run_case(request: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[Any, dict[str, bytes]]:
    """The task of a case, in a process that ends if the client is gone: its answer, and the files that it wrote.

    Files that are as they were sent are left out. The folder of the job is one of the worker's process: Dask removes it
    when the Nanny starts another process.
    """
    import dask
    from distributed import get_worker

    _, settings, _ = dask.config.get(f"{_CONFIG}.given")
    worker = get_worker()
    task = worker.get_current_task()
    job = Path(worker.local_directory) / task

    def report(progress: object) -> None:
        worker.log_event(request["topic"], {"job": task, "worker": worker.address, "progress": progress})

    def is_wanted() -> bool:
        return task in worker.state.tasks and worker.state.tasks[task].state == "executing"

    try:
        report(None)
        for name, content in files.items():
            path = job / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        replace_file(job / REQUEST, json.dumps(dict(request)))
        answer = run_process(job, settings, report, is_wanted)
        written = {}
        folders = [job / request["folders"][name] for name in ("output", "cache")]
        for path in (each for folder in folders for each in folder.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                name, content = path.relative_to(job).as_posix(), path.read_bytes()
                if files.get(name) != content:
                    written[name] = content
        return answer, written
    finally:
        shutil.rmtree(job, ignore_errors=True)


def run_process(
    folder: Path, settings: str, report: Callable[[object], None], is_wanted: Callable[[], bool]
) -> Any:
    """Run the process of a case until it ends or is not wanted; its answer, or a failure with the end of its log."""
    command, env = python_command("qdqspec.app.cluster.request", str(folder), settings)

    def read_progress() -> None:
        assert process.stdout is not None
        with suppress(OSError, ValueError):
            for line in process.stdout:
                report(json.loads(line))

    pipe = subprocess.PIPE
    with (
        (folder / LOG).open("wb") as log,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, env=env, start_new_session=True
        ) as process,
    ):
        threading.Thread(target=read_progress, daemon=True).start()
        try:
            while process.poll() is None and is_wanted():
                time.sleep(_STEP)
        finally:
            end_program(process)
    try:
        return json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        end = (folder / LOG).read_bytes()[-4000:].decode(errors="replace")
        what = f"the process of the case ended with exit code {process.returncode}; the end of its log:"
        return to_data(Answer(failure=Failure.of(QdqspecError(f"{what}\n{end}"))))


# ---- the scheduler -------------------------------------------------------------------------------


def run_scheduler(address: Address, certificates: Path, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; ``ready`` is called with the address for workers and clients.

    Work stealing is off, since a task on a device is timed there. The client repeats the task of a lost worker: the
    files of the case may be lost with it. The status page is served on this machine only.
    """
    import dask
    from distributed import Scheduler

    security = address.security(certificates)
    rules = {
        "distributed.scheduler.work-stealing": False,
        "distributed.scheduler.worker-ttl": _WORKER_TTL,
        "distributed.scheduler.allowed-failures": 0,
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
