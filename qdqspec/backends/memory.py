"""Estimates whether memory is sufficient for all engines that are to be open at once.

Linux reports its available memory and that of a process, an engine with ``device_memory`` that of its GPU. Otherwise
nothing is known in advance, and only the failure of an engine shows it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from qdqspec.backends.base import Engine
from qdqspec.errors import QdqspecError

SHARE = 0.9  # share of available memory for engines; inputs, outputs and growth during runs need the rest

HasMemory: TypeAlias = Callable[[Sequence[Engine], int], bool]

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_WANT = re.compile(
    "out ?of ?memory|(insufficient|not enough) memory|MemoryError|allocat|bad.?alloc|alloc_failed",
    re.IGNORECASE,
)


class MemoryShortError(Exception):
    """Memory is not sufficient for all engines at once. No placement is at fault."""


def has_memory(engines: Sequence[Engine], more: int, *, proc: Path = _PROC, groups: Path = _GROUPS) -> bool:
    """Whether ``more`` engines as large as the largest of these can be opened beside them; true if unknown."""
    if not _has_device_memory(engines, more):
        return False
    files = [proc / str(getattr(engine, "pid", 0)) / "status" for engine in engines]
    held = [_numbers(file, "RssAnon", "VmHWM") for file in files]
    sizes = [(status["RssAnon"], status["VmHWM"]) for status in held if len(status) == 2]
    left = bytes_left(proc, groups)
    if not sizes or left is None:
        return True
    stays = max(size for size, _ in sizes)
    while_built = max(peak - size for size, peak in sizes)
    return more * stays + while_built <= SHARE * left


def _has_device_memory(engines: Sequence[Engine], more: int) -> bool:
    """The same for the memory of a GPU, which the engines themselves report."""
    known: list[tuple[int, int]] = []
    for engine in engines:
        with contextlib.suppress(QdqspecError):  # an engine that fails here fails again when it is timed
            reported = getattr(engine, "device_memory", lambda: None)()
            known += [] if reported is None else [reported]
    return not known or more * max(held for held, _ in known) <= SHARE * min(free for _, free in known)


def is_memory_error(error: QdqspecError) -> bool:
    """Whether an engine may have failed because others were open, judged by the text of its error."""
    return _WANT.search(str(error)) is not None


def bytes_left(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Memory that processes can still allocate, by the machine and by control groups; ``None`` if unknown."""
    available = _numbers(proc / "meminfo", "MemAvailable").get("MemAvailable")
    return None if available is None else min([available, *_left_in_groups(proc, groups)])


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """The memory left in each control group of this process and its parent groups.

    Cached file pages count as used in a group, but can be reclaimed.
    """
    for line in _lines(proc / "self" / "cgroup"):
        if line.startswith("0::"):
            inside = Path(line[3:].lstrip("/"))  # missing if a container sees its own group as the root
            for folder in (groups / each for each in (inside, *inside.parents)):
                with contextlib.suppress(OSError, ValueError):  # the value for no limit is a word
                    files = (folder / name for name in ("memory.max", "memory.current"))
                    most, used = (int(file.read_text(encoding="ascii")) for file in files)
                    cached = _numbers(folder / "memory.stat", "inactive_file").get("inactive_file", 0)
                    yield most - used + cached


def _numbers(file: Path, *names: str) -> dict[str, int]:
    """The numbers of these names in a kernel status file, those in kB converted to bytes."""
    found = {}
    for line in _lines(file):
        name, *words = line.replace(":", " ").split()
        if name in names and words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return list(filter(None, file.read_text(encoding="utf-8", errors="replace").splitlines()))
    return []
