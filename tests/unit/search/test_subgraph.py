"""The subgraph strategy: its groups and schemes, the order of parts and whole models, and the kept schemes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.strategies.subgraph import (
    MOST_NODES,
    SubgraphSearch,
    Win,
    groups_of,
    inner_ratio,
    kinds_of,
    nodes_of,
    schemes_of,
    steps_of,
)
from qdqspec.types import HALVES, LayerTime, Placement, Trial

NOTHING = Placement(sites=frozenset())


def layer(name: str, milliseconds: float, *nodes: str, boundary: bool = False) -> LayerTime:
    return LayerTime(
        name=name, op_type="x", milliseconds=milliseconds, nodes=nodes or (name,), boundary=boundary
    )


def profile(space: SchemeSpace) -> tuple[LayerTime, ...]:
    return tuple(layer(node.name, 1.0) for node in space.model.nodes)


class Device:
    """A device where parts have the ratio ``alone`` and whole models the ratio ``whole`` to the reference."""

    def __init__(
        self,
        space: SchemeSpace,
        alone: float | Callable[[Placement], float] = 0.5,
        whole: Callable[[Placement], float] | None = None,
        eps: float | None = None,
    ) -> None:
        self.eps = eps
        self.space = space
        self.alone = alone if callable(alone) else lambda _: alone
        self.whole = whole or (lambda placement: 1 - 0.01 * placement.pairs)
        self.best = float("inf")
        self.asked: list[Proposal] = []

    def answer(self, proposal: Proposal) -> Trial:
        self.asked.append(proposal)
        blank = {
            "number": len(self.asked),
            "phase": proposal.phase,
            "placement": proposal.placement,
            "eps": self.eps,
        }
        if proposal.subgraph:
            ratio = self.alone(proposal.placement) if proposal.placement.sites else 1.0
            return Trial(**blank, ratio=ratio, subgraph=proposal.subgraph)
        ratio = self.whole(proposal.placement)
        won = ratio < 0.99 * self.best
        self.best = min(ratio, self.best)
        return Trial(**blank, ratio=ratio, incumbent=won, layers=profile(self.space))

    def run(self, **setup) -> list[Proposal]:
        words = SearchSetup(space=self.space, clock="cpu", **setup)
        strategy = SubgraphSearch(words, np.random.default_rng(0))
        while proposals := strategy.ask(4):
            strategy.tell([self.answer(proposal) for proposal in proposals])
        assert strategy.done()
        return self.asked


def test_every_unit_is_in_one_group_of_bounded_size(space_of) -> None:
    for name in ("digits_resnet", "squeezenet10", "ultraface_rfb320"):
        space = space_of(name)
        groups = groups_of(space, profile(space))
        assert sorted(u for group in groups for u in group.units) == sorted(u.id for u in space.units)
        assert all(len(nodes_of(space, group)) <= MOST_NODES for group in groups)
        assert len(groups) < len(space.units)


def test_units_in_one_kernel_are_one_group(space_of) -> None:
    space = space_of("digits_resnet")
    convs = [unit.nodes[0] for unit in space.units if unit.op_type == "Conv"][:2]
    (group,) = (g for g in groups_of(space, [layer("fused", 1.0, *convs)]) if convs[0] in g.units)
    assert convs[1] in group.units


def test_a_cheap_operator_is_grouped_with_the_producer_of_its_last_input(space_of) -> None:
    space = space_of("digits_resnet")
    added = next(unit for unit in space.units if unit.op_type == "Add")
    (group,) = (g for g in groups_of(space, ()) if added.id in g.units)
    heads = {space.by_id[name].op_type for name in group.units}
    assert "Conv" in heads
    assert set(added.nodes) < set(nodes_of(space, group))


def test_the_nodes_of_a_group_are_in_graph_order(space_of) -> None:
    space = space_of("digits_resnet")
    for group in groups_of(space, ()):
        places = [space.model.by_name[name].index for name in nodes_of(space, group)]
        assert places == sorted(places)


def test_similar_groups_are_one_kind_and_shares_are_at_most_one(space_of) -> None:
    space = space_of("digits_resnet")
    kinds = kinds_of(space, profile(space))
    assert sum(len(groups) for groups, _ in kinds) == len(groups_of(space, profile(space)))
    assert len(kinds) < sum(len(groups) for groups, _ in kinds)
    shares = [share for _, share in kinds]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 1 + 1e-9


def test_no_scheme_of_a_group_is_tried_twice(space_of) -> None:
    space = space_of("digits_resnet")
    for group in groups_of(space, ()):
        digests = [space.resolve(labels).digest for _, labels in schemes_of(space, group)]
        assert len({*digests, NOTHING.digest}) == len(digests) + 1 <= 6


def test_a_group_with_weights_has_a_full_and_two_half_schemes(space_of) -> None:
    space = space_of("digits_resnet")
    for group in groups_of(space, ()):
        whole = space.resolve({name: space.by_id[name].full for name in group.units})
        schemes = {name: space.resolve(labels) for name, labels in schemes_of(space, group)}
        weights = {site for site in whole.sites if site.weight and site.format != "int32"}  # no bias
        activations = {site for site in whole.sites if not site.weight}
        assert schemes["full"] == whole
        if weights and activations:
            assert schemes["weight-only"].sites == weights
            units = [space.by_id[name] for name in group.units]
            alone = space.resolve({u.id: "activation-only" if u.halves else u.full for u in units})
            # ONNX Runtime quantizes weights between pairs itself: activations alone may equal the full scheme
            assert schemes.get("activation-only", whole) == alone
            assert activations == {site for site in alone.sites if not site.weight}
        else:
            assert schemes.keys().isdisjoint(HALVES)


def test_half_schemes_that_win_alone_are_combined_in_the_whole_model(space_of) -> None:
    """Each step adds the scheme to all groups of a kind, and the raw winner has all of them."""
    space = space_of("digits_resnet")

    def alone(placement: Placement) -> float:
        has_activations = any(not site.weight for site in placement.sites)
        return 1.3 if has_activations else 0.5

    asked = Device(space, alone=alone, whole=lambda p: 1 - 0.02 * len(p.sites)).run()
    wholes = {p.phase: p.placement for p in asked if not p.subgraph}
    convs = {unit.id for unit in space.units if unit.halves}
    assert wholes["raw"].labels == tuple(sorted((name, "weight-only") for name in convs))
    validated = [p.placement for p in asked if p.phase in ("validate", "raw")]
    assert len(validated) > 1
    assert all({label for _, label in placement.labels} == {"weight-only"} for placement in validated)


def test_conversions_at_the_borders_of_a_part_are_not_timed() -> None:
    reference = Trial(number=0, phase="isolated", placement=NOTHING, ratio=1.0, layers=(layer("conv", 4.0),))
    layers = (layer("conv", 2.0), layer("q", 2.0, boundary=True))
    trial = Trial(number=1, phase="isolated", placement=NOTHING, ratio=1.0, layers=layers)
    assert inner_ratio(trial, reference) == pytest.approx(0.5)


def test_parts_without_profiles_are_compared_by_their_ratio() -> None:
    reference, trial = (Trial(number=n, phase="isolated", placement=NOTHING, ratio=0.8) for n in range(2))
    assert inner_ratio(trial, reference) == 0.8


@pytest.mark.parametrize(
    ("gains", "sizes"),
    [((0.1, 0.05), (1, 1)), ((0.1, 0.01, 0.01, 0.005), (1, 2, 1)), ((0.001,), (1,)), ((), ())],
)
def test_steps_are_larger_than_noise(gains: Sequence[float], sizes: Sequence[int]) -> None:
    wins = [Win(gain=gain, labels={f"u{n}": "in+out"}) for n, gain in enumerate(gains)]
    assert tuple(map(len, steps_of(wins, 0.02))) == sizes


def test_a_higher_variation_between_builds_results_in_larger_steps(space_of) -> None:
    space = space_of("digits_resnet")
    counts = []
    for eps in (None, 0.01, 0.1):
        asked = Device(space, whole=lambda p: 0.9 ** len(p.labels), eps=eps).run()
        counts.append([p.phase for p in asked].count("validate"))
    assert counts[0] == counts[1] > counts[2]


def test_groups_are_combined_at_once_without_their_validation(space_of) -> None:
    space = space_of("digits_resnet")
    asked = Device(space, whole=lambda p: 0.9 ** len(p.labels)).run(validate_groups=False)
    whole = [p for p in asked if not p.subgraph]
    assert "validate" not in {p.phase for p in whole}
    assert [p.phase for p in whole].count("raw") == 1
    validated = Device(space, whole=lambda p: 0.9 ** len(p.labels)).run()
    (raw,) = [p.placement for p in whole if p.phase == "raw"]
    assert raw.digest in {p.placement.digest for p in validated if not p.subgraph}, (
        "the combination of all schemes"
    )


def test_parts_are_timed_before_whole_models_and_each_kind_once(space_of) -> None:
    space = space_of("digits_resnet")
    asked = Device(space).run()
    assert [p.phase for p in asked[:1]] == ["pure"]
    phases = [p.phase for p in asked[1:]]
    first = phases.index("validate")
    assert {*phases[:first]} == {"isolated"}
    assert "isolated" not in phases[first:]
    parts = {p.subgraph for p in asked if p.subgraph}
    assert len(parts) == len(kinds_of(space, profile(space)))
    for nodes in parts:
        floats = [p for p in asked if p.subgraph == nodes and not p.placement.sites]
        assert len(floats) == 1


def test_schemes_that_win_in_the_whole_model_are_kept(space_of) -> None:
    space = space_of("digits_resnet")
    every = Device(space, whole=lambda placement: 0.9 ** len(placement.labels))
    asked = [p for p in every.run() if not p.subgraph]
    grown = [set(p.placement.labels) for p in asked if p.phase in ("validate", "raw")]
    assert all(a < b for a, b in itertools.pairwise(grown))
    assert [p.phase for p in asked].count("raw") == 1


def test_a_scheme_that_loses_in_the_whole_model_is_dropped(space_of) -> None:
    space = space_of("digits_resnet")
    bad = next(unit for unit in space.units if unit.op_type == "Conv").id
    asked = Device(
        space, whole=lambda p: 1 - 0.02 * p.pairs + (9 if dict(p.labels).get(bad, "fp") != "fp" else 0)
    ).run()
    validated = [p for p in asked if p.phase == "validate"]
    with_bad = [p for p in validated if dict(p.placement.labels).get(bad, "fp") != "fp"]
    assert 0 < len(with_bad) < len(validated)
    (raw,) = (p for p in asked if p.phase == "raw")
    assert dict(raw.placement.labels).get(bad, "fp") != "fp"


def test_schemes_that_lose_alone_are_not_tried_in_the_whole_model(space_of) -> None:
    space = space_of("digits_resnet")
    asked = Device(space, alone=1.2).run()
    assert [p.phase for p in asked if not p.subgraph] == ["pure", "pure"]
    assert asked[-1].placement.digest == space.resolve(space.everything()).digest


def test_validation_starts_from_a_seed_that_wins(space_of) -> None:
    space = space_of("digits_resnet")
    seed = space.resolve(space.uniform("in-only"))
    asked = Device(space, whole=lambda p: 1 - 0.01 * len(p.sites)).run(seeds=(seed,))
    assert asked[1].phase == "seed"
    validated = [p for p in asked if p.phase == "validate"]
    assert dict(seed.labels).keys() <= dict(validated[0].placement.labels).keys()
