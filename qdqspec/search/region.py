"""Search pattern by pattern, as ModelOpt's autotuner does: random and mutated schemes, tied over instances.

May import floors 0 to 3. What differs from there: patterns come in order of their share of the time; every
candidate stands on the placement that has won so far, which stays unless a race is won against it; no resolved
placement is built twice; a pattern that goes on losing is left before its schemes are used up.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from qdqspec.placement.space import SchemeSpace
from qdqspec.search._classes import (
    Choice,
    TiedClass,
    gathered,
    pure_choices,
    spent_by_unit,
    spread,
    tied_classes,
)
from qdqspec.search._steps import Steps, Stepwise
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.select import reaches
from qdqspec.types import Label, Trial

SCHEMES = {"quick": 30, "default": 50, "extensive": 200}  # schemes a pattern, as users of ModelOpt know them
PARENTS = 10  # the best schemes of a pattern, from which mutated ones come
MUTATIONS = 3  # classes that change their label at most
RANDOM_SHARE = 0.3  # of the schemes that are drawn anew instead of mutated
DRAWS = 20  # for each scheme of the budget, before a pattern counts as exhausted
PATIENCE = 0.2  # share of a pattern's schemes that may be lost in a row, ...
LEAST_PATIENCE = 6  # ... and at least so many

Labels: TypeAlias = dict[str, Label]
Inner: TypeAlias = Generator[list[Proposal], list[Trial], Labels]


class RegionSearch(Stepwise):
    """One pattern after the other. Deterministic for a generator and a sequence of answers."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        self._setup = setup
        self._space = setup.space
        self._random = random
        super().__init__(self._search(), setup)

    @staticmethod
    def default_trials(preset: str, space: SchemeSpace) -> int:
        """So many schemes for each pattern, as the preset says, and the two models without a search."""
        return 2 + SCHEMES[preset] * len({tied.pattern for tied in tied_classes(space)})

    def _search(self) -> Steps:
        space = self._space
        everything = [
            labels
            for choice in space.choices
            if self.is_worth_building(space.resolve(labels := space.everything(choice.name)))
        ]
        trials = yield [
            _proposal(space, {}, "pure", profile=True),
            *(Proposal(placement=seed, phase="seed") for seed in self._setup.seeds),
            *(_proposal(space, labels, "pure", profile=True) for labels in everything),
        ]
        best: Labels = {}
        for trial in trials:
            best = dict(trial.placement.labels) if trial.incumbent else best
        groups = _by_share(space, tied_classes(space), trials)
        left = math.fsum(share for _, share in groups)
        for classes, share in groups:
            budget = self._budget(share / left if left > 0 else 1.0)
            best = yield from self._pattern(classes, best, budget)
            left -= share

    def _budget(self, share: float) -> int:
        """Schemes for the next pattern: what the preset allows, of small budgets its share of the rest."""
        rest = max(0, self._setup.trials - self.asked)
        return min(SCHEMES[self._setup.preset], math.ceil(rest * min(1.0, share)))

    def _pattern(self, classes: Sequence[TiedClass], best: Labels, budget: int) -> Inner:
        """Try schemes of one pattern on top of what has won so far; return what has won now."""
        measured: dict[Choice, float] = {}
        patience = max(LEAST_PATIENCE, math.ceil(PATIENCE * budget))
        built = losses = 0
        for choice in self._choices(classes, gathered(classes, best), measured, DRAWS * budget):
            if built == budget or losses == patience:
                break
            proposal = _proposal(self._space, {**best, **spread(self._space, classes, choice)}, "region")
            if not self.is_worth_building(proposal.placement):
                continue
            (trial,) = yield [proposal]
            built += 1
            losses = 0 if trial.incumbent else losses + 1
            if trial.incumbent:
                best = dict(trial.placement.labels)
            if trial.ok and trial.ratio is not None and self._reaches(trial):
                measured[choice] = trial.ratio
        return best

    def _reaches(self, trial: Trial) -> bool:
        return reaches(trial, self._setup.min_sqnr_db, self._setup.min_accuracy)

    def _choices(
        self, classes: Sequence[TiedClass], held: Choice, measured: Mapping[Choice, float], draws: int
    ) -> Iterator[Choice]:
        """Pure schemes first, then drawn ones; none twice. ``measured`` grows while this runs."""
        seen = {held}
        for choice in pure_choices(self._space, classes):
            if choice not in seen:
                seen.add(choice)
                yield choice
        for _ in range(draws):
            choice = self._drawn(classes, held, measured)
            if choice not in seen:
                seen.add(choice)
                yield choice

    def _drawn(self, classes: Sequence[TiedClass], held: Choice, measured: Mapping[Choice, float]) -> Choice:
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


def _proposal(space: SchemeSpace, labels: Labels, phase: str, *, profile: bool = False) -> Proposal:
    return Proposal(placement=space.resolve(labels), phase=phase, profile=profile)


def _by_share(
    space: SchemeSpace, classes: Sequence[TiedClass], trials: Sequence[Trial]
) -> list[tuple[list[TiedClass], float]]:
    """The classes of each pattern with its share of the reference's time, the largest first.

    Without a profile every unit counts the same.
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
