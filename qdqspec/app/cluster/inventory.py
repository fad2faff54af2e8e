"""The inventory of a worker: the devices of its backends, its versions and free disk space."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qdqspec import __version__
from qdqspec._core import registry
from qdqspec._core.config import Settings
from qdqspec._core.records import from_data
from qdqspec.app.preparation.runtimes import resources_of
from qdqspec.errors import QdqspecError

ANNOUNCED = "qdqspec"  # key of a worker's announcement, and of its free disk space among its metrics


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
class WorkerInfo:
    """A connected worker, as its scheduler knows it."""

    address: str
    announcement: Announcement
    free_bytes: int
    silent_seconds: float

    @classmethod
    def of(cls, address: str, known: Mapping[str, Any], now: float) -> WorkerInfo | None:
        """The worker of an entry of the scheduler; ``None`` if it is not a worker of qdqspec."""
        try:
            announcement = from_data(Announcement, known[ANNOUNCED])
        except (KeyError, ValueError):
            return None
        free = known.get("metrics", {}).get(ANNOUNCED, 0)
        silent = max(0.0, now - float(known.get("last_seen", now)))
        return cls(address=address, announcement=announcement, free_bytes=int(free), silent_seconds=silent)

    def offers(self, device: Device) -> bool:
        """Whether the worker can run tasks on a device."""
        mine = self.announcement
        return mine.version == __version__ and device.resource in {each.resource for each in mine.devices}


def announce(settings: Settings, backends: tuple[str, ...]) -> Announcement:
    """Probe the backends, all if none is named, with the options of the worker's command line."""
    names = backends or registry.names("backend")
    devices = [device for name in names if (device := _device(name, settings)) is not None]
    return Announcement(
        version=__version__,
        python=platform.python_version(),
        host=platform.node(),
        system=f"{platform.system()} {platform.machine()}",
        devices=tuple(devices),
    )


def _device(name: str, settings: Settings) -> Device | None:
    known = resources_of(replace(settings, backend=name))
    backend, options = known.backend, known.options
    available = backend.probe(options)
    if not available.usable:
        return None
    try:
        capabilities = backend.capabilities(options)
        return Device(
            backend=name,
            target=backend.target,
            key=known.device.key,
            formats=capabilities.formats,
            lacking=dict(capabilities.lacking),
            facts=dict(available.facts),
        )
    except QdqspecError:
        return None
