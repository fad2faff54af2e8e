"""Shared parts of engines: bound inputs, times of runs, imports of runtimes, checks of files and inputs."""

from __future__ import annotations

import gc
import importlib
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from qdqspec._core.arrays import Array
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.types import Clock, Samples

CHECK_INPUTS = "check the names, types and shapes of the inputs"
_ANSWER_SECONDS = 60.0
_PROFILE_WARMUP = 5  # largest number of warm-up runs: times of short integer models are stable after five

NativeT = TypeVar("NativeT")
BoundT = TypeVar("BoundT")


class BoundEngine(Generic[NativeT, BoundT]):
    """A runtime's own object for a model file, and the bound inputs of each profile. A closed engine has neither."""

    def __init__(self, model: Path, native: NativeT) -> None:
        self.model = model
        self._native: NativeT | None = native
        self._bound: dict[int, BoundT] = {}

    def _require_open(self) -> NativeT:
        if self._native is None:
            raise BackendError("the engine is closed", where=self.model, cure="build it again")
        return self._native

    def _require_bound(self, profile: int) -> BoundT:
        self._require_open()
        if profile not in self._bound:
            raise BackendError("no inputs are bound", where=self.model, cure="call bind() before timing")
        return self._bound[profile]

    def close(self) -> None:
        """Free the engine; closing twice has no effect."""
        self._native = None
        self._bound.clear()


class TimedEngine(BoundEngine[NativeT, BoundT]):
    """An engine that keeps the last samples at each profile: a profile of kernels is scaled to their median."""

    def __init__(self, model: Path, native: NativeT) -> None:
        super().__init__(model, native)
        self._latest: dict[int, Samples] = {}

    def _bind(self, profile: int, bound: BoundT) -> None:
        self._bound[profile] = bound
        self._latest.pop(profile, None)

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Time single runs, in milliseconds. CPU time only if one known thread does all the work."""
        self._latest[profile] = self._timed(runs, warmup, profile)
        return self._latest[profile]

    def _timed(self, runs: int, warmup: int, profile: int) -> Samples:
        raise NotImplementedError

    def _latency_ms(self, runs: int, profile: int) -> float:
        """The median of the last call of `time`; without one it is measured."""
        latency = self._latest.get(profile) or self.time(runs, profile_warmup(runs), profile)
        clock: Clock = "cpu" if latency.cpu_ms else "wall"
        return latency.median_ms(clock)


def profile_warmup(runs: int) -> int:
    """The number of runs before those that are profiled."""
    return min(_PROFILE_WARMUP, (runs + 1) // 2)


def time_runs(run: Callable[[], object], runs: int, warmup: int, *, alone: bool) -> Samples:
    """Time runs in this process, without garbage collection in between; CPU time if this thread works ``alone``."""
    for _ in range(warmup):
        run()
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
    return Samples(wall_ms=tuple(wall), cpu_ms=tuple(cpu) if alone else ())


def cannot_run(feeds: Mapping[str, Array]) -> str:
    """The beginning of the message of a run that failed, with the shapes of its inputs."""
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in feeds.items())
    return f"the model could not be run with {shapes}"


def check_names(inputs: Collection[str], feeds: Mapping[str, Any], model: Path) -> None:
    """Raise `BackendError` if values are missing for inputs, or given for unknown ones."""
    missing, unknown = set(inputs) - set(feeds), set(feeds) - set(inputs)
    if missing or unknown:
        texts = [f"without {', '.join(sorted(missing))}"] if missing else []
        texts += [f"with unknown {', '.join(sorted(unknown))}"] if unknown else []
        what = f"the inputs do not fit the model: {' and '.join(texts)}"
        raise BackendError(what, where=model, cure=CHECK_INPUTS)


def one_line(error: Exception, most: int = 500, noise: Iterable[re.Pattern[str]] = ()) -> str:
    """The message of an exception on one line without the ``noise``, unless it is all; its type if it has none."""
    text = " ".join(str(error).split())
    for pattern in noise:
        text = pattern.sub("", text).strip() or text
    return text[:most].strip() or type(error).__name__


def import_library(module: str, install: str, package: str = "") -> Any:
    """A module of a runtime's package. Raises `BackendUnavailableError` if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken wheel raises anything from ImportError to OSError
        what = f"{package or module} cannot be imported: {one_line(error)}"
        raise BackendUnavailableError(what, cure=install) from None


def ask_program(path: str, word: str, install: str) -> subprocess.CompletedProcess[str]:
    """Run a program with one word, such as ``--help``. Raises `BackendUnavailableError` if it cannot be run."""
    run = partial(subprocess.run, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    try:
        return run([path, word], timeout=_ANSWER_SECONDS, encoding="utf-8", errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"{Path(path).name} cannot be run: {error}"
        raise BackendUnavailableError(what, where=path, cure=install) from None


def require_file(model: Path) -> None:
    """Raise `BackendError` if there is no model file."""
    if model.is_dir():
        raise BackendError(
            "this is a folder, not a model file", where=model, cure="name the .onnx file in it"
        )
    if not model.is_file():
        raise BackendError("there is no such model file", where=model, cure="check the path")


def known_cure(text: str, cures: Mapping[str, str]) -> str | None:
    """The cure of the first of these texts that a message contains."""
    return next((cure for sign, cure in cures.items() if sign in text), None)


@contextmanager
def refusals(
    what: str,
    model: Path | None,
    cure: str | None = CHECK_INPUTS,
    *,
    plainly: Callable[[Exception], str] = one_line,
    cures: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Convert a library's exceptions to `BackendError`, with the reason on one line and a known cure, else ``cure``."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:  # noqa: BLE001 - the libraries' exceptions share no public base class
        why = plainly(error)
        raise BackendError(f"{what}: {why}", where=model, cure=known_cure(why, cures) or cure) from None
