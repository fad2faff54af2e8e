"""The resources that the work on cases shares: a backend with its options, settings, and the lock of the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.config import Settings
from qdqspec.measurement.lock import log_wait
from qdqspec.search.loop import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The shared resources of a search."""

    backend: Backend
    options: BuildOptions
    settings: Settings
    exclusive: Callable[[], AbstractContextManager[object]]
    watch: Watch | None
    seconds_left: Callable[[], float | None] = lambda: None  # of the run's time limit
    waited: Callable[[], float] = lambda: 0.0  # seconds spent waiting for other runs on the device
    report_wait: Callable[[str], None] = log_wait

    @property
    def jobs(self) -> int:
        """The number of parallel builds: 1 if the backend times kernels while building, whatever was requested."""
        return self.settings.jobs if self.backend.capabilities(self.options).builds_side_by_side else 1
