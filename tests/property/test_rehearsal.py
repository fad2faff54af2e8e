"""A rehearsal computes the outputs of the inserted pairs, for any model and any placement that fits it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, strategies as st
from random_models import onnx_models, placements, random_inputs, ranges_for
from rehearsing import built_outputs, rehearsal_of

from qdqspec.graph.model import Model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.types import Placement, Site


@st.composite
def rehearsed(draw: st.DrawFn) -> tuple[Model, list[Placement]]:
    """A model and placements that one graph rehearses."""
    model = Model(draw(onnx_models(max_nodes=5)))
    return model, [draw(placements(model)) for _ in range(2)]


@given(rehearsed())
def test_a_rehearsed_placement_computes_the_outputs_of_the_inserted_one(drawn) -> None:
    model, several = drawn
    numbers, feed = Quantizer(model, ranges_for(model)), random_inputs(model)
    sites = [site for placement in several for site in placement.sites]
    with rehearsal_of(model, sites, numbers, feed) as rehearsal, tempfile.TemporaryDirectory() as folder:
        for placement in (*several, Placement(sites=frozenset())):
            expected = built_outputs(model, placement, numbers, feed, Path(folder))
            for name, values in rehearsal.engine(placement).run(feed).items():
                np.testing.assert_array_equal(values, expected[name])


@given(rehearsed(), st.data())
def test_any_part_of_a_site_can_be_rehearsed(drawn, data) -> None:
    """A pair may be enabled for only some of the consumers of its site."""
    model, (placement, _) = drawn
    numbers, feed = Quantizer(model, ranges_for(model)), random_inputs(model)
    parts = frozenset(
        Site(tensor=s.tensor, consumers=tuple(ends), format=s.format, axis=s.axis, weight=s.weight)
        for s in placement.sites
        if (ends := data.draw(st.sets(st.sampled_from(s.consumers))))
    )
    some = Placement(sites=parts)
    with (
        rehearsal_of(model, placement.sites, numbers, feed) as rehearsal,
        tempfile.TemporaryDirectory() as folder,
    ):
        expected = built_outputs(model, some, numbers, feed, Path(folder))
        for name, values in rehearsal.engine(some).run(feed).items():
            np.testing.assert_array_equal(values, expected[name])
