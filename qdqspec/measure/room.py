"""Whether memory has room for all engines that are to be open at once. May import floor 0 and the backend seam.

Linux tells what it has left and what a process holds; elsewhere, and of a GPU's memory, nothing is known beforehand,
and an engine that does not come up is what tells.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from qdqspec.backends.base import Engine
from qdqspec.errors import QdqspecError

SHARE = 0.9  # of what is left that engines may take: inputs, outputs and what grows in a run come on top

HasRoom: TypeAlias = Callable[[Sequence[Engine], int], bool]

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # of version 1 of groups
_SECOND = ("memory.max", "memory.current", "inactive_file")
_WANT = re.compile(
    "out ?of ?memory|(insufficient|not enough) memory|MemoryError|allocat|bad.?alloc|alloc_failed",
    re.IGNORECASE,
)


class NoRoomError(Exception):
    """Not all engines can be open at once. No placement is to blame."""


def has_room(engines: Sequence[Engine], more: int, *, proc: Path = _PROC, groups: Path = _GROUPS) -> bool:
    """Whether ``more`` engines as large as the largest of these can be opened beside them; yes where nobody knows."""
    held = [
        _numbers(proc / str(getattr(engine, "pid", 0)) / "status", "RssAnon", "VmHWM") for engine in engines
    ]
    sizes = [(status["RssAnon"], status["VmHWM"]) for status in held if len(status) == 2]
    left = bytes_left(proc, groups)
    if not sizes or left is None:
        return True
    stays = max(size for size, _ in sizes)
    while_built = max(peak - size for size, peak in sizes)
    return more * stays + while_built <= SHARE * left


def is_want_of_room(error: QdqspecError) -> bool:
    """Whether an engine may have failed because others were open: runtimes say it in words only."""
    return _WANT.search(str(error)) is not None


def bytes_left(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Memory that processes can still take, by the machine and by the limits they are under; ``None`` if not told."""
    available = _numbers(proc / "meminfo", "MemAvailable").get("MemAvailable")
    return None if available is None else min([available, *_left_in_groups(proc, groups)])


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What the control groups of this process have left, each of them and those that it is in."""
    for line in _lines(proc / "self" / "cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = (groups / "memory", _FIRST) if controllers else (groups, _SECOND)
        inside = Path(path.lstrip("/"))  # not there where a container sees its own group as the root
        for folder in (inside, *inside.parents):
            yield from _left_in(mount / folder, *names)


def _left_in(folder: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    """Files that were read and may be forgotten count as used by a group, and are not."""
    with contextlib.suppress(OSError, ValueError):  # no limit is a word
        most = int((folder / limit).read_text(encoding="ascii"))
        now = int((folder / used).read_text(encoding="ascii"))
        yield most - now + _numbers(folder / "memory.stat", cached).get(cached, 0)


def _numbers(file: Path, *names: str) -> dict[str, int]:
    """The numbers of these names in a file of the kernel, those in kB as bytes."""
    found = {}
    for line in _lines(file):
        if line.startswith(names):
            name, _, rest = line.replace(":", " ").partition(" ")
            words = rest.split()
            if name in names and words and words[0].isdigit():
                found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
