"""The region strategy: order, incumbent and budget."""

from __future__ import annotations

from dataclasses import replace

from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.blocks import labels_of, tie
from qdqspec.search.strategies.region import SCHEMES, RegionSearch, best_by_pattern
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


def test_the_region_search_begins_with_the_reference_and_full_quantization(space_of, drive) -> None:
    space = space_of()
    first, second, *_ = drive(RegionSearch, space, by_pairs, trials=5)
    assert first.placement == space.resolve({})
    assert second.placement == space.resolve(space.everything())


def test_no_placement_is_proposed_twice(space_of, drive) -> None:
    trials = drive(RegionSearch, space_of(), by_pairs, trials=400)
    assert len({trial.placement.digest for trial in trials}) == len(trials) > 30


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


def test_patterns_are_searched_in_order_of_their_share_of_the_time(space_of, drive) -> None:
    space = space_of()
    spent = {node.name: 1.0 + node.index for node in space.model.nodes}  # as in the profile
    share: dict[str, float] = {}
    for tied in tie(space):
        time = sum(spent[node] for name in tied.units for node in space.by_id[name].nodes)
        share[tied.pattern] = share.get(tied.pattern, 0.0) + time
    start = space.resolve({})
    seen: list[str] = []
    for trial in drive(RegionSearch, space, hurting, trials=300):
        if trial.phase == "region":
            (pattern,) = patterns_of(space, start, trial.placement)
            seen += [pattern] if pattern not in seen else []
    assert seen == sorted(share, key=lambda name: -share[name])


def test_slower_candidates_do_not_change_the_incumbent(space_of, drive) -> None:
    trials = drive(RegionSearch, space_of(), hurting, trials=300)
    assert [trial.number for trial in trials if trial.incumbent] == [0]


def test_the_search_of_a_pattern_without_gains_ends_early(space_of, drive) -> None:
    space = space_of()
    count = len({tied.pattern for tied in tie(space)})
    budget = RegionSearch.default_trials("default", space)
    trials = drive(RegionSearch, space, hurting, trials=budget)
    assert len(trials) <= 2 + count * 10 < budget


def test_a_small_budget_is_divided_among_the_patterns(space_of, drive) -> None:
    space = space_of()
    start = space.resolve({})
    trials = [t for t in drive(RegionSearch, space, hurting, trials=24) if t.phase == "region"]
    assert len(set().union(*(patterns_of(space, start, trial.placement) for trial in trials))) >= 4


def test_only_the_pattern_that_gains_is_quantized(space_of, drive) -> None:
    space = space_of()
    good = max(tie(space), key=lambda tied: len(tied.units)).pattern
    pattern = {name: tied.pattern for tied in tie(space) for name in tied.units}

    def cost(placement: Placement) -> float:
        gains = sum(pattern[name] == good for name, _ in placement.labels)
        return 1.0 - 0.05 * gains + 0.05 * (len(placement.labels) - gains)

    best = min(drive(RegionSearch, space, cost, trials=200), key=cost_of)
    assert {pattern[name] for name, _ in best.placement.labels} == {good}


def cost_of(trial: Trial) -> float:
    assert trial.ratio is not None
    return trial.ratio


def test_failed_builds_do_not_change_the_incumbent(space_of, drive) -> None:
    space = space_of()
    trials = drive(RegionSearch, space, lambda p: 1.0 if not p.sites else None, trials=60)
    assert [trial.incumbent for trial in trials].count(True) == 1
    assert len(trials) > 10


def test_the_seed_determines_the_region_search(space_of, drive) -> None:
    space = space_of()
    runs = [[t.placement.digest for t in drive(RegionSearch, space, by_pairs, seed=s)] for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_the_search_continues_from_a_seed_that_wins(space_of, drive) -> None:
    space = space_of()
    seed = space.resolve({space.units[3].id: space.units[3].full})

    def cost(placement: Placement) -> float:
        return 0.5 if placement == seed else 1.0 + 0.001 * placement.pairs

    trials = drive(RegionSearch, space, cost, seeds=(seed,), trials=30)
    assert trials[1].phase == "seed"
    for trial in trials[3:]:
        assert len(patterns_of(space, seed, trial.placement)) == 1


def test_presets_set_the_number_of_schemes_per_pattern(space_of) -> None:
    space = space_of()
    count = len({tied.pattern for tied in tie(space)})
    assert {p: RegionSearch.default_trials(p, space) for p in SCHEMES} == {
        "quick": 2 + 30 * count, "default": 2 + 50 * count, "extensive": 2 + 200 * count,
    }  # fmt: skip


def test_a_model_without_units_ends_after_the_reference(space_of, drive) -> None:
    assert len(drive(RegionSearch, space_of("digits_resnet", "Identity"), by_pairs)) == 1


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
