"""One session with a switch for every pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from random_models import ranges_for
from rehearsing import built_outputs, rehearsal_of

from qdqspec.accuracy.rehearsal import RehearsalRefusedError
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.types import Consumer, Placement, Site

MODELS = Path(__file__).parents[3] / "specs" / "models"
TEXT = """<ir_version: 8, opset_import: ["": 19]> chain (float[1,8,6,6] x) => (float[1,8,6,6] y, int64[1,1,6,6] best) {
  [first] a = Conv<pads = [1, 1, 1, 1]>(x, w)  [relu] b = Relu(a)  [second] c = Conv<pads = [1, 1, 1, 1]>(b, w)
  [add] d = Add(b, c)  [sig] y = Sigmoid(d)
  [choose] best = ArgMax<axis = 1>(d) }"""


@pytest.fixture
def model() -> Model:
    proto = onnx.parser.parse_model(TEXT)
    weight = np.random.default_rng(0).normal(0, 0.2, (8, 8, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return Model(proto)


@pytest.fixture
def feeds() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [{"x": random.normal(size=(1, 8, 6, 6)).astype(np.float32)} for _ in range(3)]


def site(tensor: str, *ends: tuple[str, int], fmt: str = "uint8", weight: bool = False) -> Site:
    readers = tuple(Consumer(*end) for end in ends)
    return Site(tensor=tensor, consumers=readers, format=fmt, axis=0 if weight else None, weight=weight)


SITES = (
    site("x", ("first", 0)),
    site("b", ("second", 0), ("add", 0)),
    site("b", ("second", 0), fmt="int16"),
    site("w", ("first", 1), ("second", 1), fmt="int8", weight=True),
    site("d", ("sig", 0)),
    site("y", ("", 0)),
)


def placed(*sites: Site) -> Placement:
    return Placement(sites=frozenset(sites))


def test_the_error_is_over_all_samples_at_the_outputs_and_before_a_selection(
    model: Model, feeds: list, tmp_path: Path
) -> None:
    numbers, placement = Quantizer(model, ranges_for(model)), placed(*SITES[:2], SITES[4])
    with rehearsal_of(model, SITES, numbers, *feeds) as rehearsal:
        found, nothing = rehearsal.error(placement), rehearsal.error(placed())
        assert rehearsal.error(placed(SITES[4])).guiding_db < 100
    assert (nothing.sqnr_db, nothing.guiding_db, nothing.max_abs) == (np.inf, np.inf, 0.0)
    reference = [built_outputs(model, placed(), numbers, feed, tmp_path)["y"] for feed in feeds]
    tuned = [built_outputs(model, placement, numbers, feed, tmp_path)["y"] for feed in feeds]
    noise = sum(np.square(r - t).sum() for r, t in zip(reference, tuned, strict=True))
    signal = sum(np.square(r).sum() for r in reference)
    assert found.outputs[0].sqnr_db == pytest.approx(10 * np.log10(signal / noise), abs=0.01)
    assert found.outputs[0].max_abs == pytest.approx(np.abs(np.subtract(reference, tuned)).max())
    assert ([one.name for one in found.outputs], [one.name for one in found.guiding]) == (
        ["y", "best"],
        ["y", "d"],
    )
    assert found.samples == 3


def test_a_pair_without_a_switch_is_an_error_with_its_name(model: Model, feeds: list) -> None:
    why = "no uint8 pair on tensor 'b' before input 0 of node 'add'"
    numbers = Quantizer(model, ranges_for(model))
    with (
        rehearsal_of(model, SITES[:1], numbers, *feeds) as rehearsal,
        pytest.raises(PlacementError, match=why),
    ):
        rehearsal.error(placed(site("b", ("add", 0))))


def test_a_rehearsal_of_unknown_operators_is_refused(model: Model, feeds: list) -> None:
    model.proto.opset_import.add(domain="elsewhere", version=1)
    model.proto.graph.node[-1].domain = "elsewhere"
    foreign = Model(model.proto)
    with pytest.raises(RehearsalRefusedError, match=r"cannot be rehearsed.*elsewhere"):
        rehearsal_of(foreign, SITES[:1], Quantizer(foreign, ranges_for(foreign)), *feeds)


def test_an_operator_that_raising_the_opset_replaces_keeps_its_switch(feeds: list, tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 11]> old (float[1,8,6,6] x) => (float[1,8,6,6] y) {
      [soft] a = Softmax(x)  y = Relu(a) }"""
    old = Model(onnx.parser.parse_model(text))
    numbers, placement = Quantizer(old, ranges_for(old)), placed(site("x", ("soft", 0), fmt="int16"))
    with rehearsal_of(old, placement.sites, numbers, *feeds) as rehearsal:
        expected = built_outputs(old, placement, numbers, feeds[0], tmp_path)["y"]
        np.testing.assert_array_equal(rehearsal.engine(placement).run(feeds[0])["y"], expected)
        assert 0 < np.abs(expected - rehearsal.engine(placed()).run(feeds[0])["y"]).max() < 0.1


def test_pairs_in_bodies_have_switches(feeds: list, tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 19]> inside (float[1,8,6,6] x) => (float[1,8,6,6] y) {
      big = ReduceMax<keepdims = 0>(x)  zero = Constant<value = float {0}>()  some = Greater(big, zero)
      y = If(some) <then_branch = one () => (float[1,8,6,6] t) { [inner] t = Mul(x, x) },
                    else_branch = other () => (float[1,8,6,6] e) { e = Neg(x) }> }"""
    branches = Model(onnx.parser.parse_model(text))
    (node,) = (node.name for node in branches.nodes if node.op_type == "Mul")
    placement = placed(site("x", (node, 0)))
    numbers = Quantizer(branches, ranges_for(branches))
    with rehearsal_of(branches, placement.sites, numbers, *feeds) as rehearsal:
        expected = built_outputs(branches, placement, numbers, feeds[0], tmp_path)["y"]
        np.testing.assert_array_equal(rehearsal.engine(placement).run(feeds[0])["y"], expected)
        assert rehearsal.error(placement).sqnr_db < 60
        assert rehearsal.error(placed()).sqnr_db == np.inf
