"""Search pattern by pattern, like ModelOpt's autotuner: random and mutated schemes, tied over instances.

Differences from ModelOpt: patterns come in order of their share of the time; every candidate extends the placement that
has won so far, which is replaced only after a won race; no resolved placement is built twice; a pattern that keeps
losing is abandoned before its schemes are used up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup, profiled
from qdqspec.search.labels import (
    ClassLabels,
    Labels,
    TiedClass,
    gathered,
    pure_choices,
    spent_by_unit,
    spread,
    tied_classes,
)
from qdqspec.search.select import reaches
from qdqspec.search.stepwise import Steps, Stepwise
from qdqspec.types import Label, Trial

SCHEMES = {"quick": 30, "default": 50, "extensive": 200}  # schemes for each pattern, as in ModelOpt
PARENTS = 10  # the best schemes of a pattern, which are mutated
MUTATIONS = 3  # largest number of classes whose label changes
RANDOM_SHARE = 0.3  # share of schemes that are drawn at random instead of mutated
DRAWS = 20  # for each scheme of the budget, before a pattern counts as exhausted
PATIENCE = 0.2  # share of a pattern's schemes that may lose in a row, ...
LEAST_PATIENCE = 6  # ... and at least this many


class RegionSearch(Stepwise):
    """One pattern after the other. Deterministic for a generator and a sequence of trials."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        self._random = random
        super().__init__(self._search(), setup)

    @staticmethod
    def default_trials(preset: str, space: SchemeSpace, trials_per_region: int | None = None) -> int:
        """The given or the preset's number of schemes for each pattern, plus two models without a search."""
        patterns = {tied.pattern for tied in tied_classes(space)}
        return 2 + (trials_per_region or SCHEMES[preset]) * len(patterns)

    def _search(self) -> Steps[None]:
        trials = yield self.first_proposals()
        trials += yield [profiled(placement, "pure") for placement in self.thinned_everything()]
        best: Labels = next((dict(t.placement.labels) for t in reversed(trials) if t.incumbent), {})
        groups = _by_share(self.space, tied_classes(self.space), trials)
        left = math.fsum(share for _, share in groups)
        for classes, share in groups:
            budget = self._budget(share / left if left > 0 else 1.0)
            best = yield from self._pattern(classes, best, budget)
            left -= share

    def _budget(self, share: float) -> int:
        """The number of schemes for the next pattern: the given or the preset's; at most its share of the trials left.

        With a given number a pattern may use all of them.
        """
        rest = max(0, self.setup.trials - len(self._asked))
        if self.setup.trials_per_region is not None:
            return min(self.setup.trials_per_region, rest)
        return min(SCHEMES[self.setup.preset], math.ceil(rest * min(1.0, share)))

    def _pattern(self, classes: Sequence[TiedClass], best: Labels, budget: int) -> Steps[Labels]:
        """Try schemes of one pattern in addition to the winner so far; returns the new winner."""
        measured: dict[ClassLabels, float] = {}
        patience = max(LEAST_PATIENCE, math.ceil(PATIENCE * budget))
        built = losses = 0
        for choice in self._choices(classes, gathered(classes, best), measured, DRAWS * budget):
            if built == budget or losses == patience:
                break
            placement = self.space.resolve({**best, **spread(self.space, classes, choice)})
            if not self.is_worth_building(placement):
                continue
            (trial,) = yield [Proposal(placement=placement, phase="region")]
            built += 1
            losses = 0 if trial.incumbent else losses + 1
            if trial.incumbent:
                best = dict(trial.placement.labels)
            fits = trial.ok and reaches(trial, self.setup.min_sqnr_db, self.setup.min_accuracy)
            if fits and trial.ratio is not None:
                measured[choice] = trial.ratio
        return best

    def _choices(
        self,
        classes: Sequence[TiedClass],
        held: ClassLabels,
        measured: Mapping[ClassLabels, float],
        draws: int,
    ) -> Iterator[ClassLabels]:
        """Pure schemes first, then drawn ones; each once. ``measured`` grows while this runs."""
        seen = {held}
        for choice in pure_choices(self.space, classes):
            if choice not in seen:
                seen.add(choice)
                yield choice
        for _ in range(draws):
            choice = self._drawn(classes, held, measured)
            if choice not in seen:
                seen.add(choice)
                yield choice

    def _drawn(
        self, classes: Sequence[TiedClass], held: ClassLabels, measured: Mapping[ClassLabels, float]
    ) -> ClassLabels:
        if self._random.random() < RANDOM_SHARE:
            return tuple(self._label(tied.labels) for tied in classes)
        parents = sorted(measured, key=lambda choice: (measured[choice], choice))[:PARENTS] or [held]
        choice = list(parents[int(self._random.integers(len(parents)))])
        count = min(len(classes), int(self._random.integers(1, MUTATIONS + 1)))
        for index in self._random.choice(len(classes), size=count, replace=False):
            others = [label for label in classes[index].labels if label != choice[index]]
            choice[index] = self._label(others)
        return tuple(choice)

    def _label(self, labels: Sequence[Label]) -> Label:
        return labels[int(self._random.integers(len(labels)))]


def best_by_pattern(
    space: SchemeSpace, trials: Sequence[Trial], min_sqnr_db: float | None, min_accuracy: float | None
) -> dict[str, Trial]:
    """The best candidate for each pattern: the last that won a race, else the fastest that is accurate enough.

    Each candidate of a pattern differs in this pattern alone from the winner before it.
    """
    pattern = {name: tied.pattern for tied in tied_classes(space) for name in tied.units}
    best: dict[str, Trial] = {}
    held: Labels = {}
    for trial in trials:
        labels = dict(trial.placement.labels)
        fits = trial.ok and reaches(trial, min_sqnr_db, min_accuracy)
        if trial.phase == "region" and trial.ratio is not None and fits:
            changed = next(pattern[name] for name, _ in labels.items() ^ held.items())
            known = best.get(changed)
            if known is None or trial.incumbent or (not known.incumbent and trial.ratio < (known.ratio or 0)):
                best[changed] = trial
        held = labels if trial.incumbent and not trial.placement.given else held
    return best


def _by_share(
    space: SchemeSpace, classes: Sequence[TiedClass], trials: Sequence[Trial]
) -> list[tuple[list[TiedClass], float]]:
    """The classes of each pattern with its share of the reference's time, the largest first.

    Without a profile all units have equal times.
    """
    groups: dict[str, list[TiedClass]] = {}
    for tied in classes:
        groups.setdefault(tied.pattern, []).append(tied)
    spent = spent_by_unit(space, next((trial.layers for trial in trials if trial.layers), ()))
    shares = {
        pattern: math.fsum(spent[name] for tied in group for name in tied.units)
        for pattern, group in groups.items()
    }
    total = math.fsum(shares.values()) or 1.0
    ordered = sorted(groups, key=lambda pattern: -shares[pattern])  # stable: ties in graph order
    return [(groups[pattern], shares[pattern] / total) for pattern in ordered]


strategy = RegionSearch
