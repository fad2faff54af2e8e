"""The worth of each phase of the default strategy where the best placement is known: a network of seven blocks.

    python benchmarks/ablation_optimum.py [--seeds 30] [--without compose flip ...]

All placements of the network are enumerated. Its device has invented times without noise, and the outputs have
additive noise. A cell has the mean of the selected placements' times over that of the best placement which the limit
admits, and the mean number of builds. No time of this machine counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np
from ablation_search import PHASES
from tabulate import tabulate

from qdqspec.search.base import SearchSetup
from qdqspec.search.limits import Limits
from qdqspec.search.strategies.attribution import Attribution
from qdqspec.testing.strategies import Oracle, drive, small_space
from qdqspec.types import Placement

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from searches import Additive, Device, ScoringDevice, distance, limited

WHOLE = "whole"
TRIALS = 60
SPACE = small_space()

Searched = tuple[float, int]  # the distance from the best placement, and builds
Condition = Callable[[int], Searched]  # by the seed of the device


def main() -> int:
    """Print one line for each condition."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--without", nargs="*", choices=PHASES, default=PHASES)
    asked = parser.parse_args()
    whole = Attribution.phases
    rows = []
    for name, condition in CONDITIONS.items():
        cells = []
        for variant in (WHOLE, *asked.without):
            Attribution.phases = [phase for phase in whole if phase.__name__ != variant]
            distances, builds = zip(*map(condition, range(asked.seeds)), strict=True)
            cells.append(f"{fmean(distances):.3f} ({fmean(builds):.1f})")
        rows.append((name, *cells))
    print(tabulate(rows, ("", WHOLE, *(f"without {name}" for name in asked.without)), tablefmt="github"))
    return 0


def _free(seed: int) -> Searched:
    """No limit."""
    return _search(Oracle(SPACE, seed), seed, lambda _: True)


def _limited(least_db: float, *, noise: bool) -> Condition:
    """A limit of the SQNR; with ``noise`` the noise of labels is known before anything is built."""

    def condition(seed: int) -> Searched:
        truth = Additive(SPACE)
        device = Device(SPACE, seed, truth, least_db)
        return _search(
            device,
            seed,
            lambda each: truth.truth(each) >= least_db,
            limited(least_db),
            truth if noise else None,
        )

    return condition


def _scored(least: float) -> Condition:
    """A limit of a task metric that grows with the SQNR, with two decibels of variation."""

    def condition(seed: int) -> Searched:
        truth = Additive(SPACE)

        def score(placement: Placement) -> float:
            return min(1.0, (truth.truth(placement) + 2 * int(placement.digest[:4], 16) / 0xFFFF) / 50)

        def admits(placement: Placement) -> bool:
            return score(placement) >= least

        device = ScoringDevice(SPACE, seed, truth, least, score)
        return _search(device, seed, admits, limited(least_score=least))

    return condition


def _refused(seed: int) -> Searched:
    """Nothing builds with one of the blocks."""
    unit = SPACE.units[seed % len(SPACE.units)].id
    device = Oracle(SPACE, seed, lambda placement: unit in dict(placement.labels))
    return _search(device, seed, lambda placement: unit not in dict(placement.labels))


def _search(
    device: Oracle,
    seed: int,
    admits: Callable[[Placement], bool],
    limits: Limits | None = None,
    accuracy: Additive | None = None,
) -> Searched:
    """Search, and compare the winner with the best of all placements that are admitted."""
    setup = SearchSetup(space=SPACE, trials=TRIALS, limits=limits or limited(), accuracy=accuracy)
    trials = drive(Attribution(setup, np.random.default_rng(seed)), device, trials=TRIALS)
    return distance(trials, device, admits), len(trials)


CONDITIONS: dict[str, Condition] = {
    "no limit": _free,
    **{f"{least:.0f} dB": _limited(least, noise=True) for least in (36.0, 38.0, 40.0)},
    **{f"{least:.0f} dB, noise not predicted": _limited(least, noise=False) for least in (36.0, 38.0, 40.0)},
    **{f"a metric of {least}": _scored(least) for least in (0.72, 0.78, 0.84)},
    "one block does not build": _refused,
}


if __name__ == "__main__":
    sys.exit(main())
