"""What a search runs on: a backend with its options, settings, and the lock of the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.config import Settings
from qdqspec.measure.lock import log_wait
from qdqspec.search.loop import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """What a search runs on."""

    backend: Backend
    options: BuildOptions
    settings: Settings
    exclusive: Callable[[], AbstractContextManager[object]]
    watch: Watch | None
    seconds_left: Callable[[], float | None] = lambda: None  # of the run's time limit
    report_wait: Callable[[str], None] = log_wait

    @property
    def jobs(self) -> int:
        """How many builds are made at a time: one where builds time kernels, whatever was asked for."""
        return self.settings.jobs if self.backend.capabilities(self.options).builds_side_by_side else 1
