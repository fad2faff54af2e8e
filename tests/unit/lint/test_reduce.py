"""Reduction of failing models to the failing nodes, on a simulated backend, with crashes, and on real runtimes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx_text import parsed
from random_models import onnx_models

from qdqspec.app.reduce import reduce_model, smallest, with_shapes
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.protos import all_graphs

MANY = 60.0  # seconds


class Picky(FakeDevice):
    """Refuses models in which an operator of one type reads the result of one of another type."""

    def __init__(self, maker: str, reader: str) -> None:
        super().__init__()
        self._pattern = maker, reader
        self.builds = 0

    def build(self, model, options):
        self.builds += 1
        loaded = load_model(model)
        for node in loaded.nodes:
            for tensor in node.inputs:
                made = loaded.producer.get(tensor)
                if made is not None and (made.op_type, node.op_type) == self._pattern:
                    raise BackendError(f"pass Fuse: '{node.name}' of {len(loaded.nodes)} has no shape 0x3f")
        raise BackendError(f"{len(loaded.nodes)} nodes: another problem")


@settings(max_examples=60)
@given(onnx_models(max_nodes=12), st.data())
def test_the_reduced_model_fails_in_the_same_way_and_is_no_larger(tmp_path_factory, proto, data):
    model = Model(proto)
    reads = ((tensor, node) for node in model.nodes for tensor in node.inputs)
    made = ((t, node) for t, node in reads if t in model.producer and t not in model.constants)
    found = sorted({(model.producer[tensor].op_type, node.op_type) for tensor, node in made})
    if not found:
        return
    backend, folder = Picky(*data.draw(st.sampled_from(found))), tmp_path_factory.mktemp("fault")
    reduced = reduce_model(model, backend, BuildOptions(), folder, seconds=MANY)
    assert reduced.complete
    assert "pass Fuse" in reduced.failure
    assert reduced.nodes <= reduced.nodes_before
    small = load_model(reduced.model)  # which validates it
    assert sum(len(graph.node) for graph in all_graphs(small.proto.graph)) == reduced.nodes
    assert reduced.nodes <= 2 or small.has_bodies  # what a body reads or returns needs the body
    with pytest.raises(BackendError, match="pass Fuse"):
        backend.build(reduced.model, BuildOptions())


@given(st.sets(st.integers(0, 40)), st.integers(41, 60))
def test_smallest_finds_exactly_the_needed_elements(needed, count):
    assert smallest(range(count), lambda kept: needed <= {*kept}) == sorted(needed)


def test_the_time_is_limited(models, tmp_path):
    model = load_model(models / "digits_resnet.onnx")
    backend = Picky("Conv", "Relu")
    reduced = reduce_model(model, backend, BuildOptions(), tmp_path, seconds=0)
    assert not reduced.complete
    assert reduced.nodes == reduced.nodes_before
    assert backend.builds == 2  # the first and the last


def test_a_crash_is_reduced_in_child_processes(models, tmp_path):
    options, model = BuildOptions(extra={"fake.crash": "run"}), load_model(models / "digits_resnet.onnx")
    with Isolated("fake") as backend:
        reduced = reduce_model(model, backend, options, tmp_path, seconds=MANY)
    assert "SIGSEGV during 'run'" in reduced.failure
    assert reduced.nodes == 1
    assert "BuildOptions(extra={'fake.crash': 'run'})" in reduced.program.read_text()


# A MatMul with per-channel weights of three dimensions builds on ONNX Runtime, and fails when run (lint: ORT002).
REFUSED = """g (float[2,4,16] x) => (float[2,4,16] y) <float s = {0.05}, uint8 z = {128}> {
    b = Add(x, secret)  c = Relu(b)
    q = QuantizeLinear(c, s, z)  a = DequantizeLinear(q, s, z)
    v = DequantizeLinear<axis = 2>(w, ws, wz)
    m = MatMul(a, v)  t = Tanh(m)  y = Add(t, secret)
}"""


def test_a_fault_of_onnxruntime_is_reduced_to_its_nodes_with_random_weights(tmp_path):
    """The program reproduces it with the runtime alone."""
    weights = np.random.default_rng(3).integers(-64, 65, (2, 16, 16)).astype(np.int8)
    scales = {"ws": np.full(16, 0.25, np.float32), "wz": np.zeros(16, np.int8)}
    given = parsed(REFUSED, w=weights, secret=np.full(16, 4.25, np.float32), **scales)
    with Isolated("onnxruntime") as backend:
        reduced = reduce_model(given, backend, BuildOptions(), tmp_path, seconds=MANY)
    small = load_model(reduced.model)
    assert {node.op_type for node in small.nodes} == {"DequantizeLinear", "MatMul"}
    assert (reduced.nodes, reduced.kept) == (3, ())
    for name in ("w", "ws"):
        assert small.array(name).shape == given.array(name).shape
        assert not np.array_equal(small.array(name), given.array(name)), "weights are random"
    text = reduced.program.read_text()
    assert "import qdqspec" not in text
    assert "from qdqspec" not in text
    done = subprocess.run([sys.executable, reduced.program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ONNXRuntimeError" in done.stderr


# The fault is in one branch, between weights and other nodes.
BRANCHES = """g (float[2,4] x, bool k) => (float[2,4] y) <float[4] bias = {1, 2, 3, 4}> {
    s = Sigmoid(x)
    v = If (k) <
        then_branch = t () => (float[2,4] d) <float[4] w = {7, 8, 9, 10}> {
            a = Exp(s)
            b = Add(a, w)
            c = Relu(b)
            d = Neg(c)
        },
        else_branch = e () => (float[2,4] f) { f = Mul(s, bias) }
    >
    y = Cos(v)
}"""


def test_a_fault_in_a_branch_is_reduced_to_the_node_with_its_branches_and_random_weights(tmp_path):
    backend = Picky("Add", "Relu")
    reduced = reduce_model(parsed(BRANCHES), backend, BuildOptions(), tmp_path, seconds=MANY)
    small = load_model(reduced.model)
    assert [node.op_type for node in small.proto.graph.node] == ["If"]
    assert (reduced.nodes, reduced.nodes_before) == (6, 8)
    weights = [tensor for graph in all_graphs(small.proto.graph) for tensor in graph.initializer]
    assert {tensor.name for tensor in weights} == {"w", "bias"}
    assert all(onnx.numpy_helper.to_array(tensor).max() < 1 for tensor in weights)


def test_dynamic_dimensions_have_the_given_shapes(tmp_path):
    text = "g (float[n,4] x) => (float[n,4] y) { t = Relu(x) y = Tanh(t) }"
    model = with_shapes(parsed(text), {"x": [3, 4]})
    reduced = reduce_model(model, Picky("Relu", "Tanh"), BuildOptions(), tmp_path, seconds=MANY)
    assert load_model(reduced.model).shape("x") == (3, 4)
