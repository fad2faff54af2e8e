"""Qualcomm's emulator itself: what its library takes silently is an error here, and each lint rule is true of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.onnxruntime_qnn.engine import CHIPS
from qdqspec.errors import BackendError
from qdqspec.graph.model import load_model
from qdqspec.qdq.lint import lint_model
from qdqspec.testing.backends import BackendContract, small_model
from qdqspec.types import InputShape, LayerTime, ShapeProfile

DATA = Path(__file__).parents[2] / "data"
TARGET = "onnxruntime-qnn-htp-emulator"
CHOSEN = BuildOptions(extra={"onnxruntime-qnn.soc": "sc8380xp"})
CONSTANTS = {
    "s": np.float32(12 / 255), "z": np.uint8(128), "zs": np.int8(0), "z16": np.uint16(32768),
    "s16": np.float32(12 / 65535), "sr": np.float32(6 / 255), "z0": np.uint8(0),
    "ws": np.full(4, 1 / 127, np.float32), "wz": np.zeros(4, np.int8),
    "wodd": np.array([0, 3, -3, 5], np.int8), "b": np.zeros(4, np.float32), "low": np.float32(0), "high": np.float32(6),
    "ss": np.float32(1 / 127), "su": np.float32(1 / 255),
    "w": np.random.default_rng(0).integers(-127, 127, (4, 3, 3, 3)).astype(np.int8),
}  # fmt: skip


@pytest.fixture(scope="module")
def emulator() -> Iterator[Isolated]:
    with Isolated("onnxruntime-qnn", build_timeout=120.0) as backend:
        found = backend.probe(CHOSEN)
        if not found.usable:
            pytest.skip(f"{found.why}: {found.install}")
        yield backend


class TestEmulator(BackendContract):
    @pytest.fixture
    def backend(self, emulator: Isolated) -> Backend:
        return emulator

    @pytest.fixture
    def options(self) -> BuildOptions:
        return CHOSEN


def built(emulator: Isolated, path: Path, options: BuildOptions = CHOSEN) -> tuple[LayerTime, ...]:
    model = load_model(path)
    with closing(emulator.build(path, options)) as engine:
        engine.bind({name: np.zeros((1,), np.float32) for name in model.inputs})
        return engine.layers(1)


def in_integers(layers: tuple[LayerTime, ...], op_type: str = "Conv2d") -> tuple[int, int]:
    kernels = [layer for layer in layers if layer.op_type == op_type]
    return sum(layer.integer for layer in kernels), len(kernels)


def saved(
    folder: Path, body: str, inputs: str = "float[1,3,8,8] x", output: str = "float[1,4,8,8] y"
) -> Path:
    read = {*re.findall(r"\w+", body)}
    constants = {name: value for name, value in CONSTANTS.items() if name in read}
    model = parsed(f"net ({inputs}) => ({output}) {{ {body} }}", 21, ir=10, named=True, **constants)
    onnx.save(model.proto, path := folder / "net.onnx")
    return path


IN = "xq = QuantizeLinear(x, s, z)  xd = DequantizeLinear(xq, s, z)  wd = DequantizeLinear<axis = 0>(w, ws, wz)  "
CONV = "c = Conv<pads = [1, 1, 1, 1]>(xd, wd, b)  "
CLIPPED = "yq = QuantizeLinear(r, sr, z0)  y = DequantizeLinear(yq, sr, z0)"
OUT = "yq = QuantizeLinear({0}, s, z)  y = DequantizeLinear(yq, s, z)"


@pytest.mark.parametrize(
    ("body", "rule", "kernels"),
    [
        (IN + CONV + OUT.format("c"), "", (1, 1)),
        (IN + CONV + "r = Clip(c, low, high)  " + CLIPPED, "", (1, 1)),
        (IN + CONV + "y = Relu(c)", "QNN003", (0, 1)),
        (IN + CONV + OUT.format("c").replace("s, z", "s, zs"), "QNN002", (0, 1)),
        (IN + CONV + OUT.format("c").replace("s, z", "s16, z16"), "QNN002", (0, 1)),
    ],
    ids=["uint8", "with a clip", "no pair after", "int8 after", "uint16 after"],
)
def test_a_convolution_runs_in_integers_unless_a_rule_objects(
    emulator: Isolated, tmp_path: Path, body: str, rule: str, kernels: tuple[int, int]
) -> None:
    path = saved(tmp_path, body)
    assert [found.id for found in lint_model(load_model(path), TARGET)] == ([rule] if rule else [])
    assert in_integers(built(emulator, path)) == kernels


def test_the_bound_of_a_clip_behind_a_pair_is_lost(emulator: Isolated, tmp_path: Path) -> None:
    pair = "cq = QuantizeLinear(c, s, z)  cd = DequantizeLinear(cq, s, z)  "
    path = saved(tmp_path, IN + CONV + pair + "r = Clip(cd, low, high)  " + OUT.format("r"))
    assert [found.id for found in lint_model(load_model(path), TARGET)] == ["QNN005"]
    x = np.random.default_rng(1).uniform(-6, 6, (1, 3, 8, 8)).astype(np.float32)
    with closing(emulator.build(path, CHOSEN)) as engine:
        assert engine.run({"x": x})["y"].min() < -1  # the least value of the Clip is 0


@pytest.mark.parametrize(
    ("numbers", "rules", "least_db"),
    [(("ss", "zs"), ["QNN004"], -100), (("su", "z0"), [], 25)],
    ids=["int8", "uint8"],
)
def test_a_signed_softmax_is_wrong(
    emulator: Isolated, tmp_path: Path, numbers: tuple[str, str], rules: list[str], least_db: float
) -> None:
    scale, zero = numbers
    body = f"p = Softmax<axis = 1>(x)  q = QuantizeLinear(p, {scale}, {zero})  y = DequantizeLinear(q, {scale}, {zero})"
    given = "zs" if zero == "zs" else "z"
    quantized = f"xq = QuantizeLinear(x0, s, {given})  x = DequantizeLinear(xq, s, {given})  " + body
    path = saved(tmp_path, quantized, "float[1,16] x0", "float[1,16] y")
    assert [found.id for found in lint_model(load_model(path), TARGET)] == rules
    x = np.random.default_rng(1).normal(0, 2, (1, 16)).astype(np.float32)
    exact = np.exp(x) / np.exp(x).sum()
    with closing(emulator.build(path, CHOSEN)) as engine:
        noise = engine.run({"x0": x})["y"] - exact
    sqnr = 10 * np.log10(np.square(exact).sum() / np.square(noise).sum())
    assert sqnr > least_db
    assert rules == [] or sqnr < 10


def test_signed_weights_with_zero_points_do_not_build(emulator: Isolated, tmp_path: Path) -> None:
    path = saved(tmp_path, (IN + CONV + OUT.format("c")).replace("wz)", "wodd)"))
    assert [found.id for found in lint_model(load_model(path), TARGET)] == ["QNN007"]
    with pytest.raises(BackendError, match="QNN could not build the model"):
        emulator.build(path, CHOSEN)


def test_an_open_shape_is_refused_and_not_left_to_the_cpu(emulator: Isolated) -> None:
    path = DATA / "qdq_modelopt_digits_resnet.onnx"
    assert "QNN001" in {found.id for found in lint_model(load_model(path), TARGET)}
    with pytest.raises(BackendError, match="no fixed size"):
        emulator.build(path, CHOSEN)


@pytest.mark.parametrize("size", [None, -1])
def test_a_dimension_without_a_name_gets_the_size_of_the_profile(
    emulator: Isolated, tmp_path: Path, size: int | None
) -> None:
    """Exporters write such dimensions, also as -1, and QNN would leave all nodes to the CPU."""
    path = saved(tmp_path, IN + CONV + OUT.format("c"))
    model = onnx.load(path)
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    dim.Clear()
    if size is not None:
        dim.dim_value = size
    onnx.save(model, path)
    assert [found.id for found in lint_model(load_model(path), TARGET)] == ["QNN001"]
    profile = ShapeProfile(shapes={"x": InputShape.of((1, 3, 8, 8))})
    layers = built(emulator, path, replace(CHOSEN, profiles=(profile,)))
    assert in_integers(layers) == (1, 1)


@pytest.mark.parametrize(("io", "on_npu"), [("cpu", []), ("npu", ["Dequantize", "Quantize"])])
def test_pairs_of_inputs_and_outputs_run_where_io_says_and_refused_nodes_on_the_cpu(
    emulator: Isolated, tmp_path: Path, io: str, on_npu: list[str]
) -> None:
    options = replace(CHOSEN, extra={**CHOSEN.extra, "onnxruntime-qnn.io": io})
    layers = built(emulator, saved(tmp_path, IN + CONV + OUT.format("c")), options)
    assert sorted(layer.op_type for layer in layers if "uantize" in layer.op_type) == on_npu
    pair = "cq = QuantizeLinear(c, s, z)  cd = DequantizeLinear(cq, s, z)  "
    layers = built(emulator, saved(tmp_path, IN + CONV + pair + "y = Hardmax(cd)"))
    assert [layer.op_type for layer in layers if layer.place == "cpu"] == ["Hardmax"]


def test_times_are_refused(emulator: Isolated, tmp_path: Path) -> None:
    onnx.save(small_model(quantized=False), path := tmp_path / "small.onnx")
    with closing(emulator.build(path, CHOSEN)) as engine:
        engine.bind({"x": np.zeros((1, 3, 8, 8), np.float32)})
        with pytest.raises(BackendError, match="not a latency"):
            engine.time(3)


def test_one_process_emulates_one_architecture(emulator: Isolated, tmp_path: Path) -> None:
    """Sessions of two architectures in one process fail when they run, and are silently computed by the CPU."""
    onnx.save(small_model(quantized=True), path := tmp_path / "small.onnx")
    other = next(name for name, chip in CHIPS.items() if chip.arch == 68)
    code = (
        "from pathlib import Path; from dataclasses import replace\n"
        "from qdqspec.backends.base import BuildOptions, backend_named\n"
        "backend, options = backend_named('onnxruntime-qnn'), BuildOptions(extra={'onnxruntime-qnn.soc': 'sc8380xp'})\n"
        f"first = backend.build(Path({str(path)!r}), options)\n"
        f"backend.build(Path({str(path)!r}), replace(options, extra={{'onnxruntime-qnn.soc': {other!r}}}))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "emulates one architecture" in done.stderr
    with closing(emulator.build(path, CHOSEN)):  # in processes of their own
        emulator.build(path, replace(CHOSEN, extra={"onnxruntime-qnn.soc": other})).close()
