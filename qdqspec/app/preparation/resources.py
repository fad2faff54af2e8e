"""The resources that cases share: a backend with its options, settings, and the lock of the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from qdqspec._core.config import Settings
from qdqspec.backends.base import Backend, BuildOptions, backend_named
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.open_engines import engines_at_once
from qdqspec.search.loop import Watch
from qdqspec.timing.lock import DeviceLock, log_wait
from qdqspec.types import DeviceKey, Progress


@dataclass(kw_only=True)
class Resources:
    """The shared resources of a search, in which progress is reported under the name of its case."""

    backend: Backend
    options: BuildOptions
    settings: Settings
    watch: Watch | None = None
    case: str = ""
    lock: str = ""  # the name of the device's lock; none if it is empty
    waits: list[float] = field(default_factory=list)  # seconds of each wait for other runs on the device
    seconds_left: Callable[[], float | None] = lambda: None  # of the run's time limit

    @property
    def device(self) -> DeviceKey:
        """The device that the backend runs on."""
        return self.backend.device(self.options)

    @property
    def jobs(self) -> int:
        """The number of parallel builds: 1 if the backend times kernels while building, whatever was requested."""
        return self.settings.jobs if self.backend.capabilities(self.options).builds_side_by_side else 1

    @property
    def engines(self) -> int:
        """The number of engines of one model whose outputs are computed at the same time: on processors, one a core."""
        on_cores = self.backend.capabilities(self.options).hardware == "cpu"
        return engines_at_once(self.options.threads) if on_cores else 1

    def exclusive(self) -> AbstractContextManager[object]:
        """The lock of the device, for a measurement."""
        if not self.lock:
            return nullcontext()
        return DeviceLock(self.lock, report=self.report_wait, waited=self.waits.append)

    def waited(self) -> float:
        """Seconds spent waiting for other runs on the device."""
        return sum(self.waits)

    def report_step(self, text: str, seconds_left: float | None = None) -> None:
        """Report the beginning of a step outside a search, with the seconds that are left for it."""
        if self.watch is not None:
            self.watch(
                Progress(case=self.case, phase="", done=0, total=0, doing=text, seconds_left=seconds_left)
            )

    def report_wait(self, text: str) -> None:
        """Report that this run waits for another one."""
        if self.watch is None:
            log_wait(f"{self.case}: {text}")
        else:
            self.watch(Progress(case=self.case, phase="waiting", done=0, total=0, waiting=text))


def resources_of(settings: Settings, device_key: Callable[[DeviceKey], str] | None = None) -> Resources:
    """The resources of the backend that ``settings`` name, with each engine in a process of its own."""
    backend = Isolated(settings.backend, device_key=device_key)
    return Resources(backend=backend, options=BuildOptions.of(settings), settings=settings)


def lock_of(resources: Resources) -> str:
    """The name of the lock on the hardware, which other backends on the same hardware take too."""
    own = backend_named(resources.settings.backend)  # without a changed key: the hardware is the same
    hardware = own.capabilities(resources.options).hardware
    if hardware == "cpu":
        return hardware
    return f"{resources.settings.device}-{hardware or own.device(resources.options).key}"
