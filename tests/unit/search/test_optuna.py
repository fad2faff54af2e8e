"""The optional strategy based on Optuna's estimator."""

from __future__ import annotations

import sys

import pytest
from searches import limited

from qdqspec.errors import ConfigError
from qdqspec.search.select import front_of
from qdqspec.search.strategies.optuna import OptunaSearch
from qdqspec.types import Placement

optuna = pytest.importorskip("optuna", reason="the extra [optuna] is not installed")


def by_pairs(placement: Placement) -> float:
    return 1.0 / (1 + placement.pairs)


def test_a_small_space_is_searched_completely(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of("digits_resnet", "Gemm"), by_pairs)
    assert 2 <= len(trials) < 60


def noise_of(placement: Placement) -> float:
    """The SQNR in dB; each quantized unit costs 1 dB."""
    return 60.0 - len(placement.labels) if placement.sites else float("inf")


def test_two_objectives_extend_the_pareto_front(space_of, drive) -> None:
    trials = drive(OptunaSearch, space_of(), by_pairs, sqnr_db=noise_of, trials=80, pareto=True)
    assert len(trials) == 80
    levels = {trial.sqnr_db for trial in front_of(trials, 100)}
    assert len(levels) >= 8  # the pure labellings have three levels


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
