"""Pairs in bodies of If, Loop and Scan are inserted, executed and removed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from random_models import random_inputs, ranges_for

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.read.strip import strip_qdq
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Consumer, Placement, Site

SHARED = """g (float[1,8,8,8] x, bool c) => (float[1,8,8,8] y) {
    h = Relu(x)
    [choice] y = If(c) <
        then_branch = t () => (float[1,8,8,8] p) { [conv] q = Conv<pads=[1,1,1,1]>(h, w) p = Sigmoid(q) },
        else_branch = e () => (float[1,8,8,8] p) { [conv] q = Conv<pads=[1,1,1,1]>(h, w) p = Neg(q) }
    >
}"""
IF_IN_LOOP = """g (float[1,8] x, bool c) => (float[1,8] y) <int64 three = {3}, bool yes = {1}> {
    [loop] y = Loop(three, yes, x) <
        body = turn (int64 i, bool go_on, float[1,8] state) => (bool goes_on, float[1,8] next) {
            goes_on = Identity(go_on)
            [choice] n = If(c) <
                then_branch = t () => (float[1,8] p) { [mm] q = MatMul(state, w) p = Tanh(q) },
                else_branch = e () => (float[1,8] p) { [mm] q = MatMul(state, w) p = Sigmoid(q) }
            >
            next = Tanh(n)
        }
    >
}"""
CASES = {
    "shared": (SHARED, (8, 8, 3, 3), "choice", "conv", "h"),
    "if in loop": (IF_IN_LOOP, (8, 8), "loop/body/choice", "mm", "state"),
}


def inserted(model: Model, *sites: Site) -> Model:
    numbers = Quantizer(model, ranges_for(model))
    return Model(insert_qdq(model, Placement(sites=frozenset(sites)), numbers).proto)


def run(model: Model, condition: bool) -> np.ndarray:
    feeds = {name: value for name, value in random_inputs(model).items() if name != "c"}
    return outputs_of(model, {**feeds, "c": condition})[0]


@pytest.mark.parametrize("case", CASES)
def test_each_graph_has_separate_pairs_and_shares_the_integer_weight(case: str) -> None:
    text, shape, path, node, data = CASES[case]
    model, branches = parsed(text, w=shape), [f"{path}/then_branch", f"{path}/else_branch"]

    def both(tensor: str, index: int) -> Site:
        ends = tuple(sorted(Consumer(f"{branch}/{node}", index) for branch in branches))
        return Site(tensor=tensor, consumers=ends, format="int16", weight=index > 0)

    made = inserted(model, both(data, 0), both("w", 1))
    onnx.checker.check_model(made.proto, full_check=True)
    for condition in (True, False):
        np.testing.assert_allclose(run(made, condition), run(model, condition), atol=0.05)
    assert [n.scope for n in made.nodes if n.op_type == "QuantizeLinear"] == branches
    assert [n.scope for n in made.nodes if n.op_type == "DequantizeLinear"] == [
        b for b in branches for _ in "dw"
    ]
    assert "w_quantized" in {t.name for t in made.proto.graph.initializer}
    assert "w" not in made.initializers


@pytest.mark.parametrize("case", CASES)
def test_the_search_space_offers_tensors_in_bodies_that_one_graph_reads(case: str) -> None:
    text, shape, path, node, _ = CASES[case]
    model = parsed(text, w=shape)
    space = SchemeSpace(model, backend().capabilities())
    assert {f"{path}/then_branch/{node}", f"{path}/else_branch/{node}"} <= space.by_id.keys()
    placement = space.resolve(space.everything())
    for site in (site for site in placement.ordered if not site.weight):
        assert len({model.by_name[end.node].scope for end in site.consumers}) == 1
    assert strip_qdq(inserted(model, *placement.ordered), model).proto == model.proto
