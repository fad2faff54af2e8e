"""Strategies on a model whose network is in both bodies of an If."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.search.blocks import labels_of, tie
from qdqspec.search.strategies.exhaustive import Exhaustive
from qdqspec.search.strategies.region import RegionSearch
from qdqspec.types import Placement

TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[1,8,8,8] x, bool c) => (float[1,8,8,8] y) {
    [choice] y = If (c) <
        then_branch = t () => (float[1,8,8,8] p) {
            [one] a = Conv<pads = [1,1,1,1]>(x, w0) b = Relu(a) [two] d = Conv<pads = [1,1,1,1]>(b, w1) p = Sigmoid(d)
        },
        else_branch = e () => (float[1,8,8,8] q) { [one] a = Conv<pads = [1,1,1,1]>(x, w1) q = Sigmoid(a) }
    >
}"""


@pytest.fixture
def space() -> SchemeSpace:
    proto = onnx.parser.parse_model(TEXT)
    for name in ("w0", "w1"):
        weight = np.random.default_rng(0).normal(size=(8, 8, 3, 3)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, name))
    model = Model(proto)
    return SchemeSpace(model, backend().capabilities(), regions=find_regions(model))


def then_branch_only(placement: Placement) -> float:
    """The cost of a placement: pairs in one body save time, pairs in the other cost time."""
    homes = [end.node.split("/")[1] for site in placement.sites for end in site.consumers]
    return 1.0 - 0.05 * homes.count("then_branch") + 0.05 * homes.count("else_branch")


def test_the_exhaustive_search_proposes_every_labelling_of_all_bodies(space: SchemeSpace, drive) -> None:
    classes = tie(space)
    labellings = itertools.product(*(tied.codes for tied in classes))
    expected = {space.resolve(labels_of(space, classes, choice)).digest for choice in labellings}
    assert len(expected) >= 8
    trials = drive(Exhaustive, space, then_branch_only, trials=2000)
    assert {trial.placement.digest for trial in trials} == expected


@pytest.mark.parametrize("strategy", [Exhaustive, RegionSearch])
def test_a_gain_in_one_body_alone_is_found(space: SchemeSpace, drive, strategy) -> None:
    trials = drive(strategy, space, then_branch_only, trials=200)
    best = min(trials, key=lambda trial: trial.ratio)
    best_labels = {u.id: u.full for u in space.units if u.id.startswith("choice/then_branch/")}
    assert best.placement.digest == space.resolve(best_labels).digest
