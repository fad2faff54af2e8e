"""Insertion equals a reference that is written in the most obvious way."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import helper
from onnx_text import parsed
from random_models import onnx_models, placements, ranges_for
from reference_insertion import insert_by_reference, unordered

from qdqspec.graph.model import Model
from qdqspec.qdq.formats import FORMATS, RUN_TIME
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.pairs import biased_layer, misfit
from qdqspec.qdq.quantizer import Corrections, Quantizer, weight_key
from qdqspec.types import Consumer, Placement, Site
from tests.support.weights import floating

KINDS = {
    "8 bits": (("uint8", "int8"), ("int8",)),
    "raised opsets": (("int16", "uint8", "fp8"), ("int16", "int8", "fp8")),
    "blocked weights": (("uint8",), ("int8_b16", "int4", "nvfp4", "int8")),
    "scales at run time": ((RUN_TIME, "uint8"), ("int8",)),
}


def convolutions() -> Model:
    """A bias as initializer, one as Constant node, and none; an inner tensor is an output."""
    kernel = (3, 3, 1, 1)
    proto = parsed(
        """g (float[1,3,4,4] x) => (float[1,3,4,4] i, float[1,3,4,4] y) {
            [h_made] h = Conv(x, w1, b)  [i_made] i = Conv(h, w22, c)  [y_made] y = Conv(i, w333) }""",
        13, ir=10, w1=kernel, w22=kernel, w333=kernel, b=(3,), c=(3,),
    ).proto  # fmt: skip
    node = helper.make_node("Constant", [], ["c"], "c_made", value=proto.graph.initializer.pop())
    proto.graph.node.insert(0, node)
    return Model(proto)


def products() -> Model:
    """Products that share a weight, for dynamic and blocked formats."""
    return parsed(
        """g (float[2,64] x) => (float[2,64] y, float[2,8] z) { [first] a = MatMul(x, w)
            [relu] r = Relu(a)  [second] y = MatMul(r, w)  [third] z = MatMul(r, ww) }""",
        21, ir=10, w=(64, 64), ww=(64, 8),
    )  # fmt: skip


def quantizer(model: Model, placement: Placement) -> Quantizer:
    """Numbers with a shift for each bias that can be corrected."""
    layers = [(site, biased_layer(model, site)) for site in placement.sites if site.weight]
    shifts = {
        weight_key(site): np.linspace(-1, 1, layer.channels, dtype=np.float32)
        for site, layer in layers
        if layer is not None
    }
    return Quantizer(model, ranges_for(model), corrections=Corrections(biases=shifts))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_insertion_equals_the_reference(kind: str, data: st.DataObject) -> None:
    fixed = st.sampled_from([convolutions, products]).map(lambda make: make())
    model = data.draw(onnx_models(repeated_names=True).map(Model) | fixed)
    activations, weights = KINDS[kind]
    drawn = data.draw(placements(model, activations=activations, weights=weights))
    sites = frozenset(site for site in drawn.sites if misfit(model, site) is None)
    check_insertion(model, Placement(sites=sites), data.draw(st.sampled_from(["integer", "float"])))


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.dynamic and fmt.block])
@given(chosen=st.sets(st.sampled_from(range(6)), min_size=1))
def test_insertion_of_blocks_with_dynamic_scales_equals_the_reference(name: str, chosen: set[int]) -> None:
    model = products()
    ends = [("x", "first"), ("r", "second"), ("r", "third"), ("w", "first"), ("w", "second"), ("ww", "third")]
    sites = [
        Site(
            tensor=tensor,
            consumers=(Consumer(node, int("w" in tensor)),),
            format=name,
            axis=0 if "w" in tensor else 1,
            weight="w" in tensor,
        )
        for tensor, node in ends
    ]
    check_insertion(model, Placement(sites=frozenset(sites[i] for i in chosen)), "integer")


def check_insertion(model: Model, placement: Placement, mode: str) -> None:
    numbers, floats = quantizer(model, placement), floating(placement.sites, mode)
    inserter = Inserter(model, numbers, floating=floats)
    inserter.insert(
        Placement(sites=frozenset(placement.ordered[::2]))
    )  # a candidate made before has no effect
    found = inserter.insert(placement).proto
    assert unordered(found) == unordered(insert_by_reference(model, placement, numbers, floats))
    if RUN_TIME not in {site.format for site in placement.sites} and mode == "integer":
        onnx.checker.check_model(found)  # the order of the nodes is topological
