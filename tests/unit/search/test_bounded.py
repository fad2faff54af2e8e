"""The fastest labelling within a noise limit is within the limit and not slower than a greedy choice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from searches import drawn_noise, pure_placements

from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._bounded import Bounded, least_time, with_less_noise
from qdqspec.search._guide import Guide
from qdqspec.search._noise import BlockNoise, SharedNoise
from qdqspec.search.base import Proposal
from qdqspec.search.blocks import CostModel, fuse
from qdqspec.search.crossings import FP
from qdqspec.testing.strategies import Oracle, small_space
from qdqspec.types import LabelNoise, Placement, Trial

SPACE = small_space()


@cache
def learnt(seed: int) -> CostModel:
    device = Oracle(SPACE, seed)
    asked = [Proposal(placement=p, phase="pure", profile=True) for p in pure_placements(SPACE)]
    trials = [device.answer(proposal) for proposal in asked]
    costs = CostModel(SPACE, fuse(SPACE, (trial.layers for trial in trials)))
    costs.learn(trials)
    return costs


def offered(costs: CostModel) -> list[tuple[int, ...]]:
    return [block.codes for block in costs.blocks]


@given(seed=st.integers(0, 3), noise=st.integers(0, 1000), decibels=st.floats(0, 60))
def test_the_labelling_is_within_the_limit_and_not_slower_than_a_greedy_one(
    seed: int, noise: int, decibels: float
) -> None:
    costs = learnt(seed)
    drawn, most = drawn_noise(offered(costs), noise), 10 ** (-decibels / 10)
    codes = least_time(costs, drawn, most)
    assert drawn.of(codes) <= most
    greedy = with_less_noise(costs, drawn, costs.compose(1.0), most)
    assert drawn.of(greedy) <= most
    assert costs.predict(codes) <= costs.predict(greedy) + 1e-9
    assert all(code in block.codes for block, code in zip(costs.blocks, codes.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_labelling_is_close_to_the_best_of_all(seed: int) -> None:
    costs = learnt(seed)
    noise = drawn_noise(offered(costs), seed)
    most = 0.3 * noise.of(costs.compose(1.0))
    every = (np.array(c, np.int8) for c in itertools.product(*(block.codes for block in costs.blocks)))
    best = min(costs.predict(codes) for codes in every if noise.of(codes) <= most)
    assert costs.predict(least_time(costs, noise, most)) <= 1.03 * best


def test_the_labelling_without_a_limit_is_the_fastest() -> None:
    costs = learnt(0)
    assert (least_time(costs, drawn_noise(offered(costs), 0), np.inf) == costs.compose(1.0)).all()


def test_a_label_that_was_given_up_is_not_taken_again() -> None:
    """Without the shared tensor one label has less noise, with it the other: a greedy choice could alternate."""
    costs = CostModel(SPACE, [replace(block, codes=(0, 1, 2)) for block in learnt(0).blocks])
    costs.times = np.full_like(costs.times, 1.0)
    costs.times[:, FP] = 100.0
    noise = BlockNoise(np.zeros_like(costs.times), [SharedNoise(1.0, dict.fromkeys((0, 1), frozenset({1})))])
    noise.own[:2, 2] = 0.3, 2.0
    start = np.zeros(len(costs.blocks), np.int8)
    start[:2] = 1
    codes = with_less_noise(costs, noise, start, 0.2)
    assert noise.of(codes) <= 0.2


@given(seed=st.integers(0, 3), noise=st.integers(0, 1000), share=st.floats(0.5, 1.5))
def test_the_labelling_within_a_time_takes_no_longer_and_has_no_more_noise_than_the_fastest(
    seed: int, noise: int, share: float
) -> None:
    costs = learnt(seed)
    drawn, fastest = drawn_noise(offered(costs), noise), costs.compose(1.0)
    most = share * costs.predict(fastest)
    found = Bounded(costs, drawn, Guide(None, SPACE)).within(most)
    assert (found is None) == (costs.predict(fastest) > most)
    if found is not None:
        assert costs.predict(found) <= most
        assert drawn.of(found) <= drawn.of(fastest)


def test_the_labelling_within_a_long_time_has_the_least_noise() -> None:
    costs = learnt(0)
    drawn = drawn_noise(offered(costs), 1)
    found = Bounded(costs, drawn, Guide(None, SPACE)).within(1e9)
    assert found is not None
    assert drawn.of(found) < 1e-3 * drawn.of(costs.compose(1.0))


def test_blocks_above_the_limit_under_every_label_stay_float() -> None:
    costs = learnt(1)
    powers = np.ones_like(costs.times)
    powers[:, FP] = 0
    assert not least_time(costs, BlockNoise(powers), 0.5).any()


class Predicting:
    """An oracle with one prediction for all placements, which is sure."""

    doubt_db = 0.0

    def __init__(self, db: float | None) -> None:
        self._db = db

    def noise(self) -> LabelNoise | None:
        return None

    def rough_noise(self, spent: Mapping[str, float]) -> LabelNoise | None:
        return None

    def predicted_db(self, placement: Placement) -> float | None:
        return self._db

    roughly_db = predicted_db

    def keeps_metric(self, placement: Placement) -> bool | None:
        return None

    def learn(self, trial: Trial) -> None:
        raise AssertionError("nothing is built")


class Better(Predicting):
    """Predicts 15 dB more than the noise of blocks."""

    def __init__(self, costs: CostModel, noise: BlockNoise) -> None:
        super().__init__(None)
        self._costs, self._blocks = costs, noise

    def predicted_db(self, placement: Placement) -> float | None:
        return 15.0 - 10 * float(np.log10(self._blocks.of(self._costs.codes_of(placement)) + 1e-12))


def test_a_composition_has_the_block_with_most_of_the_time_although_its_noise_is_far_from_that_of_others() -> (
    None
):
    costs = CostModel(SPACE, learnt(0).blocks)
    costs.times = np.full_like(costs.times, 0.9)
    costs.times[:, FP] = 1.0
    costs.times[0] *= 100.0
    powers = np.full_like(costs.times, 1e-7)
    powers[0] = 0.02  # 17 dB
    powers[:, FP] = 0.0
    noise = BlockNoise(powers)
    bounded = Bounded(costs, noise, Guide(Better(costs, noise), SPACE))
    assert bounded.compose(30.0)[0] != FP
    assert bounded.compose(33.0)[0] == FP


class Rough(Better):
    """Counts predictions, of 1 dB more than the noise of blocks; the noise of neighbours together is known."""

    asked = 0

    def rough_noise(self, spent: Mapping[str, float]) -> LabelNoise | None:
        return LabelNoise((), {})

    def predicted_db(self, placement: Placement) -> float | None:
        self.asked += 1
        return (super().predicted_db(placement) or 0.0) - 14.0


def test_a_first_placement_may_be_further_above_the_limit_and_takes_fewer_predictions() -> None:
    costs = CostModel(SPACE, learnt(0).blocks)
    costs.times = np.full_like(costs.times, 5.0)
    costs.times[:, FP] = 100.0
    powers = np.full_like(costs.times, 1e-3 / (len(costs.blocks) - 2))  # 30 dB without two blocks
    powers[:, FP] = 0.0
    noise, found = BlockNoise(powers), {}
    for rough in (True, False):
        oracle = Rough(costs, noise)
        codes = Bounded(costs, noise, Guide(oracle, SPACE), rough=rough).compose(30.0)
        found[rough] = oracle.asked, int((codes != FP).sum())
    assert found[True] == (1, len(codes) - 2)
    assert found[False] == (2, len(codes) - 1)


def test_a_composition_is_labelled_as_placed() -> None:
    """A convolution with much noise is quantized all the same if its neighbours are, by the runtime itself."""
    space = SchemeSpace(SPACE.model, replace(FakeDevice().capabilities(), completes=frozenset({"Conv"})))
    costs = CostModel(space, fuse(space, []))
    costs.times = np.full_like(costs.times, 0.5)
    costs.times[:, FP] = 1.0
    powers = np.full_like(costs.times, 1e-9)
    powers[:, FP] = 0.0
    (between,) = (block.index for block in costs.blocks if "Conv#5" in block.units)
    powers[between, FP + 1 :] = 1.0
    noise = BlockNoise(powers)
    bounded = Bounded(costs, noise, Guide(Predicting(None), space))
    assert least_time(costs, noise, 1e-3)[between] == FP
    codes = bounded.compose(30.0)
    assert codes[between] != FP
    assert (codes == costs.as_placed(codes)).all()


@pytest.mark.parametrize(("predicted_db", "admitted"), [(31.0, True), (29.0, False), (None, False)])
def test_a_prediction_admits_what_the_noise_of_blocks_hardly_excludes(
    predicted_db: float | None, admitted: bool
) -> None:
    costs = learnt(0)
    codes = costs.compose(1.0)
    powers = np.zeros_like(costs.times)
    powers[np.arange(len(codes)), codes] = 1.0
    powers *= 3e-3 / len(codes)  # three times the noise of 30 dB
    bounded = Bounded(costs, BlockNoise(powers), Guide(Predicting(predicted_db), SPACE))
    nothing = np.zeros_like(codes)
    assert bounded.admits(codes, 30.0, nothing) is admitted  # up to four times the allowed noise
    assert not bounded.admits(codes, 30.0)
    powers *= 2
    assert not bounded.admits(codes, 30.0, nothing)
    assert bounded.admits(codes, 30.0, codes) is admitted  # what it begins at shows that so much is allowed
