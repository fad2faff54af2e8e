"""Builds of NVIDIA's own parser and compiler, TensorRT for RTX, in child processes; neither needs a GPU.

Backend `tensorrt` parses, adds profiles and loads plugins with the same functions.
"""

from __future__ import annotations

import _ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from installed import require
from onnx_text import saved

from qdqspec.app.session import Session
from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated, IsolatedEngine
from qdqspec.backends.isolation.worker import LOG
from qdqspec.backends.tensorrt.device import DeviceState
from qdqspec.backends.tensorrt_rtx.engine import CAPABILITIES, CURRENT, TensorRtRtx, built_for
from qdqspec.errors import BackendError
from qdqspec.testing.backends import BackendContract, small_model
from qdqspec.types import Case, Inputs, InputShape, ShapeProfile

FEEDS = {"x": np.zeros((1, 3, 8, 8), np.float32)}


@pytest.fixture(scope="module", autouse=True)
def without_gpu() -> Iterator[None]:
    """On every machine, engines are built for the capabilities of ``tensorrt-rtx.for``, and do not run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module")
def rtx() -> Iterator[Isolated]:
    require("tensorrt-rtx")
    with Isolated("tensorrt-rtx", build_timeout=120.0) as backend:
        yield backend


class TestIsolatedTensorRtRtx(BackendContract):
    @pytest.fixture
    def backend(self, rtx: Isolated) -> Backend:
        return rtx


def small(path: Path, *, quantized: bool = False) -> Path:
    onnx.save(small_model(quantized=quantized, activations="int8"), path)
    return path


def opened(backend: Isolated, model: Path, **extra: str) -> closing[IsolatedEngine]:
    return closing(backend.build(model, BuildOptions(extra=words_of(extra), state=model.parent / "state")))


def words_of(extra: dict[str, str]) -> dict[str, str]:
    return {f"tensorrt-rtx.{name.rstrip('_')}": text for name, text in extra.items()}


def refusal(
    backend: Isolated, model: Path, profiles: tuple[ShapeProfile, ...] = (), **extra: str
) -> BackendError:
    with pytest.raises(BackendError) as caught:
        backend.build(model, BuildOptions(profiles=profiles, extra=words_of(extra)))
    assert caught.value.where == str(model)
    assert "\n" not in caught.value.what
    return caught.value


# ---- parsing ------------------------------------------------------------------------------------


def test_every_node_that_the_parser_refuses_is_reported(rtx: Isolated, tmp_path: Path):
    model = saved(
        tmp_path / "m.onnx",
        """g (float[4,4] x) => (float y, float z, float[4,4] w) {
            [first] y = Det(x)
            [caller] z = local.f(x)
            [cap] w = plugins.SoftCap(x)
        }
        <domain: "local", opset_import: ["": 21]> f (a) => (b) { [fine] c = Relu(a) [inner] b = Det(c) }""",
    )
    what = refusal(rtx, model).what
    assert what.startswith("TensorRT refuses 3 nodes of the model: Det 'first': false (UNSUPPORTED_NODE) | ")
    assert "| Det 'inner' in function caller (f): false" in what
    assert "| SoftCap 'cap': creator && " in what
    assert what.endswith("(INVALID_NODE)")


def test_external_weights_are_found(rtx: Isolated, tmp_path: Path):
    """The parser reads the file itself, so that external data and models above 2 GB are possible."""
    plain, apart = small(tmp_path / "plain.onnx"), tmp_path / "apart.onnx"
    onnx.save(small_model(), apart, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with opened(rtx, plain) as first, opened(rtx, apart) as second:
        assert first.graph_hash == second.graph_hash
    (tmp_path / "weights.bin").unlink()
    assert "Failed to import initializer: w (" in refusal(rtx, apart).what


# ---- dynamic shapes -----------------------------------------------------------------------------

DYNAMIC = "g (float[n,3,w] x) => (float[n,3,w] y) { [relu] y = Relu(x) }"


def spans(*shapes: tuple[int, ...]) -> ShapeProfile:
    low, usual, high = shapes
    return ShapeProfile(shapes={"x": InputShape(min=low, opt=usual, max=high)})


RESHAPE = "g (float[2,6] x, int64[2] to) => (float[a,b] y) { [reshape] y = Reshape(x, to) }"
OTHER = "input 'x' is declared with shape {}, but the model has [?, 3, ?]"


@pytest.mark.parametrize(
    ("text", "shape", "what"),
    [
        (DYNAMIC, None, "input 'x' [?, 3, ?] has dynamic dimensions and no shape is given"),
        (DYNAMIC, (1, 4, 8), OTHER.format([1, 4, 8])),
        (DYNAMIC, (1, 3), OTHER.format([1, 3])),
        (RESHAPE, None, "the values of input 'to' decide shapes inside the model"),
    ],
)
def test_a_shape_that_is_missing_or_does_not_fit_is_an_error(
    rtx: Isolated, tmp_path: Path, text: str, shape: tuple[int, ...] | None, what: str
):
    profiles = () if shape is None else (spans(shape, shape, shape),)
    error = refusal(rtx, saved(tmp_path / "m.onnx", text), profiles)
    assert what in error.what
    assert text == RESHAPE or shape or "inputs: {shapes: {x: [?, 3, ?]}}" in str(error.cure)


def test_of_several_shape_profiles_the_kernels_of_one_are_given(rtx: Isolated, tmp_path: Path):
    dynamic = saved(tmp_path / "dynamic.onnx", DYNAMIC)
    profiles = (spans((1, 3, 8), (1, 3, 8), (2, 3, 8)), spans((4, 3, 8), (8, 3, 8), (16, 3, 8)))
    found = []
    for some in (profiles[:1], profiles):
        with closing(rtx.build(dynamic, BuildOptions(profiles=some))) as engine:
            found.append([layer for layer in engine.layers() if layer.nodes == ("relu",)])
    assert [len(layers) for layers in found] == [1, 1]


# ---- engines ------------------------------------------------------------------------------------


def test_the_kernels_of_an_engine_are_those_of_its_model(rtx: Isolated, tmp_path: Path):
    for quantized, integers in ((False, []), (True, ["conv"])):
        with opened(rtx, small(tmp_path / "small.onnx", quantized=quantized)) as engine:
            layers = engine.layers()
        assert {node for layer in layers for node in layer.nodes} >= {"conv", "relu", "pool", "gemm"}
        assert {layer.milliseconds for layer in layers} == {0.0}
        assert [layer.nodes[0] for layer in layers if layer.integer] == integers


def test_a_build_and_its_log_are_recorded(rtx: Isolated, tmp_path: Path):
    model = small(tmp_path / "m.onnx")
    with opened(rtx, model, for_="SM89,sm120") as brief, opened(rtx, model, verbose="on") as whole:
        short, full = ((engine._folder / LOG).read_text() for engine in (brief, whole))
        assert "[TRT] [I] Engine generation completed" in short
        assert "[TRT] [V]" not in short
        assert "[TRT] [V] Layers:" in full
    record = json.loads((tmp_path / "state" / "builds.jsonl").read_text("utf-8").splitlines()[0])
    assert (record["model"], record["for"], record["warnings"]) == ("m.onnx", ["SM89", "SM120"], [])
    assert record["plan_bytes"] > 0
    assert record["graph_hash"]


def test_an_engine_without_a_gpu_does_not_run(rtx: Isolated, tmp_path: Path):
    for ask in (lambda engine: engine.run(FEEDS), lambda engine: engine.time(1)):
        with opened(rtx, small(tmp_path / "m.onnx")) as engine:
            engine.bind(FEEDS)
            with pytest.raises(BackendError, match="does not run here"):
                ask(engine)


# ---- refusals of the compiler -------------------------------------------------------------------

FP8 = """g (float[16,32] x) => (float[16,16] y) <float s = {0.1}, float8e4m3fn z = {0}> {
    q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)
    wq = QuantizeLinear(w, s, z)  wd = DequantizeLinear(wq, s, z)
    [product] y = MatMul(a, wd)
}"""
TWO = FP8.replace("16] y)", "16] y, float[16,16] f)").replace(
    "[product]", "[floating] f = MatMul(x, w) [product]"
)
FLOAT = "g (float[16,32] x) => (float[16,16] y) { [fc] y = MatMul(x, w) }"
CONSTANT = """g (float[4,16] x) => (float[4,16] y) <float s = {0.1}, int8 z = {0}, int8 k = {100}> {
    q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)
    [scalar] v = DequantizeLinear(k, s, z)
    t = Add(a, v)
    tq = QuantizeLinear(t, s, z)  td = DequantizeLinear(tq, s, z)  y = Neg(td)
}"""
WEIGHT = np.linspace(-1, 1, 512, dtype=np.float32).reshape(32, 16)


def test_a_refusal_names_the_capabilities_that_refuse(rtx: Isolated, tmp_path: Path):
    model = saved(tmp_path / "fp8.onnx", FP8, w=WEIGHT)
    error = refusal(rtx, model)
    assert error.what.startswith("TensorRT for RTX refuses the model for SM86: ")
    assert "HW-specific datatypes: fp8_e4m3" in error.what
    assert "SM89" not in error.what
    assert "leave the capability out of tensorrt-rtx.for" in str(error.cure)
    with opened(rtx, model, for_="SM89,SM120") as engine:
        assert any(layer.integer for layer in engine.layers())


@pytest.mark.parametrize(
    ("text", "capabilities", "reasons"),
    [
        pytest.param(
            TWO, "SM75,SM86,SM89", r"for SM75.*: .* ; for SM86.*: (?!.* ; )", id="different reasons"
        ),
        pytest.param(FLOAT, "SM75,SM86", "for SM75 at node 'fc': .*FP32 GEMM is not supported", id="a node"),
        pytest.param(CONSTANT, "SM89", "for SM89 at node 'scalar': ", id="a node without a name in the text"),
    ],
)
def test_capabilities_and_nodes_that_the_compiler_names_are_reported(
    rtx: Isolated, tmp_path: Path, text: str, capabilities: str, reasons: str
):
    weights = {"w": WEIGHT} if "w)" in text else {}
    what = refusal(rtx, saved(tmp_path / "m.onnx", text, **weights), for_=capabilities).what
    assert re.match(f"TensorRT for RTX refuses the model {reasons}", what), what


def test_capabilities_have_the_names_of_the_library():
    require("tensorrt-rtx")
    code = "import tensorrt_rtx; print(*tensorrt_rtx.ComputeCapability.__members__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*CAPABILITIES, CURRENT} <= set(done.stdout.split())


# ---- options ------------------------------------------------------------------------------------


GPU = DeviceState(tensorrt="1.7.1.116", gpu="NVIDIA RTX 4090", capability=(8, 9))
NO_GPU = DeviceState(tensorrt="1.7.1.116", no_gpu="no driver")


@pytest.mark.parametrize(
    ("state", "asked", "targets"),
    [
        (NO_GPU, "", ("SM86", "SM89", "SM120")),
        (NO_GPU, "SM120", ("SM120",)),
        (GPU, "", ()),
        (GPU, "SM86,SM120", ("SM86", "SM120")),
    ],
)
def test_engines_run_on_the_gpu_here_unless_other_gpus_are_named(
    state: DeviceState, asked: str, targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("qdqspec.backends.tensorrt.device._look", lambda *_: state)
    options = BuildOptions(extra={"tensorrt-rtx.for": asked} if asked else {})
    backend = TensorRtRtx()
    assert built_for(options) == targets
    assert backend.capabilities(options).runs == backend.capabilities(options).has_clock == (not targets)
    assert ("built-for" in backend.device(options).key) == bool(targets)


# ---- plugins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "file too short"), (b"\0getCreators\0" * 100, "Unable to load library")]
)
def test_a_library_without_creators_is_loaded_as_one_that_registers_itself_and_no_library_is_reported(
    rtx: Isolated, tmp_path: Path, content: bytes, said: str
):
    """The common kind (``REGISTER_TENSORRT_PLUGIN``)."""
    with opened(rtx, small(tmp_path / "m.onnx"), plugins=_ctypes.__file__) as engine:
        assert engine.graph_hash
    path = tmp_path / "plugin.so"
    path.write_bytes(content)
    what = refusal(rtx, small(tmp_path / "m.onnx"), plugins=str(path)).what
    assert what.startswith(f"the plugin library {path} could not be loaded: ")
    assert said in what


def test_without_the_plugin_library_the_error_states_both_cures(tmp_path: Path):
    require("tensorrt-rtx")
    model = saved(
        tmp_path / "m.onnx",
        """g (float[1,16,12,12] x) => (float[1,16,12,12] y) {
            [conv] a = Conv<pads = [1, 1, 1, 1]>(x, w)
            [cap] y = plugins.SoftCap(a)
        }""",
        w=np.linspace(-1, 1, 16 * 16 * 9, dtype=np.float32).reshape(16, 16, 3, 3),
    )
    np.savez(tmp_path / "data.npz", x=np.ones((2, 16, 12, 12), np.float32))
    case = Case(id="default", model=model, inputs=Inputs(calibration=tmp_path / "data.npz"))
    with Session(backend="tensorrt-rtx", root=tmp_path) as session, pytest.raises(BackendError) as caught:
        session.tune(case)
    said = str(caught.value)
    nor = "nor can tensorrt-rtx with activations for outputs (TensorRT refuses the model: SoftCap 'cap'"
    for part in ("onnxruntime cannot run it", nor, "--qdq-plugin", "inputs.scales"):
        assert part in said
    assert "observer.onnx" not in said


# ---- crashes ------------------------------------------------------------------------------------


def test_a_crash_of_the_compiler_is_a_failed_build_with_its_log(rtx: Isolated, tmp_path: Path):
    text = "g (float[1,2,4,8] x) => (float[1,2,4,8] y) { [att] y = Attention(x, x, x) }"
    crashing = saved(tmp_path / "crash.onnx", text, ir_version=11, opset=23)
    with pytest.raises(BackendError) as caught:
        opened(rtx, crashing)
    assert "was killed by SIGSEGV during 'build'" in caught.value.what
    assert "[TRT] [I] Compiler backend is used during engine build." in caught.value.what
    with opened(rtx, small(tmp_path / "m.onnx")) as engine:
        assert engine.layers()
