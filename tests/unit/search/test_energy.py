"""The energy of a labelling: what it learns from profiles, what it predicts, and how it is minimized."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from searches import all_labellings, drawn_noise, kernel, pure_placements, residual_space

from qdqspec.search.base import Proposal
from qdqspec.search.edges import Codes
from qdqspec.search.energy import Energy
from qdqspec.search.kernel_times import RUN_ELEMENTS
from qdqspec.testing.strategies import small_space
from qdqspec.types import LABELS, LayerTime, Samples, Trial

FP, FULL, IN = (LABELS.index(label) for label in ("fp", "in+out", "in-only"))
SPACE = residual_space()
UNITS = [unit.id for unit in SPACE.units]
SHARE = 0.6  # assumed for linear operators under a label that was not measured


def trial(labels: dict[str, str], *layers: LayerTime) -> Trial:
    return Trial(number=0, phase="p", placement=SPACE.resolve(labels), layers=layers)


def learnt_from(*trials: Trial) -> Energy:
    energy = Energy(SPACE, Energy.of(SPACE, ()).blocks, linear_share=SHARE)
    energy.learn(trials)
    return energy


def conversion(*tensors: str, ms: float) -> LayerTime:
    return LayerTime(name="q", op_type="Q", milliseconds=ms, tensors=tensors, boundary=True)


# ---- times learned from profiles -----------------------------------------------------------------


def test_the_time_of_a_block_is_measured_or_estimated_by_blocks_of_the_same_operators() -> None:
    reference = trial({}, kernel("conv1", ms=4.0), kernel("conv2", ms=2.0))
    full = trial({"conv1": "in+out"}, kernel("conv1", ms=1.0), kernel("conv2", ms=2.2))
    energy = learnt_from(reference, full)
    assert energy.times[0] == pytest.approx([4.0, 1.0, 4.0 * SHARE])  # in-only was not measured
    share = (1.0 + 2.1 * SHARE) / (4.0 + 2.1)  # of the other convolution, and of what is assumed
    assert energy.times[1] == pytest.approx([2.1, 2.1 * share, 2.1 * SHARE])
    assert energy.is_measured[:2, :2].tolist() == [[True, True], [True, False]]


def test_a_slowdown_of_one_block_does_not_raise_the_estimate_of_another() -> None:
    reference = trial({}, kernel("conv1", ms=4.0), kernel("conv2", ms=2.0))
    full = trial({"conv1": "in+out"}, kernel("conv1", ms=8.0), kernel("conv2", ms=2.0))
    assert learnt_from(reference, full).times[1, FULL] == 2.0


def test_a_slow_small_block_hardly_changes_what_is_assumed_of_a_large_one() -> None:
    reference = trial({}, kernel("conv1", ms=0.1), kernel("conv2", ms=10.0))
    full = trial({"conv1": "in+out"}, kernel("conv1", ms=0.3), kernel("conv2", ms=10.0))
    assert learnt_from(reference, full).times[1, FULL] == pytest.approx(10.0 * SHARE, rel=0.05)


def test_the_time_of_a_kernel_of_two_blocks_is_divided_between_them() -> None:
    energy = learnt_from(trial({}, kernel("conv1", "conv2", ms=3.0)))
    assert energy.times[:2, FP].tolist() == [1.5, 1.5]


def test_the_time_of_the_reference_is_that_of_the_first_trial() -> None:
    energy = learnt_from(
        trial({}, kernel("conv1", ms=4.0), kernel("flatten", ms=1.0)),
        trial(dict(SPACE.everything()), kernel("conv1", ms=2.0)),
    )
    assert energy.reference_ms == 5.0


def test_without_profiles_each_block_takes_the_same_share_of_the_time() -> None:
    energy = learnt_from(trial({}))
    assert energy.times[:, FP] == pytest.approx(1 / len(energy.blocks))
    assert not energy.is_measured.any()


def test_conversions_take_the_measured_time_else_an_estimate_by_size() -> None:
    energy = learnt_from(
        trial({}, kernel("conv1", ms=1.0)),
        trial({"conv2": "in+out"}, conversion("b", ms=0.512)),
    )
    element = 0.512 / (8 * 64 + RUN_ELEMENTS)
    only_first, only_second = np.zeros((2, len(energy.blocks)), dtype=np.int8)
    only_first[0] = only_second[1] = FULL
    # the conversion of b is measured, those of x and c are estimated by their sizes
    assert energy.conversions_ms(only_first) == pytest.approx([0.512 + (RUN_ELEMENTS + 4 * 64) * element])
    assert energy.conversions_ms(only_second) == pytest.approx([0.512 + (RUN_ELEMENTS + 8 * 64) * element])


@pytest.mark.parametrize("clock", ["cpu_ms", "wall_ms"])
def test_times_are_independent_of_the_machine_speed_during_a_profile(learnt, clock: str) -> None:
    steady, oracle = learnt(0)
    random = np.random.default_rng(0)
    trials = []
    for number, placement in enumerate(pure_placements(oracle.space)):
        answer = oracle.answer(Proposal(placement=placement, phase="pure", profile=True))
        factor = random.uniform(0.5, 2) if number else 1.0
        slower = (replace(layer, milliseconds=factor * layer.milliseconds) for layer in answer.layers)
        samples = answer.samples if clock == "cpu_ms" else Samples(wall_ms=answer.samples.wall_ms)
        trials.append(replace(answer, layers=tuple(slower), samples=samples))
    energy = Energy.of(steady.space, trials)
    assert energy.times == pytest.approx(steady.times)
    assert energy.converting == pytest.approx(steady.converting)


# ---- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_energy_predicts_times_of_placements_that_were_not_built(seed: int, learnt) -> None:
    energy, oracle = learnt(seed)
    random = np.random.default_rng(seed)
    constant = oracle.cost(energy.space.resolve({})) - energy.predict(np.zeros(len(energy.blocks), np.int8))
    for _ in range(20):
        codes = np.array(
            [random.choice([code for code in block.codes if code in (FP, FULL)]) for block in energy.blocks],
            np.int8,
        )
        assert energy.predict(codes) + constant == pytest.approx(oracle.cost(energy.placed(codes)), abs=0.2)


@given(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.5, 2.0]))
def test_changes_add_the_difference_of_the_predicted_times(seed: int, share: float) -> None:
    energy = drawn_energy(seed)
    codes = all_labellings(energy)[seed]
    changes = energy.changes(codes, share)
    assert changes == sorted(changes)
    assert len(changes) == sum(len(block.codes) - 1 for block in energy.blocks)
    for added, block, code in changes:
        other = codes.copy()
        other[block] = code
        assert energy.predict(other, share) - energy.predict(codes, share) == pytest.approx(added, abs=1e-9)


def test_labellings_and_placements_are_inverse(learnt) -> None:
    energy, _ = learnt(0)
    for codes in all_labellings(energy):
        placement = energy.placed(codes)
        assert energy.placed(energy.codes_of(placement)) == placement


def test_flips_change_one_block_and_are_sorted_by_predicted_time(learnt) -> None:
    energy, _ = learnt(0)
    codes = energy.minimize()
    flips = list(energy.flips(codes))
    assert {int((other != codes).sum()) for other in flips} == {1}
    assert len(flips) == sum(len(block.codes) - 1 for block in energy.blocks)
    promised = [energy.predict(other) for other in flips]
    assert promised == pytest.approx(sorted(promised))


# ---- minimization -------------------------------------------------------------------------------


def drawn_energy(seed: int) -> Energy:
    """An energy with drawn times and conversions."""
    energy, random = Energy.of(small_space(), ()), np.random.default_rng(seed)
    energy.times = random.uniform(0.1, 2.0, energy.times.shape)
    energy.converting = random.uniform(0.0, 0.5, energy.converting.shape)
    return energy


def uniform_labellings(energy: Energy) -> list[Codes]:
    codes = range(len(energy.space.labels))
    return [np.array([code if code in b.codes else FP for b in energy.blocks], np.int8) for code in codes]


@given(seed=st.integers(0, 299))
def test_the_minimum_is_close_to_that_of_all_labellings(seed: int) -> None:
    """The largest factor of these 300 energies is 1.07, the mean 1.0004."""
    energy = drawn_energy(seed)
    found = energy.predict(energy.minimize())
    assert found <= 1.1 * min(map(energy.predict, all_labellings(energy)))


def test_most_minima_are_exact() -> None:
    energies = [drawn_energy(seed) for seed in range(30)]
    factors = [
        energy.predict(energy.minimize()) / min(map(energy.predict, all_labellings(energy)))
        for energy in energies
    ]
    assert np.mean(factors) <= 1.002


@given(seed=st.integers(0, 9999), share=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_no_uniform_labelling_and_no_change_of_one_block_is_below_the_minimum(
    seed: int, share: float
) -> None:
    energy = drawn_energy(seed)
    codes = energy.minimize(share)
    found = energy.predict(codes, share)
    assert all(found <= energy.predict(other, share) + 1e-9 for other in uniform_labellings(energy))
    assert energy.changes(codes, share)[0][0] >= -1e-9
    assert all(code in block.codes for block, code in zip(energy.blocks, codes.tolist(), strict=True))


@given(seed=st.integers(0, 999))
def test_a_descent_from_a_start_is_not_above_it(seed: int) -> None:
    energy = drawn_energy(seed)
    start = all_labellings(energy)[seed % 100]
    assert energy.predict(energy.minimize(starts=[start])) <= energy.predict(start) + 1e-9


@given(seed=st.integers(0, 9999), decibels=st.floats(0, 60), share=st.sampled_from([0.0, 1.0, 2.0]))
def test_noise_is_within_what_is_allowed(seed: int, decibels: float, share: float) -> None:
    energy, most = drawn_energy(seed), 10 ** (-decibels / 10)
    energy.noise = drawn_noise(energy, seed)
    codes = energy.within(most, share)
    assert energy.noise_of(codes) <= most
    assert energy.predict(codes, share) <= energy.predict(np.zeros_like(codes), share) + 1e-9
    assert all(code in block.codes for block, code in zip(energy.blocks, codes.tolist(), strict=True))


@given(seed=st.integers(0, 299))
def test_the_labelling_within_a_limit_is_close_to_the_best_of_all(seed: int) -> None:
    """The largest factor of these 300 energies is 1.06, the mean 1.0003."""
    energy, most = drawn_energy(seed), 10 ** np.random.default_rng(seed + 2000).uniform(-4, -1)
    energy.noise = drawn_noise(energy, seed + 1000)
    best = min(energy.predict(codes) for codes in all_labellings(energy) if energy.noise_of(codes) <= most)
    assert energy.predict(energy.within(most)) <= 1.1 * best


def test_the_labelling_within_a_large_limit_is_the_fastest() -> None:
    energy = drawn_energy(0)
    energy.noise = drawn_noise(energy, 0)
    assert energy.within(np.inf).tolist() == energy.minimize().tolist()


def test_blocks_above_the_limit_under_every_label_stay_float() -> None:
    energy = drawn_energy(1)
    energy.noise = np.ones_like(energy.times)
    energy.noise[:, FP] = 0.0
    assert not energy.within(0.5).any()


def test_a_higher_price_of_noise_does_not_increase_it(learnt) -> None:
    energy, _ = learnt(2)
    energy.noise = drawn_noise(energy, 0)
    found = [energy.noise_of(energy.minimize(price=price)) for price in 10.0 ** np.arange(-3, 9)]
    assert found[-1] == 0.0
    assert found[0] >= found[len(found) // 2] >= found[-1]


@pytest.mark.parametrize("seed", range(6))
def test_compositions_are_close_to_the_best_placement_of_the_device(seed: int, learnt) -> None:
    energy, oracle = learnt(seed)
    best = min(oracle.cost(energy.placed(codes)) for codes in all_labellings(energy))
    composed = min(oracle.cost(energy.placed(energy.minimize(share))) for share in (0.0, 0.5, 1.0, 2.0))
    assert composed <= 1.1 * best
