"""The energy of a labelling: what it learns from profiles, what it predicts, and how it is minimized."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from searches import all_labellings, drawn_noise, kernel, pure_placements, residual_space

from qdqspec.search.base import Proposal
from qdqspec.search.blocks import Codes
from qdqspec.search.energy import Energy
from qdqspec.testing.strategies import small_space
from qdqspec.types import LABELS, LayerTime, Samples, Trial

FP, FULL = (LABELS.index(label) for label in ("fp", "in+out"))
SPACE = residual_space()
SHARE = 0.6  # assumed for linear operators under a label that was not measured
RUN_ELEMENTS = 4096  # converted in the time of starting a kernel


def trial(labels: dict[str, str], *layers: LayerTime) -> Trial:
    return Trial(number=0, phase="p", placement=SPACE.resolve(labels), layers=layers)


def learnt_from(*trials: Trial) -> Energy:
    energy = Energy(SPACE, Energy.of(SPACE, ()).blocks, linear_share=SHARE, run_elements=RUN_ELEMENTS)
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
