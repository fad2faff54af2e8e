"""The optional strategy based on Optuna's estimator."""

from __future__ import annotations

import sys

import pytest

from qdqspec.errors import ConfigError
from qdqspec.search.select import front_of
from qdqspec.search.strategies.optuna import OptunaSearch
from qdqspec.types import Placement

optuna = pytest.importorskip("optuna", reason="the extra [optuna] is not installed")


def by_pairs(placement: Placement) -> float:
    return 1.0 / (1 + placement.pairs)


def test_the_optuna_search_begins_with_pure_labellings(space_of, drive) -> None:
    space = space_of()
    trials = drive(OptunaSearch, space, by_pairs, trials=6)
    pure = [space.resolve(labels) for labels in ({}, space.everything(), space.uniform("in-only"))]
    assert [trial.placement for trial in trials[:3]] == pure


def test_no_placement_is_built_twice(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of(), by_pairs, trials=50)
    assert len({trial.placement.digest for trial in trials}) == len(trials) == 50


def test_a_small_space_is_searched_completely(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of("digits_resnet", "Gemm"), by_pairs)
    assert 2 <= len(trials) < 60


def test_the_seed_determines_the_search(space_of, drive) -> None:
    space = space_of()
    runs = [
        [t.placement.digest for t in drive(OptunaSearch, space, by_pairs, seed=s, trials=30)]
        for s in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_later_proposals_have_more_labels_that_gain(space_of, drive) -> None:
    space = space_of()
    chosen = {unit.id for unit in space.units[::3]}

    def cost(placement: Placement) -> float:
        return 1.0 + 0.02 * len(chosen ^ {name for name, _ in placement.labels})

    ratios = [trial.ratio for trial in drive(OptunaSearch, space, cost, trials=80)]
    assert sum(ratios[-20:]) / 20 < sum(ratios[3:23]) / 20  # the first proposals are random


def noise_of(placement: Placement) -> float:
    """The SQNR in dB; each quantized unit costs 1 dB."""
    return 60.0 - len(placement.labels) if placement.sites else float("inf")


def test_two_objectives_extend_the_pareto_front(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of(), by_pairs, sqnr_db=noise_of, trials=80, pareto=True)
    assert len(trials) == 80
    levels = {trial.sqnr_db for trial in front_of(trials, 100)}
    assert len(levels) >= 8  # the pure labellings have three levels


def test_later_proposals_meet_the_accuracy_limit_more_often(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of(), by_pairs, sqnr_db=noise_of, trials=80, min_sqnr_db=50.0)
    accurate = [trial.sqnr_db >= 50.0 for trial in trials]
    assert sum(accurate[-30:]) > 2 * sum(accurate[4:14]) + 3


def test_failed_builds_do_not_end_the_search(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of(), lambda p: 1.0 if not p.sites else None, trials=20)
    assert len(trials) == 20


def test_the_optuna_search_proposes_seeds_after_the_reference(space_of, drive) -> None:
    space = space_of()
    seed = space.resolve({space.units[0].id: space.units[0].full})
    trials = drive(OptunaSearch, space, by_pairs, trials=4, seeds=(seed,))
    assert (trials[1].placement, trials[1].phase) == (seed, "seed")


def test_a_missing_package_is_an_error_that_names_the_extra(
    space_of, drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="needs the package optuna") as caught:
        OptunaSearch.refuse(space_of())
    assert "qdqspec[optuna]" in (caught.value.cure or "")
