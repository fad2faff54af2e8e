"""The cost of opening two engines at a time: ``python benchmarks/two_at_a_time.py [SEEDS]``, on a simulated device.

The same devices are measured with all builds open at once and with two at a time, as with insufficient memory. Printed
are ``eps`` (true: twice 1.2 %), the width of the intervals of a ratio and how often they contain the true one, and how
often a challenger becomes the incumbent with that ``eps``. Bars: ``eps`` on average within a tenth of that of the other
mode if builds differ, 93 % of the intervals contain the true ratio, at most 5 % of challengers that are not faster win.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from gate import FEEDS, ROLES, ScaledDevice, no_memory, write_models
from power import contested
from tabulate import tabulate

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.open_engines import HasMemory, has_memory
from qdqspec.search.loop import Contest
from qdqspec.timing.bench import Bench
from qdqspec.timing.race import Load

RATIO = 0.6
SETTINGS = {
    "as on real machines": {"fake.drift": "0.05"},
    "low noise": {"fake.run_noise": "0.005", "fake.drift": "0.05"},
    "high noise, equal builds": {"fake.run_noise": "0.06", "fake.build_noise": "0", "fake.drift": "0.2"},
}


def bench_of(folder: Path, seed: int, words: dict[str, str], memory: HasMemory, ratio: float) -> Bench:
    """A bench on a separate device, on which the tuned model has this ratio to the time of the reference."""
    device = ScaledDevice()
    device.factors[folder / "tuned.onnx"] = ratio
    files = {placement.digest: folder / f"{role}.onnx" for role, placement in ROLES.items()}
    return Bench(
        device,
        lambda placement: files[placement.digest],
        (Load(feeds=FEEDS),),
        clock="cpu",
        random=np.random.default_rng(seed),
        options=BuildOptions(extra={**words, "fake.seed": str(seed)}),
        memory=memory,
    )


def wins(
    folder: Path, seed: int, words: dict[str, str], memory: HasMemory, ratio: float
) -> tuple[bool, float]:
    """Whether a challenger becomes the incumbent, and the ``eps`` that was measured before."""
    contest = Contest(bench_of(folder, seed, words, memory, ratio))
    contest.measure_variation(contested(contest, "reference"))
    return contested(contest, "tuned").incumbent, contest.eps


def row(folder: Path, seeds: int, words: dict[str, str], memory: HasMemory) -> tuple[float, ...]:
    """Mean ``eps``; intervals' mean width, coverage and rounds; false and true wins."""
    same = [wins(folder, seed, words, memory, 1.0) for seed in range(seeds)]
    better = [wins(folder, seed, words, memory, 0.95) for seed in range(seeds)]
    found = [bench_of(folder, seed, words, memory, RATIO).compare(ROLES) for seed in range(seeds)]
    intervals = [evidence.ratios["tuned"] for evidence in found]
    return (
        float(np.mean([eps for _, eps in same])),
        float(np.mean([(i.high - i.low) / i.median for i in intervals])),
        float(np.mean([i.low <= RATIO <= i.high for i in intervals])),
        float(np.mean([len(evidence.samples["tuned"].wall_ms) / evidence.builds for evidence in found])),
        float(np.mean([won for won, _ in same])),
        float(np.mean([won for won, _ in better])),
    )


def main() -> int:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    rows, good = [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        for title, words in SETTINGS.items():
            usual, two = (row(folder, seeds, words, memory) for memory in (has_memory, no_memory))
            good &= two[2] >= 0.93 and two[4] <= 0.05
            if words.get("fake.build_noise") != "0":
                good &= abs(two[0] / usual[0] - 1) <= 0.1
            rows += [(title, "all", *usual), (title, "two", *two)]
    heads = ("noise", "open", "eps", "width", "hold", "rounds", "same wins", "5 % faster wins")
    print(tabulate(rows, heads, floatfmt=".4f", tablefmt="github"))
    print(f"\n{seeds} seeds: {'ok' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
