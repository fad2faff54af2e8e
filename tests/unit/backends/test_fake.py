"""The simulated device: its times, noise, drift, failures and outputs."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from onnx_text import kernels, saved

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.errors import BackendError
from tests.support.stand_ins import true_ms

QUIET = {"run_noise": "0", "wall_noise": "0", "build_noise": "0"}

# Two convolutions with an activation between them; pairs are around the first.
FIRST_IN_INTEGERS = """chain (float[1,8,16,16] x) => (float[1,8,16,16] out)
<float s = {0.1}, uint8 z = {128}, float ws = {0.01}, int8 wz = {0}> {
  xq = QuantizeLinear(x, s, z)
  xd = DequantizeLinear(xq, s, z)
  wq = QuantizeLinear(w, ws, wz)
  wd = DequantizeLinear(wq, ws, wz)
  a = Conv<pads=[1,1,1,1]>(xd, wd)
  r = Relu(a)
  rq = QuantizeLinear(r, s, z)
  rd = DequantizeLinear(rq, s, z)
  out = Conv<pads=[1,1,1,1]>(rd, v)
}"""


def build(path: Path, device: FakeDevice | None = None, **extra: str) -> FakeEngine:
    words = {f"fake.{key}": value for key, value in extra.items()}
    engine = (device or FakeDevice()).build(path, BuildOptions(extra=words))
    engine.bind({name: np.zeros(1) for name in engine._inputs})
    return engine


def test_times_of_layers_add_up_to_the_configured_time(models: Path) -> None:
    path = models / "squeezenet10.onnx"
    layers = build(path, **QUIET).layers()
    assert math.fsum(layer.milliseconds for layer in layers) == pytest.approx(true_ms(path))
    assert build(path, **QUIET).time(2).cpu_ms == pytest.approx([true_ms(path)] * 2)


def test_an_integer_convolution_fuses_the_pairs_around_it(tmp_path: Path) -> None:
    weights = kernels(2, 8, 8, 3, 3)
    path = saved(tmp_path / "chain.onnx", FIRST_IN_INTEGERS, opset=13, w=weights["w0"], v=weights["w1"])
    layers = build(path).layers()
    kinds = [(layer.op_type, layer.integer, layer.boundary) for layer in layers]
    assert kinds == [
        ("QuantizeLinear", False, True),  # the graph's input, which no integer kernel writes
        ("QLinearConv", True, False),
        ("DequantizeLinear", False, True),  # read by a float kernel
        ("Conv", False, False),
    ]
    assert [layer.tensors for layer in layers if layer.boundary] == [("x",), ("r",)]


def test_noise_and_drift_have_the_configured_size(models: Path) -> None:
    path, device = models / "squeezenet10.onnx", FakeDevice()
    runs = build(path, device, run_noise="0.05", wall_noise="0.2").time(800)
    assert statistics.stdev(map(math.log, runs.cpu_ms)) == pytest.approx(0.05, rel=0.15)
    assert all(wall >= cpu for wall, cpu in zip(runs.wall_ms, runs.cpu_ms, strict=True))
    first, second = (build(path, device, drift="0.3", drift_period="20", **QUIET) for _ in range(2))
    series = [engine.time(1).cpu_ms[0] for _ in range(2000) for engine in (first, second)]
    assert max(series) / min(series) == pytest.approx(math.exp(0.6), rel=0.05)
    pairs = zip(series[::2], series[1::2], strict=True)
    assert max(abs(math.log(b / a)) for a, b in pairs) < 0.01, "it is common to all engines of a device"


def test_the_error_for_an_operator_that_the_reference_implementation_lacks_suggests_another_backend(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path / "foo.onnx", "g (float[1,4] x) => (float[1,4] y) { y = plugins.Foo(x) }")
    engine = FakeDevice().build(path, BuildOptions())
    with pytest.raises(BackendError, match=r"lacks an operator: .*'Foo'") as caught:
        engine.run({"x": np.zeros((1, 4), np.float32)})
    assert "such as onnxruntime" in str(caught.value)


def test_a_dequantized_constant_node_builds(tmp_path: Path) -> None:
    """A Constant node has no input after which the conversion could be named."""
    text = """g (float[2] x) => (float[2] y) {
        q = Constant<value = int8[2] {3, -4}>()  s = Constant<value = float {0.5}>()
        d = DequantizeLinear(q, s)  y = Sub(x, d) }"""
    layers = build(saved(tmp_path / "stored.onnx", text)).layers()
    assert ("q",) in {layer.tensors for layer in layers}


def test_a_failure_of_the_reference_implementation_is_one_of_the_build(tmp_path: Path) -> None:
    """It cannot stack the results of a Loop that never runs."""
    text = """net (float[2] x) => (float[2] y, float[n,2] all) {
      none = Constant <value_int = 0> ()  yes = Constant <value = bool {1}> ()
      y, all = Loop (none, yes, x) <body = step (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] u) {
        d = Identity(c)  t = Identity(s)  u = Identity(s) }> }"""
    engine = build(saved(tmp_path / "loop.onnx", text, opset=17, ir_version=8))
    with pytest.raises(
        BackendError, match="reference implementation, which this device computes with, failed"
    ):
        engine.run({"x": np.zeros(2, np.float32)})
