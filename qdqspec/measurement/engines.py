"""Engines of one model that run at the same time, each in a process of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import LifoQueue

from qdqspec.arrays import Array, Feed
from qdqspec.backends.base import Engine
from qdqspec.closing import Closing
from qdqspec.errors import BackendError
from qdqspec.programs import own_cores

MOST = 8  # engines of one model
FEW = 8  # runs of a given engine, for which no other one is built
WORTH_SECONDS = 0.005  # of a run: for shorter ones a second engine gains nothing


def engines_at_once(threads: int) -> int:
    """The number of engines with so many threads that the cores of this process can run at the same time."""
    return max(1, min(MOST, own_cores() // threads))


class Engines(Closing):
    """Up to ``most`` engines of one model, the further ones built when several runs are asked for at once.

    An engine may be ``given``: it is not closed, and others are built after `FEW` runs only. After a run that failed no
    other engine is used, so that later failures do not depend on which engine is free.
    """

    def __init__(self, build: Callable[[], Engine], most: int = 1, *, given: Engine | None = None) -> None:
        self._build = build
        self._most = most
        self._first = given or build()
        self._all = [] if given else [self._first]
        self._alone = FEW if given else 0  # runs before others are built
        self._free: LifoQueue[Engine | None] = LifoQueue()  # ``None`` for one that is not built yet
        for engine in (*[None] * (most - 1), self._first):
            self._free.put(engine)
        self._threads: ThreadPoolExecutor | None = None
        self._seconds = 0.0  # that the latest run took

    @property
    def seconds(self) -> float:
        """The time of the latest run, divided by `at_once`."""
        return self._seconds / self.at_once

    @property
    def at_once(self) -> int:
        """The number of runs that go on at the same time in `run_each`."""
        return self._most if self._seconds >= WORTH_SECONDS and not self._alone else 1

    def run(self, feeds: Feed) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        if self._most == 1:
            return self._timed(self._first, feeds)
        return self._run_on(self._free.get(), feeds)

    def _run_on(self, engine: Engine | None, feeds: Feed) -> dict[str, Array]:
        """Run on an engine that is taken from the free ones, and give it back."""
        try:
            if engine is None:
                engine = self._another()
            return self._timed(engine, feeds)
        except BackendError:
            self._first, self._most = engine or self._first, 1
            raise
        finally:
            self._free.put(engine)

    def run_each(self, feeds: Iterable[Feed]) -> Iterator[dict[str, Array]]:
        """The outputs of each of these inputs, in order; the next ones are computed while one is used."""
        started = deque[Future[dict[str, Array]]]()

        def ended(most: int) -> Iterator[dict[str, Array]]:
            while len(started) > most:
                yield started.popleft().result()

        try:
            for feed in feeds:
                if self.at_once == 1:
                    yield from ended(0)
                    yield self.run(feed)
                else:
                    # Taken here, in the order of the inputs: a run keeps its engine if a later one fails before it.
                    started.append(self._pool.submit(self._run_on, self._free.get(), feed))
                    yield from ended(self._most - 1)
            yield from ended(0)
        except KeyboardInterrupt:
            self._close_engines()  # which ends their runs
            raise
        finally:
            wait(started)

    def close(self) -> None:
        """Stop all engines. Closing twice is harmless."""
        self._close_engines()
        if self._threads is not None:
            self._threads.shutdown()

    @property
    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._most, "engine")
        return self._threads

    def _another(self) -> Engine:
        engine = self._build()
        self._all.append(engine)
        return engine

    def _timed(self, engine: Engine, feeds: Feed) -> dict[str, Array]:
        started = time.monotonic()
        found = engine.run(feeds)
        self._seconds = time.monotonic() - started
        self._alone = max(0, self._alone - 1)
        return found

    def _close_engines(self) -> None:
        while self._all:
            self._all.pop().close()
