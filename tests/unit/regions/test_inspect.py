"""The output of `qdqspec inspect`, its forecast of a search, and the parts of a folded graph."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx_text import model_of, parsed

from qdqspec._core.registry import resolve
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.folding import fold_graph
from qdqspec.graph.regions.forecast import forecast_line, forecast_tuning, multiplications_by_node
from qdqspec.graph.regions.inspect import (
    Judged,
    inspect_model,
    inspection_text,
    inspection_to_json,
)
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.search_space import judge
from qdqspec.types import BlockError, Consumer, LayerTime, PlacedPair, Site


def judged(model: Model, *able: str) -> Judged:
    """The judgement of a backend that runs these operator types in integers, but no producer of a graph output."""
    reasons = {n.name: "" if n.op_type in able else f"{n.op_type}: it cannot" for n in model.nodes}
    return Judged(
        backend="some", reasons=reasons, outputs=dict.fromkeys(model.outputs, "it is not asked for")
    )


def test_the_texts_and_the_json_of_an_inspection(models, golden):
    """The inspection of ``qdqspec inspect`` without the forecast."""
    model = load_model(models / "digits_resnet.onnx")
    can = resolve("backend", "onnxruntime")().capabilities()
    found = inspect_model(model, find_regions(model), judge(model, can, backend="onnxruntime"))
    golden("regions/digits_resnet.txt", inspection_text(found))
    golden("regions/digits_resnet-verbose.txt", inspection_text(found, verbose=True, include_all=True))
    golden("regions/digits_resnet.json", json.dumps(inspection_to_json(found), indent=1) + "\n")


def test_long_lists_are_truncated_and_regions_with_nothing_to_quantize_omitted_in_text(models):
    model = load_model(models / "ultraface_rfb320.onnx")
    regions = find_regions(model)
    why = {"scores": "Softmax cannot", "boxes": ""}
    found = inspect_model(model, regions, replace(judged(model, "Softmax"), outputs=why))
    text = inspection_text(found)
    assert text.count("LEAF") < inspection_text(found, include_all=True).count("LEAF")
    assert "--include-all shows them" in text
    assert "1        scores     Softmax cannot" in text
    assert "boxes" not in text.partition("Graph outputs that stay float")[2]
    assert {row["tensor"]: row["reason"] for row in inspection_to_json(found)["outputs"]} == why
    found = inspect_model(model, regions)
    text = inspection_text(found, lines=3)
    assert f"... and {len(found.regions) - 3} more" in text
    assert len(text.splitlines()) < 40
    assert len(inspection_to_json(found)["regions"]) == len(found.regions)


NESTED = """g (float[1,4,8,8] x, bool c) => (float[1,4,8,8] y) {
    [pre] a = Conv(x, w)
    [choose] y = If (c) <
        then_branch = t () => (float[1,4,8,8] p) { [conv] q = Conv(a, w)
            [again] p = If (c) <then_branch = u () => (float[1,4,8,8] r) { [relu] r = Relu(q) },
                                else_branch = v () => (float[1,4,8,8] s) { [neg] s = Neg(a) }> },
        else_branch = e () => (float[1,4,8,8] z) { [call] z = local.twice(a) }
    >
}
<domain: "local", opset_import: ["": 17]> twice (f) => (h) { [add] h = Add(f, f) }"""


def test_bodies_are_regions_of_the_tree():
    model = parsed(NESTED, w=(4, 4, 1, 1))
    regions = find_regions(model)
    assert {(r.parent, r.nodes[0]) for r in regions if r.type == "LEAF"} == {
        ("r0", "pre"),
        ("r0.1", "choose/then_branch/conv"),
        ("r0.1", "choose/then_branch/again/then_branch/relu"),
        ("r0.1", "choose/then_branch/again/else_branch/neg"),
        ("r0", "choose/else_branch/call"),
    }
    found = inspect_model(model, regions, judged(model, "Conv"))
    text = inspection_text(found)
    assert "quantizable on some: 2 of 7 nodes" in text
    assert "choose/then_branch/again/else_branch" in text
    assert len(inspection_to_json(found)["bodies"]) == 4
    assert "and 3 more" in inspection_text(found, lines=1)


def test_dynamic_dimensions_are_given_or_assumed_as_one_and_listed() -> None:
    text = """net (float[batch,steps,64] x, float[batch,?] z) => (float[batch,steps,128] y) {
        h = MatMul(x, w)  y = Relu(h) }"""
    model = parsed(text, w=(64, 128))
    found = forecast_tuning(model, 10)
    assert found.multiplications == 64 * 128
    assert found.assumed == ("'batch'", "'steps'", "dimension 1 of input 'z'")
    assert forecast_line(found).endswith(
        "multiplications (unknown sizes taken as 1: 'batch', 'steps', dimension 1 of input 'z'); nothing was built; "
        "calibration before it, and the timing of its finalists and the comparison of outputs after it, come on top"
    )
    # dimensions of the same name have the same size
    found = forecast_tuning(model, 10, {"x": (4, 50, 64)})
    assert found.multiplications == 4 * 50 * 64 * 128
    assert found.assumed == ("dimension 1 of input 'z'",)
    assert forecast_tuning(model, 10, {"x": (4, 50, 64), "z": (4, 2)}).assumed == ()
    model.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1  # as Paddle2ONNX writes
    assert forecast_tuning(model, 10, {"x": (4, 50, 64)}).multiplications == found.multiplications


_SCALES = "float s, uint8 z, float[12] t, uint8[12] u, float v, uint8 p"
_IMAGE, _CONV = ("uint8[n,4,8,8] q", (2, 4, 8, 8)), 2 * 6 * 6 * 12 * 4 * 3 * 3
_ROWS, _PRODUCT = ("uint8[n,5] q", (2, 5)), 2 * 5 * 12
_FLOAT_ROWS = ("float[n,5] q", (2, 5)), 2 * 5 * 12
_HEADS = ("float[b,n,m,5,3] q", (2, 4, 7, 5, 3)), 2 * 4 * 7 * 5 * 3 * 6
_TOKENS = ("float[b,n,6] q", (2, 4, 6)), 2 * 2 * 4 * 6 * 9  # scores and their product with the values
_NARROW = "uint8[24,2,8]", ("float[n,7,32] q", (2, 7, 32)), 2 * 7 * 32 * 24
_STEPS, _STEP = ("float[steps,batch,16] q", (20, 3, 16)), 20 * 3 * 8 * (16 + 8)


@pytest.mark.parametrize(
    ("node", "weight", "left", "macs"),
    [
        ("y = ConvInteger(q, w, z)", "uint8[12,4,3,3]", _IMAGE, _CONV),
        ("y = QLinearConv(q, s, z, w, t, u, v, p)", "uint8[12,4,3,3]", _IMAGE, _CONV),
        ("y = MatMulInteger(q, w, z)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = QLinearMatMul(q, s, z, w, t, u, v, p)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = com.microsoft.QGemm(q, s, z, w, t, u)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = com.microsoft.QGemm<transB = 1>(q, s, z, w, t, u)", "uint8[12,5]", _ROWS, _PRODUCT),
        ("y = com.microsoft.DynamicQuantizeMatMul(q, w, t)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = com.microsoft.MatMulIntegerToFloat(q, w, s, t)", "uint8[5,12]", _ROWS, _PRODUCT),
        ("y = com.microsoft.FusedMatMul<transA = 1, transB = 1>(q, w)", "float[12,2]", *_FLOAT_ROWS),
        ("y = com.microsoft.FusedGemm<transB = 1>(q, w, t)", "float[12,5]", ("float[n,5] q", (2, 5)), _PRODUCT),
        ('y = Einsum<equation = "b...hd, dhe -> b...e">(q, w)', "float[3,5,6]", *_HEADS),
        ("y = Attention<q_num_heads = 2, kv_num_heads = 2>(q, w, w)", "float[2,9,6]", *_TOKENS),
        ("k = Identity(w) y = com.microsoft.MultiHeadAttention<num_heads = 2>(q, w, k)", "float[2,9,6]", *_TOKENS),
        ("y = com.microsoft.Attention<num_heads = 2>(q, w)", "float[6,18]", _TOKENS[0], 2 * 4 * 6 * (18 + 2 * 4)),
        ("y = com.microsoft.MatMulNBits<K = 32, N = 24, bits = 4, block_size = 16>(q, w, t)", *_NARROW),
        # each step of each sample meets the weights of all gates and directions
        *(
            (
                f'y = {op}<direction = "{way}", hidden_size = 8>(q, w, r)',
                f"float[{n},{g * 8},8] r, float[{n},{g * 8},16]",
                _STEPS,
                n * g * _STEP,
            )
            for op, g in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
            for way, n in (("forward", 1), ("bidirectional", 2))
        ),
    ],
)  # fmt: skip
def test_multiplications_are_counted(
    node: str, weight: str, left: tuple[str, tuple[int, ...]], macs: int
) -> None:
    model = parsed(f"net ({left[0]}, {weight} w, {_SCALES}) => (y) {{ {node} }}")
    assert forecast_tuning(model, 10, {"q": left[1]}).multiplications == macs


def kernel(milliseconds: float, *nodes: str, **more: Any) -> LayerTime:
    return LayerTime(name="k", op_type="K", milliseconds=milliseconds, nodes=nodes, **more)


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
    layers = [kernel(2.0, "a", "b"), kernel(1.0, "c", "d", "y")]
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
        kernel(0.5, tensors=("b",), boundary=True),
        kernel(2.0, "a", "b"),
        kernel(0.7, "c", "d", integer=True),
        kernel(0.1, "y"),
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
    body = "".join(f"c{i} = Conv (r{i - 1}, w) r{i} = Relu (c{i}) " for i in range(1, links + 1))
    text = f"(float[1, 4, 8, 8] r0) => (float[1, 4, 8, 8] r{links}) {{ {body} }}"
    model = model_of(text, w=(4, 4, 1, 1))
    kernels = [kernel(1.0, f"c{i}", f"r{i}") for i in range(1, links + 1)]
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


@pytest.mark.parametrize(
    ("operator", "count"),
    [("MatMul(t, w)", 4096), ("Gemm(t, w)", 4096), ("MatMul(w, t)", 4096), ("MatMul(t, t)", 0)],
)
@pytest.mark.parametrize("rows", ["4", "n"])
def test_a_product_behind_an_operator_of_unknown_results_counts_its_weight(
    operator: str, count: int, rows: str
) -> None:
    """Without a count, a search for the most multiplications would leave the product in float."""
    text = (
        f"g (float[{rows},64] x) => (float[{rows},64] y) {{ t = some.Normalize(x) [product] y = {operator} }}"
    )
    model = parsed(text, 17, w=np.ones((64, 64), np.float32))
    counts, unknown = multiplications_by_node(model, {"x": (4, 64)})
    assert (counts["product"], unknown) == (count, ["product"])


def test_a_node_of_constants_costs_nothing_and_iterations_are_counted_by_a_run() -> None:
    text = """g (float[4,64] x, int64 n, bool c) => (float[4,64] y, float[64,64] k) {
        k = MatMul(w, w)
        a = MatMul(x, w)
        y = Loop(n, c, a) <body = b (int64 i, bool r, float[4,64] s) => (bool o, float[4,64] t) {
            o = Identity(r)  m = MatMul(s, w)  t = Relu(m) }> }"""
    model = parsed(text, 17, w=np.ones((64, 64), np.float32))
    (inner,) = (node for node in model.nodes if node.scope and node.op_type == "MatMul")
    asked = []
    seen, unknown = multiplications_by_node(
        model, {}, lambda names: asked.extend(names) or dict.fromkeys(names, (3 * 4 * 64,))
    )
    assert (asked, unknown) == ([inner.outputs[0]], [])
    once = 4 * 64 * 64
    assert {name: count for name, count in seen.items() if count} == {"MatMul#1": once, inner.name: 3 * once}
    for not_run in ({}, {inner.outputs[0]: (0,)}):
        seen, unknown = multiplications_by_node(model, {}, lambda _, given=not_run: given)
        assert (seen[inner.name], unknown) == (once, [inner.name])
