"""One session with a switch for every pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_text import parsed
from random_models import ranges_for
from rehearsing import built_outputs, rehearsal_of

from qdqspec.accuracy.rehearsal import RehearsalRefusedError
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.types import Consumer, Placement, Site

TEXT = """chain (float[1,8,6,6] x) => (float[1,8,6,6] y, int64[1,1,6,6] best) {
  [first] a = Conv<pads = [1, 1, 1, 1]>(x, w)  [relu] b = Relu(a)  [second] c = Conv<pads = [1, 1, 1, 1]>(b, w)
  [add] d = Add(b, c)  [sig] y = Sigmoid(d)
  [choose] best = ArgMax<axis = 1>(d) }"""
RANDOM = np.random.default_rng(1)
FEEDS = [{"x": RANDOM.normal(size=(1, 8, 6, 6)).astype(np.float32)} for _ in range(3)]


@pytest.fixture
def model() -> Model:
    return parsed(TEXT, 19, w=RANDOM.normal(0, 0.2, (8, 8, 3, 3)).astype(np.float32))


def site(tensor: str, *ends: tuple[str, int], fmt: str = "uint8", weight: bool = False) -> Site:
    readers = tuple(Consumer(*end) for end in ends)
    return Site(tensor=tensor, consumers=readers, format=fmt, axis=0 if weight else None, weight=weight)


SITES = (
    site("x", ("first", 0)),
    site("b", ("second", 0), ("add", 0)),
    site("w", ("first", 1), ("second", 1), fmt="int8", weight=True),
    site("d", ("sig", 0)),
)


def placed(*sites: Site) -> Placement:
    return Placement(sites=frozenset(sites))


def test_the_error_is_over_all_samples_at_the_outputs_and_before_a_selection(
    model: Model, tmp_path: Path
) -> None:
    numbers, placement = Quantizer(model, ranges_for(model)), placed(*SITES[:2], SITES[3])
    with rehearsal_of(model, SITES, numbers, *FEEDS) as rehearsal:
        found, nothing = rehearsal.error(placement), rehearsal.error(placed())
        assert rehearsal.error(placed(SITES[3])).guiding_db < 100
    assert (nothing.sqnr_db, nothing.guiding_db, nothing.max_abs) == (np.inf, np.inf, 0.0)
    reference, tuned = (
        [built_outputs(model, each, numbers, feed, tmp_path)["y"] for feed in FEEDS]
        for each in (placed(), placement)
    )
    noise = np.square(np.subtract(reference, tuned)).sum()
    assert found.outputs[0].sqnr_db == pytest.approx(
        10 * np.log10(np.square(reference).sum() / noise), abs=0.01
    )
    assert found.outputs[0].max_abs == pytest.approx(np.abs(np.subtract(reference, tuned)).max())
    assert [one.name for one in found.outputs] == ["y", "best"]
    assert [one.name for one in found.guiding] == ["y", "d"]
    assert found.samples == 3


def test_a_pair_without_a_switch_is_an_error_with_its_name(model: Model) -> None:
    why = "no uint8 pair on tensor 'b' before input 0 of node 'add'"
    numbers = Quantizer(model, ranges_for(model))
    with (
        rehearsal_of(model, SITES[:1], numbers, *FEEDS) as rehearsal,
        pytest.raises(PlacementError, match=why),
    ):
        rehearsal.error(placed(site("b", ("add", 0))))


def test_a_rehearsal_of_unknown_operators_is_refused(model: Model) -> None:
    model.proto.opset_import.add(domain="elsewhere", version=1)
    model.proto.graph.node[-1].domain = "elsewhere"
    foreign = Model(model.proto)
    with pytest.raises(RehearsalRefusedError, match=r"cannot be rehearsed.*elsewhere"):
        rehearsal_of(foreign, SITES[:1], Quantizer(foreign, ranges_for(foreign)), *FEEDS)


def test_an_operator_that_raising_the_opset_replaces_keeps_its_switch(tmp_path: Path) -> None:
    old = parsed(
        "old (float[1,8,6,6] x) => (float[1,8,6,6] y) { [soft] a = Softmax(x)  y = Relu(a) }", opset=11
    )
    numbers, placement = Quantizer(old, ranges_for(old)), placed(site("x", ("soft", 0), fmt="int16"))
    with rehearsal_of(old, placement.sites, numbers, *FEEDS) as rehearsal:
        expected = built_outputs(old, placement, numbers, FEEDS[0], tmp_path)["y"]
        np.testing.assert_array_equal(rehearsal.engine(placement).run(FEEDS[0])["y"], expected)
        assert 0 < np.abs(expected - rehearsal.engine(placed()).run(FEEDS[0])["y"]).max() < 0.1
