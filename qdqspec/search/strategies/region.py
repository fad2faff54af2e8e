"""Search pattern by pattern, like ModelOpt's autotuner: random and mutated schemes, tied over instances.

Unlike there, patterns come in order of their share of the time, every candidate extends the placement that has won so
far, no placement is built twice, and a pattern that keeps losing is abandoned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeAlias

from qdqspec.qdq import SchemeSpace
from qdqspec.search.base import Proposal, Steps, Stepwise
from qdqspec.search.blocks import Labels, UnitBlock, block_codes, labels_of, tie, uniform_codes
from qdqspec.types import Trial

Scheme: TypeAlias = tuple[int, ...]  # a code for each block of a pattern

SCHEMES = {"quick": 30, "default": 50, "extensive": 200}  # schemes for each pattern, as in ModelOpt


class RegionSearch(Stepwise):
    """One pattern after the other. Deterministic for a generator and a sequence of trials.

    A scheme is drawn at random with the probability ``random_share``, else by changing up to ``mutations`` labels of
    one of the ``parents`` best schemes of its pattern: more of each explore more. A pattern is abandoned after
    ``patience`` of its schemes lost in a row, and at least ``least_patience`` did.
    """

    random_share: ClassVar[float] = 0.3
    mutations: ClassVar[int] = 3
    parents: ClassVar[int] = 10
    patience: ClassVar[float] = 0.2
    least_patience: ClassVar[int] = 6

    @staticmethod
    def default_trials(preset: str, space: SchemeSpace, trials_per_region: int | None = None) -> int:
        """The given or the preset's number of schemes for each pattern, plus two models without a search."""
        patterns = {block.pattern for block in tie(space)}
        return 2 + (trials_per_region or SCHEMES[preset]) * len(patterns)

    def _search(self) -> Steps[None]:
        yield self.fitted_everything()
        best: Labels = dict(self.incumbent.placement.labels)
        groups: dict[str, list[UnitBlock]] = {}
        for block in tie(self.space):
            groups.setdefault(block.pattern, []).append(block)
        own = self.spent
        spent = {
            pattern: math.fsum(own[name] for block in blocks for name in block.units)
            for pattern, blocks in groups.items()
        }
        left, given = math.fsum(spent.values()), self.setup.trials_per_region
        for pattern in sorted(groups, key=lambda pattern: -spent[pattern]):  # stable: ties in graph order
            # schemes for this pattern: given, or the preset's and at most its share of the trials left
            rest = max(0, self.setup.trials - len(self._asked))
            share = min(1.0, spent[pattern] / left) if left > 0 else 1.0
            usual = min(SCHEMES[self.setup.preset], math.ceil(rest * share))
            budget = usual if given is None else min(given, rest)
            best = yield from self._pattern(groups[pattern], best, budget)
            left -= spent[pattern]

    def _pattern(self, blocks: Sequence[UnitBlock], best: Labels, budget: int) -> Steps[Labels]:
        """Try schemes of one pattern in addition to the winner so far; returns the new winner."""
        measured: dict[Scheme, float] = {}
        held: Scheme = tuple(block_codes(self.space, blocks, best).tolist())
        rest = {unit: label for unit, label in best.items() if not any(unit in b.units for b in blocks)}
        patience = max(self.least_patience, math.ceil(self.patience * budget))
        built = losses = 0
        seen = {held}
        drawn = (self._drawn(blocks, held, measured) for _ in range(20 * budget))
        for scheme in itertools.chain(uniform_codes(self.space, blocks), drawn):
            if scheme in seen:
                continue
            if built == budget or losses == patience:
                break
            seen.add(scheme)
            placement = self.space.resolve({**rest, **labels_of(self.space, blocks, scheme)})
            if not self.is_worth_building(placement):
                continue
            (trial,) = yield [Proposal(placement=placement, phase="region")]
            built += 1
            losses = 0 if trial.incumbent else losses + 1
            if trial.incumbent:
                best = dict(trial.placement.labels)
            if trial.ok and trial.ratio is not None and self.guide.limits.admits(placement):
                measured[scheme] = trial.ratio
        return best

    def _drawn(self, blocks: Sequence[UnitBlock], held: Scheme, measured: Mapping[Scheme, float]) -> Scheme:
        """A random scheme, or one of the best of those measured so far with some other labels."""
        random = self.random
        if random.random() < self.random_share:
            return tuple(int(random.choice(block.codes)) for block in blocks)
        ranked = sorted(measured, key=lambda scheme: (measured[scheme], scheme))[: self.parents] or [held]
        scheme = list(ranked[int(random.integers(len(ranked)))])
        count = min(len(blocks), int(random.integers(1, self.mutations + 1)))
        for index in random.choice(len(blocks), size=count, replace=False):
            others = [code for code in blocks[index].codes if code != scheme[index]]
            scheme[index] = int(random.choice(others))
        return tuple(scheme)


def best_by_pattern(
    space: SchemeSpace, trials: Sequence[Trial], min_sqnr_db: float | None, min_accuracy: float | None
) -> dict[str, Trial]:
    """The best candidate for each pattern: the last that won a race, else the fastest that is accurate enough."""
    pattern = {name: block.pattern for block in tie(space) for name in block.units}
    best: dict[str, Trial] = {}
    held: Labels = {}
    for trial in trials:
        labels = dict(trial.placement.labels)
        fits = trial.ok and trial.reaches(min_sqnr_db, min_accuracy)
        if trial.phase == "region" and trial.ratio is not None and fits:
            changed = next(pattern[name] for name, _ in labels.items() ^ held.items())
            known = best.get(changed)
            if known is None or trial.incumbent or (not known.incumbent and trial.ratio < (known.ratio or 0)):
                best[changed] = trial
        held = labels if trial.incumbent and not trial.placement.given else held
    return best


strategy = RegionSearch
