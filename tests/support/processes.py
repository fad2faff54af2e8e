"""Processes of this machine, found in /proc, and waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def runs(pid: int | str) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes_with(word: str) -> list[int]:
    """The running processes whose command line or environment has a word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if word.encode() in text and runs(folder.name):
            found.append(int(folder.name))
    return found


def wait_until(holds: Callable[[], object], otherwise: str = "", seconds: float = 20) -> None:
    """Wait until a condition holds; fail with a message if it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)
