"""Verifies the operator table against the installed onnxruntime-web: the kernels of one model with all operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from installed import require_web
from onnx.reference import ReferenceEvaluator
from operator_models import IMAGE, MATRIX, ONE, Graph, layers_of

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime import ops as table
from qdqspec.backends.onnxruntime_web.engine import OnnxRuntimeWeb

FLOATING: dict[str, Callable[[Graph, str], str]] = {
    "Tanh": lambda g, x: g.node("Tanh", x),
    "Gelu": lambda g, x: g.node("Gelu", x),
    "ConvTranspose": lambda g, x: g.node("ConvTranspose", x, g.weight(8, 8, 3, 3, axis=1)),
    "ReduceMean": lambda g, x: g.node("ReduceMean", x, g.const([2, 3], np.int64)),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    require_web()


def integer_operators(
    makers: dict[str, Callable[[Graph, str], str]], folder: Path, *, out: bool
) -> dict[str, bool]:
    """For each operator whether all kernels that compute its nodes are in integers; one build for all."""
    g, nodes, outputs = Graph(), {}, []
    for op, make in makers.items():
        x = g.input(MATRIX if op in table.LINEAR else IMAGE)
        first, g.others = len(g.nodes), []
        results = [make(g, x), *g.others]
        nodes[op] = {node.name for node in g.nodes[first:]}
        outputs += [g.pair(y) if out else y for y in results]
    model = g.model(*outputs, opset=20 if "Gelu" in makers else 17)
    layers = layers_of(OnnxRuntimeWeb(), model, folder)
    found = {op: [x for x in layers if names & {*x.nodes} and not x.boundary] for op, names in nodes.items()}
    assert all(found.values())
    return {op: all(layer.integer for layer in own) for op, own in found.items()}


def test_operators_of_the_table_run_in_integers_between_pairs(tmp_path: Path) -> None:
    assert set(ONE) == set(table.LABELS)
    assert [op for op, integer in integer_operators(ONE, tmp_path, out=True).items() if not integer] == []


def test_label_in_only_is_offered_exactly_where_it_fuses(tmp_path: Path) -> None:
    found = integer_operators(ONE, tmp_path, out=False)
    offered = {op for op, kinds in table.LABELS.items() if "in-only" in kinds}
    assert {op for op in found.keys() - {"Concat", *table.MOVING} if found[op]} == offered


def test_operators_not_offered_run_in_float(tmp_path: Path) -> None:
    assert not set(FLOATING) & set(table.LABELS)
    assert not any(integer_operators(FLOATING, tmp_path, out=True).values())


@pytest.mark.parametrize("zero", [0, 128])
def test_products_with_8_bit_weights_are_exact(tmp_path: Path, zero: int) -> None:
    """With the largest activations and weights, sums of two products in 16 bits would saturate."""
    g = Graph()
    image = g.node("Conv", g.input((1, 64, 4, 4), zero=zero), g.full(8, 64, 3, 3, axis=0))
    product = g.node("MatMul", g.input((4, 256), zero=zero), g.full(256, 16, axis=1))
    model = g.model(g.pair(image, zero=0, scale=300.0), product, opset=19)
    assert not OnnxRuntimeWeb().capabilities().reduce_range
    feeds = {"x0": np.full((1, 64, 4, 4), 9, np.float32), "x1": np.full((4, 256), 9, np.float32)}
    layers = layers_of(OnnxRuntimeWeb(), model, tmp_path)
    assert all(layer.integer for layer in layers if not layer.boundary)
    results = OnnxRuntimeWeb().build(tmp_path / "one.onnx", BuildOptions()).run(feeds).values()
    for result, expected in zip(results, ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4)
