"""The first placements that meet the limits, found without the noise of each label alone.

Those by one rule are judged by a rehearsal each. If none meets the limits, the units that are noisiest by a rough
analysis are left out. Once the kernels of a placement are known, the labelling of least time for the allowed noise is
composed from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from qdqspec.search._bounded import Bounded
from qdqspec.search._classes import Labels, simple_labels
from qdqspec.search._steps import MARGINS_DB, Steps, Stepwise
from qdqspec.search.base import SearchSetup, profiled
from qdqspec.search.blocks import CostModel
from qdqspec.search.crossings import Codes
from qdqspec.types import FIRST, Placement, Trial

FIRSTS = 2  # labellings thinned by rough noise, at most
GAIN_DB = 4.0  # of corrections, about their median
ATTEMPTS = 2  # at each: the build's effect of the backend and of all data corrects the next prediction


class FirstPlacements(Stepwise):
    """Steps whose first candidates meet the limits. ``phase`` names their trials."""

    phase = "pure"

    def simple(self, past: Sequence[Trial], *, most_wins: int | None = None) -> Steps[list[Trial]]:
        """Placements by one rule that quantize most of the time and meet the limits as they are.

        These are the placements that other tools make. Those that quantize most of the time come first, or under a task
        metric those with the highest SQNR; each is built before the next one's metric is rehearsed. They end after
        ``most_wins``.
        """
        trials = list[Trial]()
        spent = self._spent(past)
        whole = sum(spent[unit] for unit in self._space.everything())
        large = dict[Placement, float]()
        for labels in simple_labels(self._space):
            takes, placement = sum(spent[unit] for unit in labels), self._space.resolve(labels)
            if takes > whole / 2 and self.guide.admits(placement, self._setup.min_sqnr_db):
                large.setdefault(placement, takes)
        if self._setup.min_accuracy is not None:
            large = {placement: self.guide.roughly_db(placement) or 0.0 for placement in large}
        for placement in sorted(large, key=lambda each: -large[each]):
            if most_wins is not None and _wins(trials) >= most_wins:
                break
            trials += yield [profiled(placement, self.phase)]
            if most_wins is None or _wins(trials) < most_wins:
                trials += yield from self.recomposed([*past, *trials])
        return trials

    def recomposed(self, past: Sequence[Trial], *, rough: bool = True) -> Steps[list[Trial]]:
        """The labelling of least time by the profiles so far that is expected to meet the limits, if that is a gain.

        Integer kernels are known from at least one placement then. The noise allowed goes to the blocks that save most
        time for it, conversions between blocks included. With ``rough`` the noise of neighbours together is used.
        """
        if not any(trial.ok and trial.layers and trial.placement.sites for trial in past):
            return []
        costs = CostModel.of(self._space, past)
        bounded = Bounded.of(costs, self.guide, rough=rough) if self.is_limited else None
        codes = self.quickest(costs, bounded)
        best = min(costs.predict(costs.codes_of(trial.placement)) for trial in past if trial.incumbent)
        placement = costs.placed(codes)
        is_gain = costs.predict(codes) <= (1 - self.eps) * best
        if not is_gain or not placement.sites or not self.is_worth_building(placement):
            return []
        return (yield [profiled(placement, self.phase)])

    def quickest(
        self, costs: CostModel, bounded: Bounded | None, share: float = 1.0, more_db: float = 0.0
    ) -> Codes:
        """The labelling of least predicted time with the smallest SQNR worth building, plus ``more_db``.

        The SQNR is higher if the task metric is expected to miss its limit.
        """
        least = self.least_db
        if least is None or bounded is None:
            return costs.compose(share)
        if self._setup.min_accuracy is None:
            return bounded.compose(least + more_db, share)
        for more in (0.0, *MARGINS_DB):
            codes = bounded.compose(least + more_db + more, share)
            if self.keeps_metric(costs.placed(codes)):
                break
        return codes

    def roughly_thinned(self, past: Sequence[Trial], *, always: bool = False) -> Steps[list[Trial]]:
        """A placement that meets the limits, if none by one rule does, before the noise of each label is measured.

        Only where that takes much of the time: the noise of neighbouring tensors together ranks the units then. With
        ``always`` also elsewhere, by the noise of each label.
        """
        trials = list[Trial]()
        if _wins(past) or not self.is_limited or not (always or self.guide.has_rough_noise):
            return trials
        simple = self._by_thinned_time(past, rough=True)
        for labels in (each for each in simple[:FIRSTS] for _ in range(ATTEMPTS)):
            placement = self._space.resolve(self.thinned(labels, past, rough=True))
            # unknown once the time is over
            if placement.sites and self.is_new(placement) and self.guide.predicted_db(placement) is not None:
                trials += yield [profiled(placement, self.phase)]
            if not _wins(trials):
                trials += yield from self.recomposed([*past, *trials])
            if _wins(trials):
                break
        return trials

    def _by_thinned_time(self, past: Sequence[Trial], *, rough: bool = False) -> list[Labels]:
        """Labels by one rule, those first of which most time is expected to remain quantized under the limit."""
        labels, least, spent = list(simple_labels(self._space)), self.least_db, self._spent(past)
        if least is not None:
            labels.sort(key=lambda each: -self.guide.most_spent(each, least, spent, rough=rough))
        return labels


class FirstPlacement(FirstPlacements):
    """Ends at the first placement that meets the limits and wins its race; those given are tried first.

    Then ``excluded`` has the units that are too noisy for the limits even if corrections gain `GAIN_DB`.
    """

    phase = FIRST

    def __init__(self, setup: SearchSetup) -> None:
        self.excluded = frozenset[str]()
        super().__init__(self._phases(), setup)

    def _phases(self) -> Steps[None]:
        trials = yield [profiled(self._space.resolve({}), "pure")]
        for seed in self._setup.seeds:
            if not _wins(trials):
                trials += yield [profiled(seed, FIRST)]
        if not _wins(trials):
            trials += yield from self.simple(trials, most_wins=1)
        yield from self.roughly_thinned(trials, always=True)
        least, everything = self.least_db, self._space.everything()
        if least is not None and self.is_limited:
            spent = self._spent(trials)
            kept = self.guide.thinned(everything, least - GAIN_DB, spent, rough=True)
            self.excluded = frozenset(everything).difference(kept) if kept else frozenset()


def _wins(trials: Sequence[Trial]) -> int:
    """The number of placements that won."""
    return sum(trial.incumbent and bool(trial.placement.sites) for trial in trials)
