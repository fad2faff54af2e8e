"""The subgraph strategy: its groups and schemes, the order of parts and whole models, and the kept schemes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.strategies.subgraph import MOST_NODES, SubgraphSearch, groups_of, inner_ratio, nodes_of
from qdqspec.testing.strategies import drive
from qdqspec.types import LayerTime, Placement, Trial

NOTHING = Placement(sites=frozenset())


def layer(name: str, milliseconds: float, *, boundary: bool = False) -> LayerTime:
    return LayerTime(name=name, op_type="x", milliseconds=milliseconds, nodes=(name,), boundary=boundary)


def profile(space: SchemeSpace) -> tuple[LayerTime, ...]:
    return tuple(layer(node.name, 1.0) for node in space.model.nodes)


class Device:
    """A device where parts have the ratio ``alone`` and whole models the ratio ``whole`` to the reference."""

    def __init__(
        self,
        space: SchemeSpace,
        alone: float | Callable[[Placement], float] = 0.5,
        whole: Callable[[Placement], float] | None = None,
    ) -> None:
        self.space = space
        self.alone = alone if callable(alone) else lambda _: alone
        self.whole = whole or (lambda placement: 1 - 0.01 * placement.pairs)
        self.best = float("inf")
        self.asked: list[Proposal] = []

    def answer(self, proposal: Proposal) -> Trial:
        self.asked.append(proposal)
        blank = {"number": len(self.asked), "phase": proposal.phase, "placement": proposal.placement}
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
        drive(strategy, self, batch=4)
        assert strategy.done()
        return self.asked


def test_every_unit_is_in_one_group_of_bounded_size(space_of) -> None:
    for name in ("digits_resnet", "squeezenet10", "ultraface_rfb320"):
        space = space_of(name)
        groups = groups_of(space, profile(space))
        assert sorted(u for group in groups for u in group.units) == sorted(u.id for u in space.units)
        assert all(len(nodes_of(space, group)) <= MOST_NODES for group in groups)
        for group in groups:
            places = [space.model.by_name[node].index for node in nodes_of(space, group)]
            assert places == sorted(places)
        assert len(groups) < len(space.units)


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


def test_groups_are_combined_at_once_without_their_validation(space_of) -> None:
    space = space_of("digits_resnet")
    asked = Device(space, whole=lambda p: 0.9 ** len(p.labels)).run(validate_groups=False)
    whole = [p for p in asked if not p.subgraph]
    assert "validate" not in {p.phase for p in whole}
    assert [p.phase for p in whole].count("raw") == 1
    validated = Device(space, whole=lambda p: 0.9 ** len(p.labels)).run()
    (raw,) = [p.placement for p in whole if p.phase == "raw"]
    assert raw in [p.placement for p in validated if not p.subgraph], "the combination of all schemes"


def test_a_scheme_that_loses_in_the_whole_model_is_dropped(space_of) -> None:
    space = space_of("digits_resnet")
    bad = next(unit for unit in space.units if unit.op_type == "Conv").id

    def has_bad(placement: Placement) -> bool:
        return dict(placement.labels).get(bad, "fp") != "fp"

    asked = Device(space, whole=lambda p: 1 - 0.02 * p.pairs + 9 * has_bad(p)).run()
    validated = [has_bad(p.placement) for p in asked if p.phase == "validate"]
    assert 0 < sum(validated) < len(validated)
    assert [has_bad(p.placement) for p in asked if p.phase == "raw"] == [True]


def test_schemes_that_lose_alone_are_not_tried_in_the_whole_model(space_of) -> None:
    space = space_of("digits_resnet")
    asked = Device(space, alone=1.2).run()
    assert [p.phase for p in asked if not p.subgraph] == ["pure", "pure"]
    assert asked[-1].placement == space.resolve(space.everything())
