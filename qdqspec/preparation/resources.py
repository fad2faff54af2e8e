"""The resources that cases share: backends with their options, settings, and the lock of the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property

from qdqspec.backends.base import Backend, BuildOptions, backend_named
from qdqspec.config import Settings
from qdqspec.measurement.isolate import Isolated
from qdqspec.measurement.lock import log_wait
from qdqspec.measurement.twins import Twins
from qdqspec.search.loop import Watch
from qdqspec.types import Case, DeviceKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The shared resources of a search."""

    backend: Backend
    options: BuildOptions
    settings: Settings
    exclusive: Callable[[], AbstractContextManager[object]]
    watch: Watch | None
    lock: str = ""  # the name of that lock
    seconds_left: Callable[[], float | None] = lambda: None  # of the run's time limit
    waited: Callable[[], float] = lambda: 0.0  # seconds spent waiting for other runs on the device
    report_step: Callable[[str], None] = lambda _: None  # the beginning of a step outside a search
    report_wait: Callable[[str], None] = log_wait
    twins: Twins | None = None  # devices of the same key that share the work of a search

    @property
    def jobs(self) -> int:
        """The number of parallel builds: 1 if the backend times kernels while building, whatever was requested."""
        return self.settings.jobs if self.backend.capabilities(self.options).builds_side_by_side else 1


@dataclass
class SessionBackend:
    """A backend with its options in a session; ``settings`` name it. ``device_key`` is that of `Isolated`."""

    settings: Settings
    device_key: Callable[[DeviceKey], str] | None = None

    @cached_property
    def backend(self) -> Isolated:
        """The backend, with each engine in a process of its own."""
        return Isolated(self.settings.backend, device_key=self.device_key)

    @cached_property
    def options(self) -> BuildOptions:
        """The build options in the settings."""
        return BuildOptions.of(self.settings)

    @cached_property
    def device(self) -> DeviceKey:
        """The device that it runs on."""
        return self.backend.device(self.options)

    @cached_property
    def lock(self) -> str:
        """The name of the lock on its hardware, which other backends on the same hardware take too."""
        own = backend_named(self.settings.backend)  # without a changed key: the hardware is the same
        hardware = own.capabilities(self.options).hardware
        return (
            hardware
            if hardware == "cpu"
            else f"{self.settings.device}-{hardware or own.device(self.options).key}"
        )


class Backends:
    """The backend of the run (``default``), and those of cases that name their own, each made once."""

    def __init__(self, settings: Settings, device_key: Callable[[DeviceKey], str] | None = None) -> None:
        self.default = SessionBackend(settings, device_key)
        self._all = {settings.backend: self.default}

    def of(self, case: Case) -> SessionBackend:
        """The backend of a case. Raises `ConfigError` if there is none of that name."""
        settings = self.default.settings
        name = case.backend or settings.backend
        if name not in self._all:
            self._all[name] = replace(self.default, settings=replace(settings, backend=name))
        return self._all[name]

    def close(self) -> None:
        """Stop the child processes of all."""
        for each in self._all.values():
            each.backend.close()
