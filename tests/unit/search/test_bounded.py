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

from qdqspec.search._bounded import Bounded, least_time, with_less_noise
from qdqspec.search._noise import BlockNoise, FairShares, SharedNoise
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


def drawn_noise(costs: CostModel, seed: int) -> BlockNoise:
    """Noise of each block, and of tensors between two or three of them."""
    random, count = np.random.default_rng(seed), len(costs.blocks)
    powers = 10.0 ** random.uniform(-5, -1, costs.times.shape)
    powers[:, FP] = 0
    shared = []
    for _ in range(random.integers(0, 2 * count)):
        ends = random.choice(count, size=min(count, int(random.integers(2, 4))), replace=False)
        codes = {int(end): frozenset(costs.blocks[end].codes) - {FP} for end in ends}
        shared.append(SharedNoise(float(10 ** random.uniform(-5, -1)), codes))
    return BlockNoise(powers, shared)


@given(seed=st.integers(0, 3), noise=st.integers(0, 1000), decibels=st.floats(0, 60))
def test_the_labelling_is_within_the_limit_and_not_slower_than_a_greedy_one(
    seed: int, noise: int, decibels: float
) -> None:
    costs = learnt(seed)
    drawn, most = drawn_noise(costs, noise), 10 ** (-decibels / 10)
    codes = least_time(costs, drawn, most)
    assert drawn.of(codes) <= most
    greedy = with_less_noise(costs, drawn, costs.compose(1.0), most)
    assert drawn.of(greedy) <= most
    assert costs.predict(codes) <= costs.predict(greedy) + 1e-9
    assert all(code in block.codes for block, code in zip(costs.blocks, codes.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_labelling_is_close_to_the_best_of_all(seed: int) -> None:
    costs = learnt(seed)
    noise = drawn_noise(costs, seed)
    most = 0.3 * noise.of(costs.compose(1.0))
    every = (np.array(c, np.int8) for c in itertools.product(*(block.codes for block in costs.blocks)))
    best = min(costs.predict(codes) for codes in every if noise.of(codes) <= most)
    assert costs.predict(least_time(costs, noise, most)) <= 1.03 * best


def test_the_labelling_without_a_limit_is_the_fastest() -> None:
    costs = learnt(0)
    assert (least_time(costs, drawn_noise(costs, 0), np.inf) == costs.compose(1.0)).all()


def test_blocks_above_the_limit_under_every_label_stay_float() -> None:
    costs = learnt(1)
    powers = np.ones_like(costs.times)
    powers[:, FP] = 0
    assert not least_time(costs, BlockNoise(powers), 0.5).any()


@pytest.mark.parametrize(("predicted_db", "admitted"), [(31.0, True), (29.0, False), (None, False)])
def test_a_prediction_admits_what_the_noise_of_blocks_hardly_excludes(
    predicted_db: float | None, admitted: bool
) -> None:
    costs = learnt(0)
    codes = costs.compose(1.0)
    powers = np.zeros_like(costs.times)
    powers[np.arange(len(codes)), codes] = 1.0
    powers *= 3e-3 / len(codes)  # three times the noise of 30 dB
    guide = SimpleNamespace(
        has_oracle=True,
        allowed={},
        predicted_db=lambda placement: predicted_db,
        admits=lambda placement, least_db: predicted_db is None or predicted_db >= least_db,
    )
    bounded = Bounded(costs, BlockNoise(powers), guide)  # type: ignore[arg-type] # only the used attributes
    nothing = np.zeros_like(codes)
    assert bounded.admits(codes, 30.0, nothing) is admitted  # up to four times the allowed noise
    assert not bounded.admits(codes, 30.0)
    powers *= 2
    assert not bounded.admits(codes, 30.0, nothing)
    assert bounded.admits(codes, 30.0, codes) is admitted  # what it begins at shows that so much is allowed


@given(seed=st.integers(0, 3), drawn=st.integers(0, 1000), steps=st.integers(1, 8))
def test_noise_is_updated_as_it_would_be_computed_anew(seed: int, drawn: int, steps: int) -> None:
    costs = learnt(seed)
    noise, random = drawn_noise(costs, drawn), np.random.default_rng(drawn)
    codes = np.array([random.choice(block.codes) for block in costs.blocks], np.int8)
    shares = FairShares(noise, codes)
    for _ in range(steps):
        block = costs.blocks[random.integers(len(codes))]
        code = int(random.choice(block.codes))
        added = noise.added(shares.codes, block.index, code)
        before = noise.of(shares.codes)
        shares.change(block.index, code)
        after = noise.of(shares.codes)
        assert after - before == pytest.approx(added, abs=1e-12)
        assert shares.total == pytest.approx(after, abs=1e-12)
        assert np.allclose(shares.saved, FairShares(noise, shares.codes).saved)


def test_a_tensor_is_quantized_once_for_all_its_blocks() -> None:
    """Three neighbours with one tensor between each two: together less noise than the sum of each alone."""
    between = [SharedNoise(1.0, {block: frozenset({1}), block + 1: frozenset({1})}) for block in range(2)]
    noise = BlockNoise(np.array([[0.0, 0.1]] * 3), between)
    alone = [noise.of(np.eye(3, dtype=np.int8)[block]) for block in range(3)]
    assert alone == pytest.approx([1.1, 2.1, 1.1])
    assert noise.of(np.ones(3, np.int8)) == pytest.approx(2.3)
    shares = FairShares(noise, np.ones(3, np.int8))
    assert shares.saved[:, FP] == pytest.approx([0.6, 1.1, 0.6])
    assert noise.added(shares.codes, 1, FP) == pytest.approx(-0.1)
