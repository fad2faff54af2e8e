"""Power, false wins and runs of races and confirmations: ``python benchmarks/power.py [SEEDS]``, on a simulated device.

A challenger with a known ratio to the time of the incumbent is raced as in a search: ``eps`` is measured first, and a
winner has to win again with new builds. *Wins* is how often it becomes the incumbent, *runs* the number of runs for
noise, screening and races, in runs of the incumbent. Then both are confirmed: *proved* is how often a gain of 2 % is
proved (`RatioTest.proves`); *enclosed* is how often the interval that encloses both conditions proves it, and *in a
row* that of consecutive runs alone; *holds* is how often the intervals of the mean and of consecutive runs contain the
true ratio. The first run after another model has additional noise, as large as that of a consecutive run or 1.5 times
as large. The model takes 26 ms. Bars: at most 5 % of equal models win, at least 80 % of those that take
95 % do, and 93 % of the intervals contain the true ratio.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from gate import FEEDS, NOISE, ROLES, ScaledDevice, write_models
from tabulate import tabulate

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeEngine
from qdqspec.search.base import Proposal
from qdqspec.search.confirmation import is_settled
from qdqspec.search.loop import Contest
from qdqspec.timing.bench import Bench
from qdqspec.timing.race import Load
from qdqspec.timing.stats import estimate_ratios
from qdqspec.types import LatencyEvidence, Samples, Trial

SHARES = (1.02, 1.0, 0.99, 0.98, 0.97, 0.95, 0.9, 0.6)
MIN_GAIN = 0.02
LONG = 11.0  # factor on the 2.4 ms of the model: 26 ms
DEVICES = {
    "busy: 3 % a run, 1.2 % a build": NOISE,
    "quiet: 1 % a run, 0.3 % a build": {
        "fake.run_noise": "0.01", "fake.build_noise": "0.003", "fake.drift": "0.05",
    },
}  # fmt: skip


class CountingDevice(ScaledDevice):
    """A device that counts runs and increases the noise of the first of several runs by a factor."""

    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.runs = 0
        self.first = first

    def build(self, model: Path, options: BuildOptions) -> FakeEngine:
        engine = super().build(model, options)
        take, random = engine.time, np.random.default_rng([self._builds, 1])
        more = float(options.extra["fake.run_noise"]) * np.sqrt(self.first**2 - 1)

        def time(runs: int, warmup: int = 0, profile: int = 0) -> Samples:
            self.runs += runs + warmup
            taken = take(runs, warmup, profile)
            if warmup or not more or not runs:
                return taken
            factor = float(np.exp(more * random.standard_normal()))
            wall, cpu = ((factor * ms[0], *ms[1:]) for ms in (taken.wall_ms, taken.cpu_ms))
            return Samples(wall_ms=wall, cpu_ms=cpu)

        engine.time = time
        return engine


def bench_of(folder: Path, seed: int, words: dict[str, str], share: float, first: float = 1.0) -> Bench:
    device = CountingDevice(first)
    device.factors |= {folder / "reference.onnx": LONG, folder / "tuned.onnx": LONG * share}
    files = {placement.digest: folder / f"{role}.onnx" for role, placement in ROLES.items()}
    extra = {**words, "fake.seed": str(seed)}
    return Bench(
        device,
        lambda placement: files[placement.digest],
        (Load(feeds=FEEDS),),
        clock="cpu",
        random=np.random.default_rng(seed),
        options=BuildOptions(extra=extra),
    )


def contested(contest: Contest, role: str) -> Trial:
    """The trial of a model."""
    return contest.measure(contest.build(0, Proposal(placement=ROLES[role], phase="pure")))


def raced(folder: Path, seed: int, words: dict[str, str], share: float) -> tuple[bool, int, int]:
    """Whether the challenger becomes the incumbent; the runs of its trial, and those for the noise."""
    bench = bench_of(folder, seed, words, share)
    device = bench.backend
    contest = Contest(bench)
    contest.measure_variation(contested(contest, "reference"))
    before = device.runs
    return contested(contest, "tuned").incumbent, device.runs - before, before


def confirmed(
    folder: Path, seed: int, words: dict[str, str], share: float, first: float
) -> tuple[float, ...]:
    """Whether a gain is proved, by three criteria, and two intervals contain the true ratio; the number of runs."""
    bench = bench_of(folder, seed, words, share, first)
    found = bench.compare(ROLES, is_settled=lambda ratios: is_settled([ratios["tuned"]], MIN_GAIN))
    tested, row = found.tested["tuned"], in_a_row(found)
    flags = [tested.proves(MIN_GAIN), *(each.high < 1 - MIN_GAIN for each in (tested.enclosing, row))]
    flags += [each.low <= share <= each.high for each in (tested.mean, row)]
    return (*map(float, flags), float(bench.backend.runs))


def in_a_row(found: LatencyEvidence):
    """The interval of the ratio by consecutive runs only."""
    split = {
        role: np.asarray(samples.on(found.clock)).reshape(found.builds, -1)
        for role, samples in found.samples.items()
    }
    return estimate_ratios([split], "reference")["tuned"].test.mean


def main() -> int:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    races, confirmations, good = [], [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        for title, words in DEVICES.items():
            for share in SHARES:
                won, runs, noise = np.mean(
                    [raced(folder, seed, words, share) for seed in range(seeds)], axis=0
                )
                good &= not (share == 1 and won > 0.05) and not (share == 0.95 and won < 0.8)
                races.append((title, share, won, runs, noise))
            for share in (0.98, 0.97, 0.95, 0.9):
                for first in (1.0, 1.5):
                    found = [confirmed(folder, seed, words, share, first) for seed in range(seeds)]
                    figures = np.mean(found, axis=0)
                    good &= figures[3] >= 0.93
                    confirmations.append((title, share, first, *figures))
    print(
        tabulate(races, ("noise", "true", "wins", "runs", "runs of noise"), floatfmt=".3g", tablefmt="github")
    )
    heads = (
        "noise",
        "true",
        "noise of a first run",
        "proved",
        "enclosed",
        "in a row",
        "holds",
        "in a row",
        "runs",
    )
    print("\n" + tabulate(confirmations, heads, floatfmt=".3g", tablefmt="github"))
    print(f"\n{seeds} seeds: {'ok' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
