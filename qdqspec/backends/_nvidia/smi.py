"""NVIDIA GPUs as reported by nvidia-smi, for backends that do not use CUDA in their own process.

nvidia-smi numbers GPUs by their place on the bus, and ignores ``CUDA_VISIBLE_DEVICES``; CUDA numbers the visible
ones, by default the fastest first. `environment` makes CUDA use nvidia-smi's order.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Sequence
from functools import cache

_FIELDS = ("name", "compute_cap", "driver_version")


def environment() -> dict[str, str]:
    """The environment for a process that uses CUDA, in which GPUs have the same numbers as in nvidia-smi."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}


def gpu_facts(index: int = 0) -> dict[str, str]:
    """``GPU``, ``compute capability`` and ``driver`` of a GPU; empty if there is none, as on Jetson."""
    return _asked(_number(index))


def capability_of(facts: dict[str, str]) -> tuple[int, int]:
    """The compute capability as numbers; (0, 0) if it is not known."""
    major, _, minor = facts.get("compute capability", "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _number(index: int) -> str:
    """The identifier in nvidia-smi, a number or a UUID, of the GPU with CUDA's ``index``."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    if not visible:
        return str(index)
    return visible[index] if index < len(visible) else "none"


@cache
def _asked(number: str) -> dict[str, str]:
    row = query(number, _FIELDS, seconds=30.0)
    return {} if row is None else dict(zip(("GPU", "compute capability", "driver"), row, strict=True))


def query(gpu: str, fields: Sequence[str], *, seconds: float) -> list[str] | None:
    """The values of nvidia-smi's ``fields`` for a GPU, without units; ``None`` if it gives none in time."""
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = list(csv.reader(done.stdout.splitlines()[:1], skipinitialspace=True))
    return rows[0] if not done.returncode and rows and len(rows[0]) == len(fields) else None
