"""The noise of each block, for a front of time and accuracy, or once a candidate was below the limit.

It is known from rehearsals; where nothing can be rehearsed, each block is built alone, and only run for its accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qdqspec.parity.compare import power_of
from qdqspec.search.base import Proposal, profiled
from qdqspec.search.blocks import block_labels
from qdqspec.search.edges import FP
from qdqspec.search.energy import Energy
from qdqspec.search.stepwise import Steps
from qdqspec.types import EXACT_DB, LabelNoise, Placement, Trial, format_of, kind_of

if TYPE_CHECKING:
    from qdqspec.search.strategies.attribution import Attribution


def measure_noise(search: Attribution) -> Steps[None]:
    """Give the search the noise of blocks; for a front, build labellings of least time at rising prices of it."""
    is_due = search.setup.pareto or search.is_exceeded
    if not is_due or search.energy.noise is not None:
        return
    everything = search.space.resolve(search.space.everything())
    if not search.guide.has_noise and search.guide.predicted_db(everything) is None:
        noise = yield from _built_noise(search)
        search.guide.oracle = SumOfNoise(noise, search.trials)
    search.energy.noise = search.guide.block_noise(search.energy.blocks)
    if search.setup.pareto and search.energy.noise is not None:
        yield [profiled(placement, "trade") for placement in _priced(search.energy)]


def _built_noise(search: Attribution) -> Steps[LabelNoise]:
    """The noise of units from builds of each block alone, in each format."""
    space, blocks = search.space, search.energy.blocks
    labels, alone = space.labels, dict[tuple[int, str], Placement]()
    for block in blocks:
        quantized = (code for code in block.codes if code != FP)
        for code in sorted(quantized, key=lambda code: kind_of(labels[code]) != "in+out"):
            key = block.index, format_of(labels[code])
            alone.setdefault(key, space.resolve(block_labels(space, block, code)))
    trials = yield [Proposal(placement=each, phase="sensitivity", timed=False) for each in alone.values()]
    known = (*search.trials, *trials)
    measured = {trial.placement: trial.sqnr_db for trial in known if trial.sqnr_db is not None}
    numbers = {key: number for number, key in enumerate(alone)}
    # a block that could not be built alone counts as one of 20 dB
    powers = [power_of(measured.get(placement, 20.0)) for placement in alone.values()]
    parts = {
        (unit, label): (numbers[block.index, format_of(label)],)
        for block in blocks
        for unit in block.units
        for label in (*space.by_id[unit].labels[1:], *space.by_id[unit].halves)
        if (block.index, format_of(label)) in numbers
    }
    return LabelNoise(powers, parts)


def _priced(energy: Energy, prices: int = 12) -> list[Placement]:
    """The labellings of least energy at rising prices of noise: the convex part of the front of time and noise.

    More ``prices`` give a front with more points, and more builds.
    """
    assert energy.noise is not None
    largest = float(energy.noise.max(axis=1, initial=0.0).sum())
    rate = float(energy.times[:, FP].sum()) / max(largest, 1e-12)
    return [energy.placed(energy.minimize(price=rate * 10**each)) for each in np.linspace(-2, 4, prices)]


class SumOfNoise:
    """Predicts the SQNR of a placement by the sum of the noise of its units, corrected by builds."""

    doubt_db = 1.0  # of a sum: noise of neighbours that share a tensor does not add up

    def __init__(self, noise: LabelNoise, trials: Sequence[Trial]) -> None:
        self._noise = noise
        self._offsets: list[float] = []
        for trial in trials:
            self.learn(trial)

    def noise(self) -> LabelNoise:
        """Noise power over signal power of each (unit, label) alone."""
        return self._noise

    def predicted_db(self, placement: Placement) -> float:
        """The expected SQNR."""
        if not placement.sites:
            return EXACT_DB
        return self._sum_db(placement) + float(np.median(self._offsets or [0.0]))

    def keeps_metric(self, placement: Placement) -> bool | None:  # noqa: ARG002 - the seam's signature
        """Nothing is known of a task metric."""
        return None

    def learn(self, trial: Trial) -> None:
        """Learn from a built candidate how its SQNR differs from the sum."""
        if trial.sqnr_db is not None and trial.placement.sites:
            self._offsets.append(trial.sqnr_db - self._sum_db(trial.placement))

    def _sum_db(self, placement: Placement) -> float:
        parts = {part for key in placement.labels for part in self._noise.parts.get(key, ())}
        power = self._noise.power_of(parts)
        return -10 * math.log10(power) if power > 0 else EXACT_DB
