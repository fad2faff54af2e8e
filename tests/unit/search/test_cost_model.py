"""Blocks, their cost model, and the labellings composed from it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from searches import pure_placements

from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search._noise import BlockNoise, SharedNoise
from qdqspec.search.base import Proposal
from qdqspec.search.blocks import CostModel, UnitBlock, block_codes, flips, fuse, unit_labels
from qdqspec.search.crossings import FP, Crossings, domains_of, edges_between
from qdqspec.testing.strategies import small_space
from qdqspec.types import LABELS, LayerTime

FULL = LABELS.index("in+out")


def test_units_in_one_kernel_are_one_block_in_graph_order() -> None:
    space = small_space()
    names = [unit.id for unit in space.units]
    kernels = [
        LayerTime(name="k1", op_type="Fused", milliseconds=1, nodes=(names[3], names[1])),
        LayerTime(name="k2", op_type="Fused", milliseconds=1, nodes=(names[1], names[0])),
        LayerTime(name="q", op_type="Quantize", milliseconds=1, nodes=(names[0], names[4]), boundary=True),
    ]
    blocks = fuse(space, [kernels])
    assert blocks[0].units == (names[0], names[1], names[3])
    assert [block.index for block in blocks] == list(range(len(names) - 2))
    assert sorted(name for block in blocks for name in block.units) == sorted(names)


def test_codes_and_labels_of_single_unit_blocks_are_inverse() -> None:
    space = small_space()
    blocks = fuse(space, [])
    for code in range(len(LABELS)):
        codes = np.array([code if code in block.codes else FP for block in blocks], dtype=np.int8)
        assert np.array_equal(block_codes(space, blocks, unit_labels(space, blocks, codes)), codes)


def test_blocks_that_the_runtime_quantizes_itself_have_their_label_as_placed() -> None:
    kept, completed = (
        CostModel(space, fuse(space, []))
        for space in (
            SchemeSpace(small_space().model, replace(FakeDevice().capabilities(), completes=ops))
            for ops in (frozenset(), frozenset({"Conv"}))
        )
    )
    whole = block_codes(kept.space, kept.blocks, kept.space.everything())
    between = [block.index for block in kept.blocks if {"Conv#2", "Conv#5"}.intersection(block.units)]
    assert len(between) == 2
    for block in kept.blocks:
        without = whole.copy()
        without[block.index] = FP
        assert (kept.as_placed(without) == without).all()
        assert (completed.as_placed(without) == (whole if block.index in between else without)).all()


def test_crossings_computed_as_arrays_equal_those_of_single_edges() -> None:
    space = small_space()
    blocks = fuse(space, [])
    edges = edges_between(space, {n: b.index for b in blocks for u in b.units for n in space.by_id[u].nodes})
    domains, random = domains_of(space), np.random.default_rng(0)
    for _ in range(100):
        codes = np.array([random.choice(block.codes) for block in blocks], dtype=np.int8)
        alone = [[bool(edge.converted(codes, domains))] for edge in edges]
        assert Crossings(edges, domains).of(codes).tolist() == alone


@pytest.mark.parametrize("seed", range(6))
def test_the_model_predicts_times_of_placements_that_were_not_built(seed: int, learnt) -> None:
    costs, oracle = learnt(seed)
    random = np.random.default_rng(seed)
    constant = oracle.cost(costs.space.resolve({})) - costs.predict(np.zeros(len(costs.blocks), np.int8))
    for _ in range(20):
        codes = np.array(
            [random.choice([c for c in b.codes if c in (FP, FULL)]) for b in costs.blocks], np.int8
        )
        placement = costs.space.resolve(unit_labels(costs.space, costs.blocks, codes))
        assert costs.predict(codes) + constant == pytest.approx(oracle.cost(placement), abs=0.2)


@pytest.mark.parametrize("seed", range(6))
def test_the_composed_labelling_is_close_to_the_best_of_all(seed: int, learnt) -> None:
    costs, oracle = learnt(seed)

    def cost(codes: np.ndarray) -> float:
        return oracle.cost(costs.space.resolve(unit_labels(costs.space, costs.blocks, codes)))

    everything = itertools.product(*(block.codes for block in costs.blocks))
    best = min(cost(np.array(codes, dtype=np.int8)) for codes in everything)
    composed = min(cost(costs.compose(share)) for share in (0.0, 0.5, 1.0, 2.0))
    assert composed <= 1.1 * best


def test_costs_are_independent_of_the_machine_speed_during_a_profile(learnt) -> None:
    steady, oracle = learnt(0)
    random = np.random.default_rng(0)
    trials = []
    for number, placement in enumerate(pure_placements(oracle.space)):
        trial = oracle.answer(Proposal(placement=placement, phase="pure", profile=True))
        factor = random.uniform(0.5, 2) if number else 1.0
        slower = (replace(layer, milliseconds=factor * layer.milliseconds) for layer in trial.layers)
        trials.append(replace(trial, layers=tuple(slower)))
    costs = CostModel(steady.space, steady.blocks)
    costs.learn(trials)
    assert costs.times == pytest.approx(steady.times)
    assert costs.converting == pytest.approx(steady.converting)


def test_a_block_with_a_penalty_stays_float(learnt) -> None:
    costs, _ = learnt(0)
    free = costs.compose(1.0)
    quantized = int(np.flatnonzero(free != FP)[0])
    penalty = np.zeros_like(costs.times)
    penalty[quantized, FP + 1 :] = 1e6
    assert costs.compose(1.0, BlockNoise(penalty), 1.0)[quantized] == FP
    assert np.array_equal(costs.compose(1.0), free)  # the penalty does not persist


def test_noise_that_two_blocks_share_has_a_price(learnt) -> None:
    costs, _ = learnt(0)
    free = costs.compose(1.0)
    ends = np.nonzero(free)[0][:2].tolist()
    assert len(ends) == 2
    shared = SharedNoise(1.0, {end: frozenset(costs.blocks[end].codes) - {FP} for end in ends})
    noise = BlockNoise(np.zeros_like(costs.times), [shared])
    assert noise.of(free) == 1.0
    assert noise.of(costs.compose(1.0, noise, 1e6)) == 0.0
    assert np.array_equal(costs.compose(1.0, noise, 0.0), free)


def test_random_draws_differ_and_do_not_change_the_model(learnt) -> None:
    costs, _ = learnt(3)
    times = costs.times.copy()
    random = np.random.default_rng(0)
    drawn = {costs.draw(random, heat=4).tobytes() for _ in range(40)}
    assert len(drawn) > 1
    assert np.array_equal(costs.times, times)


def test_flips_change_a_block_or_neighbours_and_are_sorted_by_predicted_time(learnt) -> None:
    costs, _ = learnt(0)
    codes = costs.compose(1.0)
    flipped = flips(costs, codes)
    changed = [int((other != codes).sum()) for other in flipped]
    assert set(changed) <= {1, 2, 3, 4}
    assert changed.count(1) == sum(len(block.codes) - 1 for block in costs.blocks)
    assert max(changed) > 1
    promised = [costs.predict(other) for other in flipped]
    assert promised == sorted(promised)


def test_blocks_without_time_are_flipped_only_where_that_saves_conversions(learnt) -> None:
    costs, _ = learnt(0)
    codes = costs.compose(1.0)
    idle = costs.blocks[-1].index
    costs.times[idle] = 0.0
    saving = {code for added, index, code in costs.single_changes(codes) if index == idle and added < 0}
    alone = [other for other in flips(costs, codes) if np.flatnonzero(other != codes).tolist() == [idle]]
    assert {int(other[idle]) for other in alone} == saving
    costs.converting[:] = 0.0
    assert not any(np.flatnonzero(o != codes).tolist() == [idle] for o in flips(costs, codes))


def test_a_group_grows_along_tensors_with_one_label(learnt) -> None:
    costs, _ = learnt(0)
    start = np.array([FULL if FULL in b.codes else FP for b in costs.blocks], dtype=np.int8)
    groups = list(costs.grown(start, 0, FP, 4))
    assert [int((other != start).sum()) for other in groups] == list(range(1, len(groups) + 1))
    assert all(set(other[other != start].tolist()) == {FP} for other in groups)


def test_an_empty_space_has_no_blocks() -> None:
    assert fuse(small_space().known(()), []) == ()
    assert UnitBlock(index=0, units=(), codes=(0,)).codes == (0,)
