"""The first placements that meet the limits, found without the noise of each label alone.

Those by one rule are judged by a rehearsal each. Where one is slower than the reference, what both profiles show to be
faster is next. If none meets the limits, the units that are noisiest by a rough analysis are left out.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias

from qdqspec.placement.space import SchemeSpace
from qdqspec.search._classes import pure_labels, spent_by_unit, weighted_linear
from qdqspec.search._steps import Steps, Stepwise
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.blocks import CostModel, fuse
from qdqspec.types import FIRST, Placement, Trial

FIRSTS = 2  # labellings thinned by rough noise, at most
ATTEMPTS = 2  # at each: what a build shows of the backend and of all data corrects the next prediction

Phase: TypeAlias = Generator[list[Proposal], list[Trial], list[Trial]]


class FirstPlacements(Stepwise):
    """Steps whose first candidates meet the limits. ``phase`` names their trials."""

    phase = "pure"

    def simple(self, space: SchemeSpace, told: Sequence[Trial], *, most_wins: int | None = None) -> Phase:
        """Placements by one rule that quantize most of the time and meet the limits as they are.

        These are the placements that other tools make. Those that quantize most of the time come first, or under a task
        metric those with the highest SQNR; each is built before the next one's metric is rehearsed. They end after
        ``most_wins``.
        """
        trials = list[Trial]()
        spent = spent_by_unit(space, told[0].layers if told else ())
        whole = sum(spent[unit] for unit in space.everything())
        large = dict[Placement, float]()
        for labels in (*weighted_linear(space), *pure_labels(space)):
            takes, placement = sum(spent[unit] for unit in labels), space.resolve(labels)
            if takes > whole / 2 and self.guide.admits(placement, self._setup.min_sqnr_db):
                large.setdefault(placement, takes)
        if self._setup.min_accuracy is not None:
            large = {placement: self.guide.roughly_db(placement) or 0.0 for placement in large}
        for placement in sorted(large, key=lambda each: -large[each]):
            if most_wins is not None and _wins(trials) >= most_wins:
                break
            trials += yield [profiled(placement, self.phase)]
            trials += yield from self.recomposed(space, [*told, *trials])
        return trials

    def recomposed(self, space: SchemeSpace, told: Sequence[Trial], *, rough: bool = True) -> Phase:
        """What the profiles so far show to be faster, where the latest placement was slower than the reference.

        Another placement by one rule is likely to have the same slow layers.
        """
        timed = [trial for trial in told if trial.ok and trial.layers]
        if told[-1] not in timed or (told[-1].ratio or 0.0) <= 1:
            return []
        costs = CostModel(space, fuse(space, (trial.layers for trial in timed)))
        costs.learn(timed)
        labels = dict(costs.placed(costs.compose(1.0)).labels)
        placement = space.resolve(self.thinned(labels, told, rough=rough))
        if not placement.sites or not self.is_worth_building(placement):
            return []
        return (yield [profiled(placement, self.phase)])

    def roughly_thinned(self, space: SchemeSpace, told: Sequence[Trial]) -> Phase:
        """A placement that meets the limits, if none by one rule does, before the noise of each label is measured.

        Only where that takes much of the time: the noise of neighbouring tensors together ranks the units then.
        """
        trials = list[Trial]()
        least, spent = self.least_db, spent_by_unit(space, told[0].layers if told else ())
        is_limited = least is not None and (self.is_bound or self.is_missed)
        if _wins(told) or least is None or not is_limited or not self.guide.has_rough_noise:
            return trials
        aim = least
        pure = sorted(
            (*weighted_linear(space), *pure_labels(space)),
            key=lambda labels: -self.guide.most_spent(labels, aim, spent, rough=True),
        )
        for labels in (each for each in pure[:FIRSTS] for _ in range(ATTEMPTS)):
            placement = space.resolve(self.thinned(labels, told, rough=True))
            if placement.sites and self.is_new(placement):
                trials += yield [profiled(placement, self.phase)]
            if _wins(trials):
                break
        return trials


class FirstPlacement(FirstPlacements):
    """Ends at the first placement that meets the limits and wins its race; those given are tried first."""

    phase = FIRST

    def __init__(self, setup: SearchSetup) -> None:
        super().__init__(self._phases(setup.space), setup)

    def _phases(self, space: SchemeSpace) -> Steps:
        trials = yield [profiled(space.resolve({}), "pure")]
        for seed in self._setup.seeds:
            if not _wins(trials):
                trials += yield [Proposal(placement=seed, phase=FIRST)]
        if not _wins(trials):
            trials += yield from self.simple(space, trials, most_wins=1)
        yield from self.roughly_thinned(space, trials)


def profiled(placement: Placement, phase: str) -> Proposal:
    """A proposal whose layers are timed too."""
    return Proposal(placement=placement, phase=phase, profile=True)


def _wins(trials: Sequence[Trial]) -> int:
    """The number of placements that won."""
    return sum(trial.incumbent and bool(trial.placement.sites) for trial in trials)
