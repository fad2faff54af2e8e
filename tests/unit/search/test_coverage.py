"""The search for coverage, on a backend that is a function: which units it refuses, computes in float, or converts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from searches import Additive, limited

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import load_model
from qdqspec.graph.regions.forecast import multiplications_by_node
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.coverage import CoverageSearch
from qdqspec.search.guide import Guide
from qdqspec.types import LayerTime, Placement, Trial

LINEAR = ("Conv", "Gemm")


@pytest.fixture
def space_of(space_of: Callable[..., SchemeSpace]) -> Callable[..., SchemeSpace]:
    """The space of an example model on a runtime that quantizes no unit by itself; only these operators, if any."""
    return partial(space_of, "digits_resnet", completes=frozenset())


def quantized(placement: Placement) -> set[str]:
    return {unit for unit, _ in placement.labels}


def counts(space: SchemeSpace) -> dict[str, int]:
    by_node, _ = multiplications_by_node(space.model, {"input": (1, 1, 16, 16)})
    return {unit.id: sum(by_node[node] for node in unit.nodes) for unit in space.units}


def kernel(space: SchemeSpace, unit: str, *, integer: bool = True) -> LayerTime:
    nodes = space.by_id[unit].nodes
    return LayerTime(name=unit, op_type="kernel", milliseconds=0.0, nodes=nodes, integer=integer)


CONVERSION = LayerTime(
    name="c", op_type="QuantizeLinear", milliseconds=0.0, nodes=(), tensors=("t",), boundary=True
)


class Builder:
    """Builds placements; ``refused`` units fail, ``floats`` are computed in float, ``conversions`` are counted."""

    def __init__(
        self,
        space: SchemeSpace,
        refused: Collection[str] = (),
        *,
        names: bool = False,
        floats: Collection[str] = (),
        conversions: Callable[[Placement], int] = lambda _: 0,
    ) -> None:
        self.space, self.refused, self.names = space, set(refused), names
        self.floats, self.conversions = floats, conversions
        self.trials: list[Trial] = []

    def __call__(self, placement: Placement) -> Trial:
        wrong = quantized(placement) & self.refused
        layers = [kernel(self.space, unit, integer=unit not in self.floats) for unit in quantized(placement)]
        layers += [CONVERSION] * self.conversions(placement)
        trial = Trial(number=len(self.trials), phase="coverage", placement=placement, layers=tuple(layers))
        if wrong:
            named = f" at '{min(wrong)}'" if self.names else ""
            trial = replace(trial, status="failed", error=f"refused{named}", layers=())
        self.trials.append(trial)
        return trial


def search(space: SchemeSpace, build: Callable[[Placement], Trial], **how: Any) -> CoverageSearch:
    """A search without limits, and without end, unless ``how`` has other functions."""
    free = {
        "guide": Guide(None, space, limited()),
        "keeps_limits": lambda _: True,
        "is_over": lambda: False,
    }
    narrow = frozenset({"uint8", "int8"})
    return CoverageSearch(
        space=space, multiplications=counts(space), build=build, narrow=narrow, **{**free, **how}
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_noise_that_the_limit_allows_is_spent_on_most_multiplications(space_of, seed: int) -> None:
    """Noise is additive here, so that the best placement is known: that of all subsets of the linear units."""
    space = space_of(*LINEAR)
    macs, random = counts(space), np.random.default_rng(seed)
    units = sorted(macs)[:12]
    powers = {unit: float(random.lognormal(-7, 2)) if unit in units else 1e6 for unit in macs}
    most = random.uniform(0.05, 0.8) * sum(powers[unit] for unit in units)
    oracle = Additive(space)
    oracle.powers, oracle.doubt_db = powers, 0.0
    guide = Guide(oracle, space, limited(-10 * math.log10(most)), close_db=0.1)
    found = search(space, Builder(space), guide=guide).best()
    subsets = chain.from_iterable(combinations(units, size) for size in range(len(units) + 1))
    optimum = max(sum(macs[u] for u in each) for each in subsets if sum(powers[u] for u in each) <= most)
    covered = 0 if found is None else sum(macs[unit] for unit in quantized(found.placement))
    assert covered >= 0.99 * optimum


def test_without_noise_of_single_units_predictions_show_what_to_leave_out(space_of) -> None:
    """The noise is not measured where that takes too long, such as of thousands of pairs; predictions still are."""
    space = space_of()
    oracle = Additive(space)
    guide = Guide(oracle, space, limited(31.0), doubt_share=0.0)
    oracle.noise = lambda: None  # type: ignore[method-assign]
    build = Builder(space)
    found = search(space, build, guide=guide, keeps_limits=lambda t: oracle.truth(t.placement) >= 31.0).best()
    assert len(build.trials) == 1
    assert 31.0 <= oracle.truth(found.placement) <= 32.0


@pytest.mark.parametrize("names", [True, False])
def test_refused_units_stay_in_float_and_no_others(space_of, names: bool) -> None:
    space = space_of()
    heavy = sorted(unit for unit, count in counts(space).items() if count)
    refused = {heavy[1], heavy[4]}
    build = Builder(space, refused, names=names)
    run = search(space, build)
    found = run.best()
    assert set(heavy) - quantized(found.placement) == refused
    assert refused == {unit for unit in run.refused if counts(space)[unit]}
    assert all("refused" in reason for reason in run.refused.values())
    assert search(space, Builder(space, [unit.id for unit in space.units])).best() is None


def test_a_float_unit_without_pairs_of_its_own_does_not_keep_the_search_from_ending(models: Path) -> None:
    """The Flatten reads and gives what others quantize: without it the placement is the same."""
    own = backend().capabilities()
    narrow = replace(own, completes=frozenset(), labels=dict.fromkeys(own.labels, ("in+out",)), dynamic={})
    space = SchemeSpace(load_model(models / "digits_resnet.onnx"), narrow)
    asked = count()
    run = search(
        space,
        Builder(space, floats={"/Flatten"}),
        is_over=lambda: next(asked) > 20,
    )
    run.multiplications = {**run.multiplications, "/Flatten": 1}
    assert run.best() is not None
    assert set(run.refused) == {"/Flatten"}
    assert next(asked) < 20


def test_without_limits_all_multiplications_are_covered_with_the_fewest_conversions(space_of) -> None:
    space = space_of()
    build = Builder(space, conversions=lambda placement: len(quantized(placement)))
    found = search(space, build).best()
    assert {unit for unit, count in counts(space).items() if count} <= quantized(found.placement)
    equal = [trial for trial in build.trials if trial.ok]
    assert len(equal) > 1
    assert len(quantized(found.placement)) == min(len(quantized(trial.placement)) for trial in equal)


def test_outputs_that_miss_the_limits_end_in_another_placement(space_of) -> None:
    space = space_of()
    seen: list[str] = []

    def keeps_limits(trial: Trial) -> bool:
        seen.append(trial.placement.digest)
        return len(set(seen)) > 2

    found = search(space, Builder(space), keeps_limits=keeps_limits).best()
    assert found.placement.digest == seen[-1] not in seen[:2]
