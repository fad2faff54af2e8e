"""The fastest labelling within a noise limit is within the limit and not slower than a greedy choice."""

from __future__ import annotations

import itertools
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from searches import pure_placements

from qdqspec.search._bounded import Bounded, least_time, noise_of, with_less_noise
from qdqspec.search.base import Proposal
from qdqspec.search.blocks import CostModel, fuse
from qdqspec.search.crossings import FP
from qdqspec.testing.strategies import Oracle, small_space

SPACE = small_space()


@cache
def learnt(seed: int) -> CostModel:
    device = Oracle(SPACE, seed)
    asked = [Proposal(placement=p, phase="pure", profile=True) for p in pure_placements(SPACE)]
    trials = [device.answer(proposal) for proposal in asked]
    costs = CostModel(SPACE, fuse(SPACE, (trial.layers for trial in trials)))
    costs.learn(trials)
    return costs


def drawn_powers(costs: CostModel, seed: int) -> np.ndarray:
    powers = 10.0 ** np.random.default_rng(seed).uniform(-5, -1, costs.times.shape)
    powers[:, FP] = 0
    return powers


@given(seed=st.integers(0, 3), noise=st.integers(0, 1000), decibels=st.floats(0, 60))
def test_the_labelling_is_within_the_limit_and_not_slower_than_a_greedy_one(
    seed: int, noise: int, decibels: float
) -> None:
    costs = learnt(seed)
    powers, most = drawn_powers(costs, noise), 10 ** (-decibels / 10)
    codes = least_time(costs, powers, most)
    assert noise_of(powers, codes) <= most
    greedy = with_less_noise(costs, powers, costs.compose(1.0), most)
    assert noise_of(powers, greedy) <= most
    assert costs.predict(codes) <= costs.predict(greedy) + 1e-9
    assert all(code in block.codes for block, code in zip(costs.blocks, codes.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_labelling_is_close_to_the_best_of_all(seed: int) -> None:
    costs = learnt(seed)
    powers = drawn_powers(costs, seed)
    most = 0.3 * noise_of(powers, costs.compose(1.0))
    every = (np.array(c, np.int8) for c in itertools.product(*(block.codes for block in costs.blocks)))
    best = min(costs.predict(codes) for codes in every if noise_of(powers, codes) <= most)
    assert costs.predict(least_time(costs, powers, most)) <= 1.03 * best


def test_the_labelling_without_a_limit_is_the_fastest() -> None:
    costs = learnt(0)
    assert (least_time(costs, drawn_powers(costs, 0), np.inf) == costs.compose(1.0)).all()


def test_blocks_above_the_limit_under_every_label_stay_float() -> None:
    costs = learnt(1)
    powers = np.ones_like(costs.times)
    powers[:, FP] = 0
    assert not least_time(costs, powers, 0.5).any()


@pytest.mark.parametrize(("predicted_db", "admitted"), [(31.0, True), (29.0, False), (None, False)])
def test_a_prediction_admits_what_the_noise_of_blocks_hardly_excludes(
    predicted_db: float | None, admitted: bool
) -> None:
    costs = learnt(0)
    codes = costs.compose(1.0)
    powers = np.zeros_like(costs.times)
    powers[np.arange(len(codes)), codes] = 1.0
    powers *= 3e-3 / noise_of(powers, codes)  # three times the noise of 30 dB
    guide = SimpleNamespace(
        has_oracle=True,
        allowed={},
        predicted_db=lambda placement: predicted_db,
        admits=lambda placement, least_db: predicted_db is None or predicted_db >= least_db,
    )
    bounded = Bounded(costs, powers, guide)  # type: ignore[arg-type] # only the used attributes
    assert bounded.admits(codes, 30.0, slack=4.0) is admitted
    assert not bounded.admits(codes, 30.0, slack=2.0)
    assert not bounded.admits(codes, 30.0)
