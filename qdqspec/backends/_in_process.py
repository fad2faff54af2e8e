"""What engines share that run in this process: the timing of single runs, and errors of the runtime's library."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qdqspec.errors import BackendError

CHECK_INPUTS = "check the names, types and shapes of the inputs"


def time_runs(run: Callable[[], object], runs: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Wall and thread CPU milliseconds of each run, without garbage collection in between."""
    wall, cpu = [], []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(runs):
            start_cpu, start = time.thread_time_ns(), time.perf_counter_ns()
            run()
            stop, stop_cpu = time.perf_counter_ns(), time.thread_time_ns()
            wall.append((stop - start) / 1e6)
            cpu.append((stop_cpu - start_cpu) / 1e6)
    finally:
        if collecting:
            gc.enable()
    return tuple(wall), tuple(cpu)


@contextmanager
def refusals(
    what: str,
    model: Path | None,
    cure: str | None = CHECK_INPUTS,
    *,
    plainly: Callable[[Exception], str],
    cure_for: Callable[[str], str | None],
) -> Iterator[None]:
    """Convert a library's exceptions to `BackendError`, with the reason on one line and a known cure, else ``cure``."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:  # noqa: BLE001 - the libraries' exceptions share no public base class
        why = plainly(error)
        raise BackendError(f"{what}: {why}", where=model, cure=cure_for(why) or cure) from None
