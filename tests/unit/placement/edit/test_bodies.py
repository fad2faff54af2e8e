"""Pairs in bodies of If, Loop and Scan are inserted, executed and removed."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from random_models import random_inputs, ranges_for

from qdqspec._core.registry import resolve
from qdqspec.backends.base import Capabilities
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.read.strip import strip_qdq
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Consumer, Placement, Site

HEAD = '<ir_version: 8, opset_import: ["": 17]> '
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
                then_branch = t () => (float[1,8] p) { [mm] q = MatMul(state, v) p = Tanh(q) },
                else_branch = e () => (float[1,8] p) { [mm] q = MatMul(state, v) p = Sigmoid(q) }
            >
            next = Tanh(n)
        }
    >
}"""
SHAPES = {"w": (8, 8, 3, 3), "v": (8, 8)}


def model_of(text: str) -> Model:
    proto = onnx.parser.parse_model(HEAD + text)
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        if f" {name})" in text:
            value = random.normal(size=shape).astype(np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return Model(proto)


def both(tensor: str, path: str, node: str, index: int, **more: object) -> Site:
    branches = (f"{path}/{branch}/{node}" for branch in ("then_branch", "else_branch"))
    ends = tuple(sorted(Consumer(name, index) for name in branches))
    return Site(tensor=tensor, consumers=ends, **{"format": "int16", **more})  # type: ignore[arg-type]


def inserted(model: Model, *sites: Site) -> Model:
    numbers = Quantizer(model, ranges_for(model))
    return Model(insert_qdq(model, Placement(sites=frozenset(sites)), numbers).proto)


def run(model: Model, condition: bool) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feeds = {name: value for name, value in random_inputs(model).items() if name != "c"}
    return np.asarray(session.run(None, {**feeds, "c": np.array(condition)})[0])


CASES = {
    "shared": (SHARED, "choice", "conv", ("h", "w")),
    "if in loop": (IF_IN_LOOP, "loop/body/choice", "mm", ("state", "v")),
}


@pytest.mark.parametrize("case", CASES)
def test_each_graph_has_separate_pairs_and_shares_the_integer_weight(case: str) -> None:
    text, path, node, (data, weight) = CASES[case]
    model = model_of(text)
    made = inserted(model, both(data, path, node, 0), both(weight, path, node, 1, weight=True))
    onnx.checker.check_model(made.proto, full_check=True)
    for condition in (True, False):
        np.testing.assert_allclose(run(made, condition), run(model, condition), atol=0.05)
    homes = [n.scope for n in made.nodes if n.op_type == "QuantizeLinear"]
    assert homes == [f"{path}/then_branch", f"{path}/else_branch"]
    assert [n.scope for n in made.nodes if n.op_type == "DequantizeLinear"] == [
        h for h in homes for _ in "dw"
    ]
    assert f"{weight}_quantized" in {t.name for t in made.proto.graph.initializer}
    assert weight not in made.initializers


@pytest.mark.parametrize("case", CASES)
def test_the_search_space_offers_tensors_in_bodies_that_one_graph_reads(case: str) -> None:
    text, path, node, _ = CASES[case]
    model = model_of(text)
    capabilities: Capabilities = resolve("backend", "onnxruntime")().capabilities()
    space = SchemeSpace(model, capabilities)
    assert {f"{path}/then_branch/{node}", f"{path}/else_branch/{node}"} <= space.by_id.keys()
    placement = space.resolve(space.everything())
    activations = [site for site in placement.ordered if not site.weight]
    for site in activations:
        assert len({model.by_name[end.node].scope for end in site.consumers}) == 1
    made = inserted(model, *placement.ordered)
    assert strip_qdq(made, model).proto == model.proto
    for condition in (True, False):
        assert np.isfinite(run(made, condition)).all()


def test_a_tensor_that_a_body_reads_has_no_integer_output_outside() -> None:
    model = model_of(
        """g (float[1,8] x, bool c) => (float[1,8] y) {
            [mm] h = MatMul(x, v)
            y = If(c) <then_branch = t () => (float[1,8] p) { p = Tanh(h) },
                       else_branch = e () => (float[1,8] q) { q = Sigmoid(h) }>
        }"""
    )
    capabilities: Capabilities = resolve("backend", "onnxruntime")().capabilities()
    (unit,) = (unit for unit in SchemeSpace(model, capabilities).units if unit.id == "mm")
    assert unit.outputs == ()
