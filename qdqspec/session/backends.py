"""The backends of a session: that of the run, and those that cases choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from qdqspec.backends.base import BuildOptions
from qdqspec.config import Settings
from qdqspec.measurement.isolate import Isolated
from qdqspec.types import Case, DeviceKey


@dataclass
class SessionBackend:
    """A backend with its options in a session; ``settings`` name it."""

    settings: Settings

    @cached_property
    def backend(self) -> Isolated:
        """The backend, with each engine in a process of its own."""
        return Isolated(self.settings.backend)

    @cached_property
    def options(self) -> BuildOptions:
        """The build options in the settings."""
        return BuildOptions.of(self.settings)

    @cached_property
    def device(self) -> DeviceKey:
        """The device that it runs on."""
        return self.backend.device(self.options)


class Backends:
    """The backend of the run (``default``), and those of cases that name their own, each made once."""

    def __init__(self, settings: Settings) -> None:
        self.default = SessionBackend(settings)
        self._all = {settings.backend: self.default}

    def of(self, case: Case) -> SessionBackend:
        """The backend of a case. Raises `ConfigError` if there is none of that name."""
        settings = self.default.settings
        name = case.backend or settings.backend
        if name not in self._all:
            self._all[name] = SessionBackend(replace(settings, backend=name))
        return self._all[name]

    def close(self) -> None:
        """Stop the child processes of all."""
        for each in self._all.values():
            each.backend.close()
