"""Engines of one model that run at the same time, each in a process of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import LifoQueue

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.files import Closing
from qdqspec._core.programs import own_cores
from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError


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
