"""The strategies exhaustive, region, subgraph and optuna: order, incumbent and budget."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from searches import kernel, limited

from qdqspec.errors import ConfigError
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.blocks import labels_of, tie
from qdqspec.search.select import front_of
from qdqspec.search.strategies.exhaustive import Exhaustive
from qdqspec.search.strategies.optuna import OptunaSearch
from qdqspec.search.strategies.region import RegionSearch, best_by_pattern
from qdqspec.search.strategies.subgraph import SubgraphSearch, groups_of, inner_ratio, nodes_of
from qdqspec.types import Placement, Trial

# ---- exhaustive ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7])
def test_every_labelling_is_proposed_once(space_of, drive, batch: int) -> None:
    space = space_of("digits_resnet", "Gemm", "GlobalAveragePool", "Flatten", "Add")
    classes = tie(space)
    labellings = itertools.product(*(tied.codes for tied in classes))
    expected = {space.resolve(labels_of(space, classes, choice)).digest for choice in labellings}
    assert Exhaustive.default_trials("quick", space) == math.prod(len(tied.codes) for tied in classes)
    trials = drive(Exhaustive, space, lambda each: 1.0 - 0.001 * len(each.sites), trials=2000, batch=batch)
    assert [trial.placement for trial in trials[:2]] == [space.resolve({}), space.resolve(space.everything())]
    assert sorted(trial.placement.digest for trial in trials) == sorted(expected)
    assert len(expected) > 8


@pytest.mark.parametrize("name", ["digits_resnet", "squeezenet10"])
def test_a_large_space_is_an_error_with_its_size(space_of, drive, name: str) -> None:
    space = space_of(name)
    with pytest.raises(ConfigError, match=r"can be labelled in (2,097,152|10\^\d+|[\d,]+) ways") as caught:
        Exhaustive.default_trials("default", space)
    assert "attribution" in (caught.value.cure or "")
    assert f"{name}.onnx" in str(caught.value)
    with pytest.raises(ConfigError, match="ways"):
        Exhaustive.refuse(space)


# ---- region -------------------------------------------------------------------------------------------


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


def test_the_budget_of_each_region_is_limited_and_one_without_gains_ends_early(space_of, drive) -> None:
    space = space_of()
    start = space.resolve({})
    patterns = {tied.pattern for tied in tie(space)}
    usual = RegionSearch.default_trials("default", space)
    assert len(drive(RegionSearch, space, hurting, trials=usual)) <= 2 + len(patterns) * 10 < usual
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
    for end, numbers in ((4, [2]), (5, [4]), (7, [4, 6])):
        assert [t.number for t in best_by_pattern(space, trials[:end], None, None).values()] == numbers
    assert not best_by_pattern(space, [replace(each, sqnr_db=5.0) for each in trials], 20.0, None)


# ---- subgraph -----------------------------------------------------------------------------------------


NOTHING = Placement(sites=frozenset())


def test_every_unit_is_in_one_group_of_bounded_size(space_of) -> None:
    for name in ("digits_resnet", "squeezenet10", "ultraface_rfb320"):
        space = space_of(name)
        groups = groups_of(space, [kernel(node.name) for node in space.model.nodes])
        assert sorted(u for group in groups for u in group.units) == sorted(u.id for u in space.units)
        assert all(len(nodes_of(space, group)) <= 12 for group in groups)
        for group in groups:
            places = [space.model.by_name[node].index for node in nodes_of(space, group)]
            assert places == sorted(places)
        assert len(groups) < len(space.units)


def test_half_schemes_that_win_alone_are_combined_in_the_whole_model(space_of, drive) -> None:
    """Each step adds the scheme to all groups of a kind, and the raw winner has all of them."""
    space = space_of("digits_resnet")

    def alone(placement: Placement) -> float:
        has_activations = any(not site.weight for site in placement.sites)
        return 1.3 if has_activations else 0.5

    trials = drive(SubgraphSearch, space, lambda p: 1 - 0.02 * len(p.sites), alone=alone, trials=200)
    convs = {unit.id for unit in space.units if unit.halves}
    (raw,) = [trial.placement for trial in trials if trial.phase == "raw"]
    assert raw.labels == tuple(sorted((name, "weight-only") for name in convs))
    validated = [trial.placement for trial in trials if trial.phase in ("validate", "raw")]
    assert len(validated) > 1
    assert all({label for _, label in placement.labels} == {"weight-only"} for placement in validated)


def test_conversions_at_the_borders_of_a_part_are_not_timed() -> None:
    reference = Trial(
        number=0, phase="isolated", placement=NOTHING, ratio=1.0, layers=(kernel("conv", ms=4.0),)
    )
    layers = (kernel("conv", ms=2.0), replace(kernel("q", ms=2.0), boundary=True))
    trial = Trial(number=1, phase="isolated", placement=NOTHING, ratio=1.0, layers=layers)
    assert inner_ratio(trial, reference) == pytest.approx(0.5)


def test_groups_are_combined_at_once_without_their_validation(space_of, drive) -> None:
    def searched(**setup: bool) -> list[Trial]:
        return drive(SubgraphSearch, space_of(), lambda p: 0.9 ** len(p.labels), trials=200, **setup)

    whole = [trial for trial in searched(validate_groups=False) if not trial.subgraph]
    assert "validate" not in {trial.phase for trial in whole}
    (raw,) = [trial.placement for trial in whole if trial.phase == "raw"]
    assert raw in [trial.placement for trial in searched() if not trial.subgraph], "of all schemes"


def test_a_scheme_that_loses_alone_or_in_the_whole_model_is_dropped(space_of, drive) -> None:
    space = space_of("digits_resnet")
    bad = next(unit for unit in space.units if unit.op_type == "Conv").id

    def has_bad(placement: Placement) -> bool:
        return dict(placement.labels).get(bad, "fp") != "fp"

    trials = drive(SubgraphSearch, space, lambda p: 1 - 0.02 * p.pairs + 9 * has_bad(p), trials=200)
    validated = [has_bad(trial.placement) for trial in trials if trial.phase == "validate"]
    assert 0 < sum(validated) < len(validated)
    assert [has_bad(trial.placement) for trial in trials if trial.phase == "raw"] == [True]
    # schemes that lose alone are not tried in the whole model
    trials = drive(SubgraphSearch, space, by_pairs, alone=lambda _: 1.2, trials=200)
    assert [trial.phase for trial in trials if not trial.subgraph] == ["pure", "pure"]
    assert trials[-1].placement == space.resolve(space.everything())


# ---- optuna -------------------------------------------------------------------------------------------

NEEDS_OPTUNA = pytest.mark.skipif(find_spec("optuna") is None, reason="the extra [optuna] is not installed")


def noise_of(placement: Placement) -> float:
    """The SQNR in dB; each quantized unit costs 1 dB."""
    return 60.0 - len(placement.labels) if placement.sites else float("inf")


@NEEDS_OPTUNA
def test_two_objectives_extend_the_pareto_front(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of(), by_pairs, sqnr_db=noise_of, trials=80, pareto=True)
    assert len(trials) == 80
    levels = {trial.sqnr_db for trial in front_of(trials, 100)}
    assert len(levels) >= 8  # the pure labellings have three levels


@NEEDS_OPTUNA
def test_later_proposals_meet_the_accuracy_limit_more_often(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of(), by_pairs, sqnr_db=noise_of, trials=80, limits=limited(50.0))
    accurate = [trial.sqnr_db >= 50.0 for trial in trials]
    assert sum(accurate[-30:]) > 2 * sum(accurate[4:14]) + 3


def test_a_missing_package_is_an_error_that_names_the_extra(
    space_of, drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="needs the package optuna") as caught:
        OptunaSearch.refuse(space_of())
    assert "qdqspec[optuna]" in (caught.value.cure or "")
