"""Which NVIDIA GPU is here, as nvidia-smi tells it: for backends that do not talk to CUDA themselves.

May import floor 0. nvidia-smi counts GPUs by their place on the bus, and knows nothing of ``CUDA_VISIBLE_DEVICES``;
CUDA counts the visible ones, the fastest first unless it is told otherwise. `environment` tells it.
"""

from __future__ import annotations

import csv
import os
import subprocess
from functools import cache

_FIELDS = ("name", "compute_cap", "driver_version")
_SECONDS = 30.0


def environment() -> dict[str, str]:
    """The environment for a process that uses CUDA, in which it counts GPUs as nvidia-smi does."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}


def gpu_facts(index: int = 0) -> dict[str, str]:
    """``GPU``, ``compute capability`` and ``driver`` of a GPU; nothing where there is none, as on Jetson."""
    return _asked(_number(index))


def capability_of(facts: dict[str, str]) -> tuple[int, int]:
    """The compute capability as numbers; (0, 0) where it is not known."""
    major, _, minor = facts.get("compute capability", "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _number(index: int) -> str:
    """What nvidia-smi calls the GPU that CUDA calls ``index``: its own number, or a UUID."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    if not visible:
        return str(index)
    return visible[index] if index < len(visible) else "none"


@cache
def _asked(number: str) -> dict[str, str]:
    query = ["nvidia-smi", "-i", number, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = list(csv.reader(done.stdout.splitlines()[:1], skipinitialspace=True))
    if done.returncode or not rows or len(rows[0]) != len(_FIELDS):
        return {}
    return dict(zip(("GPU", "compute capability", "driver"), rows[0], strict=True))
