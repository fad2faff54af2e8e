"""Engines that are open at the same time: of one model, run side by side, and whether memory is sufficient for all.

Linux reports its available memory and that of a process, an engine with ``device_memory`` that of its GPU. Otherwise
nothing is known in advance, and only the failure of an engine shows it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import LifoQueue
from typing import TypeAlias

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.files import Closing
from qdqspec._core.programs import own_cores
from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError, QdqspecError


def engines_at_once(threads: int, most: int = 8) -> int:
    """The number of engines with so many threads that the cores of this process can run at the same time.

    At most ``most``: each further one needs memory, and a build.
    """
    return max(1, min(most, own_cores() // threads))


class Engines(Closing):
    """Up to ``most`` engines of one model, the further ones built when several runs are asked for at once.

    An engine may be ``given``: it is not closed, and others are built after ``alone`` runs only, since a build takes
    longer than a few runs. For runs shorter than ``worth_seconds`` a second engine gains nothing. After a run that
    failed all others fail with the same error, so that results do not depend on which engine is free.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        most: int = 1,
        *,
        given: Engine | None = None,
        alone: int = 8,
        worth_seconds: float = 0.005,
    ) -> None:
        self._build = build
        self._most = most
        first = given or build()
        self._own = [] if given else [first]
        self._alone = alone if given else 0  # runs before others are built
        self._worth_seconds = worth_seconds
        self._free: LifoQueue[Engine | None] = LifoQueue()  # ``None`` for one that is not built yet
        for engine in (*[None] * (most - 1), first):
            self._free.put(engine)
        self._pool = ThreadPoolExecutor(most, "engine")  # starts its threads when they are needed
        self._seconds = 0.0  # that the latest run took
        self._failure: BackendError | None = None

    @property
    def seconds(self) -> float:
        """The time of the latest run, divided by `at_once`."""
        return self._seconds / self.at_once

    @property
    def at_once(self) -> int:
        """The number of runs that go on at the same time in `run_each`."""
        return self._most if self._seconds >= self._worth_seconds and not self._alone else 1

    def run(self, feeds: Feed) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        return self._run_on(self._taken(), feeds)

    def _taken(self) -> Engine | None:
        """A free engine, or ``None`` for one to build. Raises the error of an earlier run."""
        if self._failure is not None:
            raise self._failure
        return self._free.get()

    def _run_on(self, engine: Engine | None, feeds: Feed) -> dict[str, Array]:
        """Run on an engine that is taken from the free ones, and give it back."""
        try:
            if engine is None:
                engine = self._build()
                self._own.append(engine)
            started = time.monotonic()
            found = engine.run(feeds)
            self._seconds = time.monotonic() - started
            self._alone = max(0, self._alone - 1)
            return found
        except BackendError as error:
            self._failure = error
            raise
        finally:
            self._free.put(engine)

    def run_each(self, feeds: Iterable[Feed]) -> Iterator[dict[str, Array]]:
        """The outputs of each of these inputs, in order; the next ones are computed while one is used."""
        started = deque[Future[dict[str, Array]]]()
        try:
            for feed in feeds:
                at_once = self.at_once
                while len(started) >= at_once:
                    yield started.popleft().result()
                if at_once == 1:
                    yield self.run(feed)
                else:  # taken here, in the order of the inputs: a run keeps its engine if a later one fails first
                    started.append(self._pool.submit(self._run_on, self._taken(), feed))
            while started:
                yield started.popleft().result()
        except KeyboardInterrupt:
            self._close_engines()  # which ends their runs
            raise
        finally:
            wait(started)

    def close(self) -> None:
        """Stop all engines. Closing twice is harmless."""
        self._close_engines()
        self._pool.shutdown()

    def _close_engines(self) -> None:
        while self._own:
            self._own.pop().close()


# ---- memory ----------------------------------------------------------------------------------------

HasMemory: TypeAlias = Callable[[Sequence[Engine], int], bool]

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_WANT = re.compile(
    "out ?of ?memory|(insufficient|not enough) memory|MemoryError|allocat|bad.?alloc|alloc_failed",
    re.IGNORECASE,
)


class MemoryShortError(Exception):
    """Memory is not sufficient for all engines at once. No placement is at fault."""


def has_memory(
    engines: Sequence[Engine],
    more: int,
    *,
    proc: Path = _PROC,
    groups: Path = _GROUPS,
    share: float = 0.9,
) -> bool:
    """Whether ``more`` engines as large as the largest of these can be opened beside them; true if unknown.

    ``share`` is the part of available memory that engines may take: inputs, outputs and growth during runs need the
    rest, and with too large a part an engine fails in the middle of a comparison.
    """
    on_devices: list[tuple[int, int]] = []  # bytes held there, and free
    for engine in engines:
        with contextlib.suppress(QdqspecError):  # an engine that fails here fails again when it is timed
            reported = getattr(engine, "device_memory", lambda: None)()
            on_devices += [] if reported is None else [reported]
    if on_devices:
        largest, free = max(held for held, _ in on_devices), min(left for _, left in on_devices)
        if more * largest > share * free:
            return False
    files = [proc / str(getattr(engine, "pid", 0)) / "status" for engine in engines]
    held = [_numbers(file, "RssAnon", "VmHWM") for file in files]
    sizes = [(status["RssAnon"], status["VmHWM"]) for status in held if len(status) == 2]
    left = bytes_left(proc, groups)
    if not sizes or left is None:
        return True
    stays = max(size for size, _ in sizes)
    while_built = max(peak - size for size, peak in sizes)
    return more * stays + while_built <= share * left


def is_memory_error(error: QdqspecError) -> bool:
    """Whether an engine may have failed because others were open, judged by the text of its error."""
    return _WANT.search(str(error)) is not None


def bytes_left(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Memory that processes can still allocate, by the machine and by control groups; ``None`` if unknown.

    A control group limits its parent groups' processes too. Cached file pages count as used in a group, but can be
    reclaimed.
    """
    available = _numbers(proc / "meminfo", "MemAvailable").get("MemAvailable")
    if available is None:
        return None
    left = [available]
    own = [line[3:].lstrip("/") for line in _lines(proc / "self" / "cgroup") if line.startswith("0::")]
    # missing if a container sees its own group as the root
    for folder in (groups / each for name in own for each in (Path(name), *Path(name).parents)):
        with contextlib.suppress(OSError, ValueError):  # the value for no limit is a word
            files = (folder / name for name in ("memory.max", "memory.current"))
            most, used = (int(file.read_text(encoding="ascii")) for file in files)
            cached = _numbers(folder / "memory.stat", "inactive_file").get("inactive_file", 0)
            left.append(most - used + cached)
    return min(left)


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
