"""All kernel times of a profile are attributed to ONNX nodes or tensors, on real models, float and quantized."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import example, given, strategies as st
from onnx_text import kernels, saved
from random_models import random_inputs

from qdqspec.backends._source import Origin
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.backends.onnxruntime.layers import KernelEvent, layer_times, without_overhead
from qdqspec.graph.model import Model
from qdqspec.graph.ops import QDQ_OPS
from qdqspec.types import LayerTime

REAL = ("digits_resnet", "squeezenet10", "ultraface_rfb320")
HEAVY = ("Conv", "Gemm", "MatMul")


@pytest.fixture(autouse=True)
def _tools_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantizer of ONNX Runtime sets a module search path once per process, which tests that run pytest reset."""
    monkeypatch.syspath_prepend(Path(onnxruntime.__file__).parent / "transformers")


def quantize_everything(source: Path, target: Path) -> Path:
    """Every operator quantized by ONNX Runtime's own tool, from one random sample."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class OneSample(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples = iter([random_inputs(Model(onnx.load(source)))])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.samples, None)

    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(source, target, OneSample(), quant_format=QuantFormat.QDQ, per_channel=True, **types)
    return target


def layers_of(path: Path) -> tuple[Model, tuple[LayerTime, ...]]:
    model = Model(onnx.load(path))
    engine = OnnxRuntime().build(path, BuildOptions())
    engine.bind(random_inputs(model))
    layers = engine.layers(2)
    engine.close()
    return model, layers


def check_attribution(model: Model, layers: tuple[LayerTime, ...]) -> None:
    owners = Counter(node for layer in layers for node in layer.nodes)
    assert set(owners) <= {n.name for n in model.nodes if n.op_type not in QDQ_OPS}
    assert not [node for node, kernels in owners.items() if kernels > 1]
    assert {n.name for n in model.nodes if n.op_type in HEAVY} <= set(owners)
    for layer in layers:
        assert layer.nodes or (layer.boundary and layer.tensors), layer
        assert not (layer.boundary and layer.integer)


@pytest.mark.parametrize("name", REAL)
def test_kernels_of_float_models_are_attributed(models: Path, name: str) -> None:
    model, layers = layers_of(models / f"{name}.onnx")
    check_attribution(model, layers)
    assert not any(layer.integer for layer in layers)
    if name == "digits_resnet":  # a convolution in blocked layout keeps the name of its output
        block = next(x for x in layers if "/layer1/layer1.0/conv2/Conv" in x.nodes)
        assert set(block.nodes) == {f"/layer1/layer1.0/{n}" for n in ("conv2/Conv", "Add", "Relu_1")}


@pytest.mark.parametrize("name", REAL)
def test_kernels_of_quantized_models_are_attributed(tmp_path: Path, models: Path, name: str) -> None:
    model, layers = layers_of(quantize_everything(models / f"{name}.onnx", tmp_path / "quantized.onnx"))
    check_attribution(model, layers)
    convolutions = {n.name for n in model.nodes if n.op_type == "Conv"}
    assert convolutions == {n for x in layers if x.integer for n in x.nodes} & convolutions


@pytest.mark.parametrize("bias", ["", "[bias] y = Add(z, b)"], ids=["no bias", "a bias that is added"])
def test_a_fused_activation_function_between_blocked_convolutions_has_its_nodes(
    tmp_path: Path, bias: str
) -> None:
    """No input or output of that kernel has a name of the model: both convolutions use the blocked layout."""
    text = f"""g (float[1, 16, 8, 8] x) => (float[1, 16, 4, 4] y)
          <float root = {{1.4142135}}, float one = {{1.0}}, float half = {{0.5}}> {{
          [before] c = Conv(x, w0)
          [div] d = Div(c, root)  [erf] e = Erf(d)  [add] a = Add(e, one)  [mul] m = Mul(c, a)  [last] g = Mul(m, half)
          [after] {"z" if bias else "y"} = Conv(g, w1)
          {bias}
        }}"""
    added = {"b": np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)} if bias else {}
    model, layers = layers_of(saved(tmp_path / "net.onnx", text, **kernels(2, 16, 16, 3, 3), **added))
    check_attribution(model, layers)
    nodes = {layer.nodes for layer in layers if not layer.boundary}
    last = ("after", "bias") if bias else ("after",)
    assert nodes == {("before",), ("div", "erf", "add", "mul", "last"), last}
    assert {layer.op_type for layer in layers if layer.boundary} <= {"ReorderInput", "ReorderOutput"}


def test_kernels_of_an_inlined_function_belong_to_its_node(tmp_path: Path) -> None:
    """ONNX Runtime computes a Mish by kernels without names of the model: most of its time is a Softplus."""
    text = """g (float[1, 16, 8, 8] x) => (float[1, 16, 4, 4] y)
      { [before] c = Conv(x, w0)  [mish] m = Mish(c)  [after] y = Conv(m, w1) }"""
    _, layers = layers_of(saved(tmp_path / "net.onnx", text, opset=18, **kernels(2, 16, 16, 3, 3)))
    assert {layer.op_type for layer in layers if layer.boundary} <= {"ReorderInput", "ReorderOutput"}
    assert {layer.nodes for layer in layers if layer.op_type == "Softplus"} == {("mish",)}


def test_times_add_up_to_the_latency_without_outliers() -> None:
    nodes = [onnx.helper.make_node("Conv", ["x"], ["y"], "a"), onnx.helper.make_node("Relu", ["y"], ["z"])]
    graph = Model(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [])))
    origins = [Origin((n,), ()) for n in ("a", "b")]
    small = KernelEvent("Relu_7", "Relu", 10, "float")
    events = [e for took in [30] * 9 + [3000] for e in (KernelEvent("a", "Conv", took, "uint8"), small)]
    layers = layer_times(graph, origins, events, runs=10, total_ms=2.0)
    assert [layer.milliseconds for layer in layers] == pytest.approx([1.5, 0.5])
    assert [layer.integer for layer in layers] == [True, False]


def test_the_time_of_the_profiler_in_each_execution_is_subtracted() -> None:
    """A large kernel took 10 microseconds, three executions of a small one 2; the profiler added 2 to each."""
    found = without_overhead([12.0, 8.0, 2.0], [1, 3, 1], [False] * 3, 12.0)
    assert found == pytest.approx([10.0, 2.0, 0.0])
    owners = [True, False, False, False]  # an operator with a body has the overhead of the kernels inside too
    assert without_overhead([500.0, 30.0, 20.0], [1] * 3, owners[:3], 60.0) == pytest.approx([10, 30, 20])
    assert without_overhead([500.0, 31.0, 21.0, 1.0], [1] * 4, owners, 50.0) == pytest.approx([0, 30, 20, 0])


@given(
    kernels=st.lists(
        st.tuples(st.floats(0, 1e4), st.integers(1, 50), st.booleans()), min_size=1, max_size=12
    ),
    total=st.floats(1e-3, 1e6),
)
@example(kernels=[(1.0, 1, False), (1.5693380361473761e-121, 41, False)], total=0.5)  # below zero once
@example(kernels=[(5e-324, 1, False)], total=1.0)  # a factor beyond all numbers once
def test_times_without_overhead_add_up_to_the_total_and_keep_their_order(
    kernels: list[tuple[float, int, bool]], total: float
) -> None:
    times, executed, owners = zip(*kernels, strict=True)
    found = without_overhead(times, executed, owners, total)
    assert all(one >= 0 for one in found)
    assert sum(found) == pytest.approx(total if any(found) else 0.0)
    rates = sorted(
        (time / number, after / number)
        for time, after, number, owner in zip(times, found, executed, owners, strict=True)
        if not owner
    )
    after = [rate for _, rate in rates]
    assert after == pytest.approx(sorted(after))


BRANCHES = """g (float[64,64] x, bool c) => (float[64,64] y) {
    h = Relu(x)
    [choice] y = If(c) <
        then_branch = t () => (float[64,64] a) { [mm] m = MatMul(h, h) [act] a = Sigmoid(m) },
        else_branch = e () => (float[64,64] a) { [act] a = Neg(h) }
    >
    }"""
LOOP = """g (float[64,64] x) => (float[64,64] y)
    <int64 three = {3}, bool yes = {1}> {
    [loop] y = Loop(three, yes, x) <
        body = turn (int64 i, bool go_on, float[64,64] state) => (bool goes_on, float[64,64] next) {
            goes_on = Identity(go_on)
            [mm] next = MatMul(state, state)
        }
    >
    }"""


@pytest.mark.parametrize(
    ("text", "timed"),
    [
        (BRANCHES, {"choice/then_branch/mm", "choice/then_branch/act", "choice"}),
        (LOOP, {"loop", "loop/body/mm"}),
    ],
)
def test_kernels_in_bodies_have_separate_times(text: str, timed: set[str], tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", text)
    feeds = {"x": np.ones((64, 64), np.float32), "c": np.array(True)}
    engine = OnnxRuntime().build(path, BuildOptions(threads=1))
    engine.bind({value.name: feeds[value.name] for value in onnx.load(path).graph.input})
    layers = {name: layer for layer in engine.layers(runs=4) for name in layer.nodes}
    assert timed <= layers.keys()
    assert "choice/else_branch/act" not in layers
    assert all(layer.milliseconds >= 0 for layer in layers.values())
