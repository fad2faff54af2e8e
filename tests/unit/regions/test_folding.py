"""A model folded into a few parts: each node is in one part, kernels are not divided, times and errors are summed."""

from __future__ import annotations

import math

import pytest
from graph_text import model_of
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.graph.model import Model
from qdqspec.graph.regions.folding import fold_graph
from qdqspec.graph.regions.search import find_regions
from qdqspec.types import BlockError, Consumer, LayerTime, PlacedPair, Site


def chain(links: int) -> Model:
    """Convolutions, each followed by a Relu."""
    body = "".join(f"c{i} = Conv (r{i - 1}, w) r{i} = Relu (c{i}) " for i in range(1, links + 1))
    text = f"(float[1, 4, 8, 8] r0) => (float[1, 4, 8, 8] r{links}) {{ {body} }}"
    return model_of(text, w=(4, 4, 1, 1))


def residual() -> Model:
    text = """(float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y)
    { a = Conv (x, w) b = Relu (a) c = Conv (b, w) d = Add (c, b) y = Relu (d) }"""
    return model_of(text, w=(4, 4, 1, 1))


def pair(tensor: str, reader: str, number_format: str = "uint8", *, weight: bool = False) -> PlacedPair:
    site = Site(
        tensor=tensor, consumers=(Consumer(reader, int(weight)),), format=number_format, weight=weight
    )
    return PlacedPair(site=site, scale=(0.1,), zero_point=(0,))


def test_a_small_model_has_a_part_for_each_kernel_and_edges_between_them():
    layers = [
        LayerTime(name="k0", op_type="FusedConv", milliseconds=2.0, nodes=("a", "b")),
        LayerTime(name="k1", op_type="FusedConv", milliseconds=1.0, nodes=("c", "d", "y")),
    ]
    parts = fold_graph(residual(), find_regions(residual()), reference=layers)
    assert [(part.name, part.ops, part.inputs) for part in parts] == [
        ("a", {"Conv": 1, "Relu": 1}, ()),
        ("c", {"Conv": 1, "Add": 1, "Relu": 1}, (0,)),
    ]
    assert [part.reference_ms for part in parts] == [2.0, 1.0]
    assert [part.tuned_ms for part in parts] == [None, None]


def test_nodes_that_compute_constants_are_excluded():
    text = """(float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y)
    { s = Shape (b) r = Reshape (b, s) t = Mul (r, r) a = Conv (x, w) y = Add (a, t) }"""
    parts = fold_graph(model_of(text, w=(4, 4, 1, 1), b=(4, 1, 1)), ())
    assert [(part.name, part.inputs) for part in parts] == [("a", ()), ("y", (0,))]


def test_parts_have_formats_errors_and_times_with_conversions():
    tuned = [
        LayerTime(name="q", op_type="QuantizeLinear", milliseconds=0.5, tensors=("b",), boundary=True),
        LayerTime(name="k0", op_type="FusedConv", milliseconds=2.0, nodes=("a", "b")),
        LayerTime(name="k1", op_type="QLinearConv", milliseconds=0.7, nodes=("c", "d"), integer=True),
        LayerTime(name="k2", op_type="Relu", milliseconds=0.1, nodes=("y",)),
    ]
    errors = [
        BlockError(block="c", label="in+out", sqnr_db=20.0),
        BlockError(block="c", label="in-only", sqnr_db=30.0),
        BlockError(block="gone", label="in+out", sqnr_db=1.0),
    ]
    # the first kernel is float, so that its node has no format although a pair is before it
    pairs = [pair("x", "a"), pair("w", "c", "int8", weight=True), pair("b", "c")]
    parts = fold_graph(residual(), find_regions(residual()), tuned=tuned, pairs=pairs, errors=errors)
    assert [part.tuned_ms for part in parts] == pytest.approx([2.5, 0.7, 0.1])
    assert [part.formats for part in parts] == [{}, {"uint8": 2}, {}]
    assert [part.sqnr_db for part in parts] == [None, pytest.approx(20.0), None]


@given(st.integers(1, 40), st.integers(1, 30), st.booleans())
def test_the_number_of_parts_is_limited_and_every_node_is_in_one(links: int, most: int, profiled: bool):
    model = chain(links)
    kernels = [
        LayerTime(name=f"k{i}", op_type="FusedConv", milliseconds=1.0, nodes=(f"c{i}", f"r{i}"))
        for i in range(1, links + 1)
    ]
    parts = fold_graph(model, find_regions(model), reference=kernels if profiled else (), most=most)
    assert 1 <= len(parts) <= most
    assert sum(sum(part.ops.values()) for part in parts) == 2 * links
    assert all(
        0 <= maker < len(parts) and maker != at for at, part in enumerate(parts) for maker in part.inputs
    )
    if profiled:
        assert all(part.ops.get("Conv") == part.ops.get("Relu") for part in parts), "kernels are not divided"
        assert math.fsum(part.reference_ms or 0.0 for part in parts) == pytest.approx(links)
    if len(parts) > 1:
        assert {maker for part in parts for maker in part.inputs} == set(range(len(parts) - 1))
