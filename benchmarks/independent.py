"""Times model files as a user of ONNX Runtime would, without any code of qdqspec; other benchmarks import it.

    from independent import Feed, compare, feeds_of, interval_over_builds, time_models

    feeds = feeds_of(Path("data.npz"), Path("model.onnx"))       # one dict a sample
    timing = time_models({"float": a, "tuned": b}, feeds[0])     # fresh sessions, one thread, interleaved rounds
    timing.ratio("tuned", "float").median                        # time of tuned / time of float, with low and high
    timing.median_ms("tuned"), timing.failures                   # {role: reason} of models that could not be run
    compare(outputs(a, feeds), outputs(b, feeds))                # SQNR, cosine and largest difference to the first

A *build* opens a new `InferenceSession` for each file, one thread, all graph optimizations. A *round* visits the files
in random order; a visit calls `InferenceSession.run` several times in a row with arrays of the caller and returns the
median of thread CPU time (`time.thread_time_ns`). A ratio is computed within each round, so that a change of the speed
of the processor affects both sides; the ratio of a build is the median over its rounds. Sessions of one file differ by
more than rounds of one session (memory addresses, collisions of cache lines), so the interval is that of Student's t
over builds: a file timed against itself has 1 in it. Threads are not pinned to a core, and there is no wait for an idle
machine, unless the caller does that.
"""

from __future__ import annotations

import gc
import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnxruntime as ort

Feed: TypeAlias = dict[str, np.ndarray]
Outputs: TypeAlias = dict[str, np.ndarray]

BUILDS, ROUNDS, VISIT = 6, 6, 5
FEWEST_BUILDS, FEWEST_ROUNDS = 3, 2  # the least numbers for a short time limit
STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
)  # two-sided 95 %, 1 to 10 degrees of freedom
WARM_UP = 5  # runs of a fresh session that are not counted: integer kernels take about five to settle
LEAST_RUNS_MS = 2.0  # a visit to a fast model has more runs, to last at least this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio with its 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of each role, one number per round, build by build; equal indices are of the same round.

    ``failures`` contains the reason for each role that could not be loaded or run, ``shortened`` the measurements
    omitted because of the time limit.
    """

    samples: Mapping[str, Sequence[float]]
    failures: Mapping[str, str]
    builds: int
    shortened: str = ""

    def ratio(self, role: str, base: str) -> Interval:
        """The ratio of the times of ``role`` and ``base``: the median over rounds of each build, over builds."""
        logs = np.log(self.samples[role]) - np.log(self.samples[base])
        return interval_over_builds(np.median(logs.reshape(self.builds, -1), axis=1))

    def median_ms(self, role: str) -> float:
        """The median over all rounds."""
        return float(np.median(self.samples[role]))


def time_models(
    files: Mapping[str, Path],
    feed: Feed,
    *,
    builds: int = BUILDS,
    rounds: int = ROUNDS,
    visit: int = VISIT,
    seed: int = 0,
    seconds: float = math.inf,
) -> Timing:
    """Time each file on one input: ``builds`` new builds, ``rounds`` rounds each, ``visit`` consecutive runs.

    Inputs that a file does not have, since a search has fixed them, are not given to it.

    If the first build shows that this takes more than ``seconds``, each build has fewer rounds, at least two, and then
    there are fewer builds, at least three.
    """
    failures: dict[str, str] = {}
    samples: dict[str, list[float]] = {}
    shuffle = random.Random(seed)
    asked, done = (builds, rounds), 0
    while done < builds:
        started = time.monotonic()
        sessions = {}
        for role, path in files.items():
            if role in failures:
                continue
            try:
                session = open_session(path)
                own = {each.name: feed[each.name] for each in session.get_inputs()}
                sessions[role] = session, _runs(session, own, visit), own
            except Exception as error:  # noqa: BLE001 - the reason is the result
                failures[role] = reason_of(error)
        opened, number = time.monotonic() - started, 0
        while number < rounds:
            order = list(sessions)
            shuffle.shuffle(order)
            for role in order:
                samples.setdefault(role, []).append(_visit(*sessions[role]))
            number += 1
            if not done and number == 1:
                a_round = max(time.monotonic() - started - opened, 1e-9)
                fitting = int((seconds / builds - opened) / a_round) if seconds < math.inf else rounds
                rounds = min(rounds, max(FEWEST_ROUNDS, fitting))
                at_most = seconds / (opened + rounds * a_round)
                builds = min(builds, max(FEWEST_BUILDS, int(min(at_most, builds))))
        done += 1
    whole = {role: taken for role, taken in samples.items() if role not in failures}
    shortened = (
        ""
        if (builds, rounds) == asked
        else f"{builds} builds of {rounds} rounds for {asked[0]} of {asked[1]}"
    )
    return Timing(samples=whole, failures=failures, builds=builds, shortened=shortened)


def open_session(path: Path) -> ort.InferenceSession:
    """A session with one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised as exceptions
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _runs(session: ort.InferenceSession, feed: Feed, visit: int) -> int:
    """Warm up the session; the number of runs of a visit."""
    for _ in range(WARM_UP):
        session.run(None, feed)
    once = _visit(session, 1, feed)
    return max(visit, math.ceil(LEAST_RUNS_MS / max(once, 1e-3)))


def _visit(session: ort.InferenceSession, runs: int, feed: Feed) -> float:
    """Milliseconds of thread CPU time of a run, the median of several consecutive runs."""
    taken = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(runs):
            started = time.thread_time_ns()
            session.run(None, feed)
            taken.append((time.thread_time_ns() - started) / 1e6)
    finally:
        if collecting:
            gc.enable()
    return float(np.median(taken))


def interval_over_builds(logs: Sequence[float] | np.ndarray) -> Interval:
    """The geometric mean of ratios, given as one logarithm per build, and its 95 % interval by Student's t."""
    count = len(logs)
    center = float(np.mean(logs))
    reach = math.inf
    if count > 1:
        freedom = min(count - 1, len(STUDENT))
        reach = STUDENT[freedom - 1] * float(np.std(logs, ddof=1)) / math.sqrt(count)
    return Interval(median=math.exp(center), low=math.exp(center - reach), high=math.exp(center + reach))


def reason_of(error: BaseException) -> str:
    """An exception on one line, at most 160 characters."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return without_folders(f"{type(error).__name__}: {first}")[:160]


def without_folders(text: str) -> str:
    """A text in which paths are names of files: results are published, and folders are those of one machine."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+", "", text)


# ---- data and outputs ---------------------------------------------------------------------------


def feeds_of(data: Path, model: Path, most: int | None = None) -> list[Feed]:
    """The samples of an ``.npz`` as feeds of a model: its first axis counts samples.

    A sample of the declared rank is used unchanged; one of a lower rank gets a first axis of length one.
    """
    ranks = {value.name: len(value.shape) for value in open_session(model).get_inputs()}
    with np.load(data) as arrays:  # noqa: TID251 - closed here, without code of qdqspec
        given = {name: arrays[name] for name in arrays.files if name in ranks}
    count = min(len(array) for array in given.values())
    return [
        {name: _sample(array, number, ranks[name]) for name, array in given.items()}
        for number in range(count if most is None else min(count, most))
    ]


def _sample(array: np.ndarray, number: int, rank: int) -> np.ndarray:
    return np.asarray(array[number]) if array.ndim - 1 == rank else array[number : number + 1]


def outputs(model: Path, feeds: Iterable[Feed]) -> Iterator[Outputs]:
    """The outputs of a model for each feed, by name."""
    session = open_session(model)
    names = [value.name for value in session.get_outputs()]
    for feed in feeds:
        yield dict(zip(names, session.run(names, feed), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """The difference between the outputs of two models: the worst output, over all samples."""

    sqnr_db: float
    cosine: float
    max_abs: float


def compare(reference: Iterable[Outputs], other: Iterable[Outputs]) -> Closeness:
    """SQNR over all samples together, cosine of the worst sample, largest difference; of floating-point outputs."""
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    cosine, largest = 1.0, 0.0
    for one, two in zip(reference, other, strict=True):
        for name, value in one.items():
            if not np.issubdtype(value.dtype, np.floating):
                continue
            a, b = (array.astype(np.float64).reshape(-1) for array in (value, two[name]))
            signal[name] = signal.get(name, 0.0) + float(a @ a)
            noise[name] = noise.get(name, 0.0) + float((a - b) @ (a - b))
            norms = float(np.linalg.norm(a) * np.linalg.norm(b))
            cosine = min(cosine, float(a @ b) / norms) if norms else cosine
            largest = max(largest, float(np.abs(a - b).max(initial=0)))
    worst = min((_decibels(signal[name], noise[name]) for name in signal), default=math.inf)
    return Closeness(sqnr_db=worst, cosine=cosine, max_abs=largest)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
