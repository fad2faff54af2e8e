"""Insertion equals a reference that is written in the most obvious way."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from random_models import onnx_models, placements, ranges_for
from reference_insertion import insert_by_reference, unordered

from qdqspec.graph.model import Model
from qdqspec.qdq.edit.biases import biased_layer
from qdqspec.qdq.edit.insert import Inserter
from qdqspec.qdq.edit.pairs import misfit
from qdqspec.qdq.quantize.corrections import Corrections, weight_key
from qdqspec.qdq.quantize.formats import FORMATS, RUN_TIME
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.types import Consumer, Placement, Site
from tests.support.weights import floating

KINDS = {
    "8 bits": (("uint8", "int8"), ("int8",)),
    "raised opsets": (("int16", "uint8", "fp8"), ("int16", "int8", "fp8")),
    "blocked weights": (("uint8",), ("int8_b16", "int4", "nvfp4", "int8")),
    "scales at run time": ((RUN_TIME, "uint8"), ("int8",)),
}


def constant(name: str, *shape: int) -> TensorProto:
    values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def model_of(
    nodes: list[onnx.NodeProto], shape: list[int], weights: list[TensorProto], outputs: str, opset: int = 21
) -> Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return Model(onnx.shape_inference.infer_shapes(proto))


def convolutions() -> Model:
    """A bias as initializer, one as Constant node, and none; an inner tensor is an output."""
    bias = helper.make_node("Constant", [], ["c"], "c_made", value=constant("c", 3))
    layers = [("x", "w1", "b", "h"), ("h", "w22", "c", "i"), ("i", "w333", "", "y")]
    nodes = [helper.make_node("Conv", [x, w, *([b] if b else [])], [y], f"{y}_made") for x, w, b, y in layers]
    weights = [constant(w, 3, 3, 1, 1) for _, w, _, _ in layers]
    return model_of([bias, *nodes], [1, 3, 4, 4], [*weights, constant("b", 3)], "iy", opset=13)


def products() -> Model:
    """Products that share a weight, for dynamic and blocked formats."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "w"], ["y"], "second"),
        helper.make_node("MatMul", ["r", "ww"], ["z"], "third"),
    ]
    return model_of(nodes, [2, 64], [constant("w", 64, 64), constant("ww", 64, 8)], "yz")


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
