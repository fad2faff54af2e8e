"""The region strategy: order, incumbent and budget."""

from __future__ import annotations

from dataclasses import replace

from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.blocks import labels_of, tie
from qdqspec.search.strategies.region import RegionSearch, best_by_pattern
from qdqspec.types import Placement, Trial


def by_pairs(placement: Placement) -> float:
    """A cost that every pair reduces."""
    return 1.0 / (1 + placement.pairs)


def hurting(placement: Placement) -> float:
    """A cost that every pair increases."""
    return 1.0 + placement.pairs


def patterns_of(space: SchemeSpace, before: Placement, after: Placement) -> set[str]:
    """The patterns of the units whose labels differ."""
    pattern = {name: tied.pattern for tied in tie(space) for name in tied.units}
    return {pattern[name] for name, _ in set(before.labels) ^ set(after.labels)}


def test_every_candidate_differs_from_the_incumbent_in_one_pattern(space_of, drive) -> None:
    space = space_of()
    best = space.resolve({})
    order: list[str] = []
    for trial in drive(RegionSearch, space, by_pairs, trials=200):
        if trial.phase == "region":
            changed = patterns_of(space, best, trial.placement)
            assert len(changed) == 1
            order += [name for name in changed if name not in order[-1:]]
        best = trial.placement if trial.incumbent else best
    assert len(order) == len(set(order)) > 3  # each pattern is searched once


def test_the_search_of_a_pattern_without_gains_ends_early(space_of, drive) -> None:
    space = space_of()
    count = len({tied.pattern for tied in tie(space)})
    budget = RegionSearch.default_trials("default", space)
    trials = drive(RegionSearch, space, hurting, trials=budget)
    assert len(trials) <= 2 + count * 10 < budget


def test_the_budget_of_each_region_is_limited(space_of, drive) -> None:
    space = space_of()
    start = space.resolve({})
    patterns = {tied.pattern for tied in tie(space)}
    for each in (1, 3):
        budget = RegionSearch.default_trials("default", space, each)
        assert budget == 2 + each * len(patterns)
        counts: dict[str, int] = {}
        for trial in drive(RegionSearch, space, hurting, trials=budget, trials_per_region=each):
            if trial.phase == "region":
                (pattern,) = patterns_of(space, start, trial.placement)
                counts[pattern] = counts.get(pattern, 0) + 1
        assert max(counts.values()) == each
        assert len(counts) >= len(patterns) - 1, "the builds of a region do not reduce those of others"


def test_the_best_of_a_pattern_is_its_last_winner_or_else_its_fastest(space_of) -> None:
    space = space_of()
    first, *rest = tie(space)
    second = next(tied for tied in rest if tied.pattern != first.pattern)
    one = labels_of(space, [first], [first.codes[-1]])
    both = one | labels_of(space, [second], [second.codes[-1]])
    trials = [
        Trial(number=number, phase=phase, placement=space.resolve(labels), ratio=ratio, incumbent=won)
        for number, (phase, labels, ratio, won) in enumerate(
            [
                ("pure", {}, 1.0, True),
                ("region", one, 0.9, False),
                ("region", one, 0.8, False),
                ("region", one, 0.95, False),
                ("region", one, 0.85, True),  # won a race, which takes precedence over ratios
                ("region", both, 0.7, False),
                ("region", both, 0.6, False),
            ]
        )
    ]
    numbers = [
        [t.number for t in best_by_pattern(space, trials[:end], None, None).values()] for end in (4, 5, 7)
    ]
    assert numbers == [[2], [4], [4, 6]]


def test_a_candidate_below_the_sqnr_limit_is_not_the_best_of_its_pattern(space_of, drive) -> None:
    space = space_of()
    trials = [replace(t, sqnr_db=5.0) for t in drive(RegionSearch, space, by_pairs, trials=20)]
    assert not best_by_pattern(space, trials, 20.0, None)
