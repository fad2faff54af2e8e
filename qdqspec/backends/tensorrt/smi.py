"""NVIDIA GPUs as nvidia-smi reports them: facts, and their state during measurements.

nvidia-smi numbers GPUs by their place on the bus, and ignores ``CUDA_VISIBLE_DEVICES``; CUDA numbers the visible
ones, by default the fastest first. `environment` makes CUDA use nvidia-smi's order. Samples taken while the GPU was
throttled, or at different clocks, are not comparable; a `GpuWatch` records both.
"""

from __future__ import annotations

import csv
import math
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

_GPU = (("name", "GPU"), ("compute_cap", "compute capability"), ("driver_version", "driver"))
_SETTINGS = (
    ("driver_version", "driver version"),
    ("compute_mode", "compute mode"),
    ("mig.mode.current", "MIG"),
)


def environment() -> dict[str, str]:
    """The environment for a process that uses CUDA, in which GPUs have the same numbers as in nvidia-smi."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}


def gpu_facts(index: int = 0) -> dict[str, str]:
    """``GPU``, ``compute capability`` and ``driver`` of a GPU; empty if there is none, as on Jetson.

    ``index`` is CUDA's; nvidia-smi takes a number or a UUID of ``CUDA_VISIBLE_DEVICES``.
    """
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    own = visible[index] if index < len(visible) else "none"
    return _queried(own if visible else str(index), 30.0, _GPU)


def capability_of(facts: dict[str, str]) -> tuple[int, int]:
    """The compute capability as numbers; (0, 0) if it is not known."""
    major, _, minor = facts.get("compute capability", "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


@cache
def _queried(gpu: str, seconds: float, names: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The values of nvidia-smi's fields by our names for them; empty if they are not known."""
    row = query(gpu, [field for field, _ in names], seconds=seconds)
    return {} if row is None else dict(zip((name for _, name in names), row, strict=True))


def query(gpu: str, fields: Sequence[str], *, seconds: float) -> list[str] | None:
    """The values of nvidia-smi's ``fields`` for a GPU, without units; ``None`` if it gives none in time."""
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = list(csv.reader(done.stdout.splitlines()[:1], skipinitialspace=True))
    return rows[0] if not done.returncode and rows and len(rows[0]) == len(fields) else None


_SECONDS = 10.0
# Drivers from 535 on call them event reasons; the older name is tried if that is unknown.
_REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of NVML's nvmlClocksEventReasons that mean a lower clock than requested; idle and set clocks do not.
_THROTTLED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class GpuWatch:
    """Reads the clock of a GPU while an engine is timed, and notes conditions that make samples unreliable.

    ``gpu`` is an argument of nvidia-smi's ``-i``: a PCI address, an index or a UUID. ``every`` is the time between two
    queries in seconds: each takes some tens of milliseconds. ``moved`` is the ratio of two clocks of one engine from
    which they are noted.
    """

    def __init__(self, gpu: str, every: float = 5.0, moved: float = 1.03) -> None:
        self._gpu = gpu
        self._every = every
        self._moved = moved
        self._next = -math.inf
        self._reasons: dict[str, None] = {}
        self._clocks: list[float] = []  # MHz

    def observe(self) -> None:
        """Read the state again, if the last reading was some seconds ago and nvidia-smi answers."""
        if time.perf_counter() < self._next:
            return
        self._next = math.inf
        for reasons in _REASON_FIELDS:
            row = query(self._gpu, ("clocks.sm", reasons), seconds=_SECONDS)
            if row is not None:
                self._next = time.perf_counter() + self._every
                with suppress(ValueError):  # [N/A], [Not Supported]
                    self._clocks += [clock] if 0 < (clock := float(row[0])) < math.inf else []
                with suppress(ValueError):
                    bits = int(row[1], 16)
                    self._reasons |= {name: None for bit, name in _THROTTLED.items() if bits & bit}
                return

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on conditions that make the samples unreliable."""
        found = []
        if self._reasons:
            found.append(f"the GPU was throttled while it was timed: {', '.join(self._reasons)}")
        low, high = min(self._clocks, default=0.0), max(self._clocks, default=0.0)
        if high > self._moved * low:
            found.append(
                f"the GPU's clock moved between {low:g} and {high:g} MHz: lock it (nvidia-smi --lock-gpu-clocks)"
            )
        return tuple(found)


def gpu_settings(gpu: str) -> dict[str, str]:
    """Driver version, compute mode and MIG mode of a GPU, if they are known."""
    return _queried(gpu, _SECONDS, _SETTINGS)
