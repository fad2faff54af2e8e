"""A fake TensorRT in the backend contract, in child processes, in sessions, and in the hardware tests.

Sessions ask it for fusions of regions before a search, and for ranges of models with plugins.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_text import kernels, saved
from trt_surface import ROOT

from qdqspec.app.preparation import prepare
from qdqspec.app.session import Session
from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.open_engines import has_memory
from qdqspec.backends.tensorrt.engine import TensorRt
from qdqspec.errors import StateError
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.testing.backends import BackendContract
from qdqspec.types import Case, Inputs, RegionRules, TuneRules


class TestTensorRt(BackendContract):
    @pytest.fixture
    def backend(self, tensorrt_version: str) -> Backend:
        backend = TensorRt()
        assert backend.target == f"tensorrt-{tensorrt_version[:2]}"
        return backend


FEEDS = {"x": np.zeros((1, 3, 8, 8), np.float32)}


def test_memory_of_the_gpu_is_reported_and_grows_with_bound_inputs(model: Path, newest: None) -> None:
    with Isolated("tensorrt") as backend:
        engine = backend.build(model, BuildOptions())
        used, free = engine.device_memory()
        assert has_memory([engine], 20)  # half a GiB is added to each for its CUDA context; 40 GiB are free
        assert not has_memory([engine], 100)
        engine.bind(FEEDS)
        more, less = engine.device_memory()
        assert min(more - used, free - less) >= FEEDS["x"].nbytes + 5 * 4
    assert "tensorrt" not in sys.modules, "the parent process can no longer be forked"


def test_notes_of_the_runtime_are_in_record_and_reports(
    newest: None, fail: Callable[[str], None], tmp_path: Path, model: Path, engine_threads: None
):
    """Notes on samples of an engine are in the trial, the record, the footnotes of the table and the HTML page."""
    from qdqspec.app.report.tables import warning_lines
    from qdqspec.app.report.write import render, write_results

    fail("short-of-memory,no-graph,slow-fp4")
    tune = TuneRules(trials=1, min_sqnr_db="none")
    case = Case(id="default", model=model, inputs=Inputs(batch=1), tune=tune)
    with Session(backend="tensorrt", output=tmp_path / "out", cache_dir=tmp_path / "cache") as session:
        result = session.tune(case)
        search = session.work(case).search
        write_results(result.record)
        written = session.output(case) / "result.json"
    for note in (
        "short of GPU memory: the builder skipped",
        "TensorRT warns: FP4 Q/DQ layers, but the hardware does not accelerate FP4",
        "not recorded as a CUDA graph: cudaStreamEndCapture",
    ):
        assert any(each.startswith(note) for each in search.trials[0].samples.notes)
        (warning,) = [w for w in result.record.cases[0].evidence.warnings if note in w]
        assert warning.startswith("latency of reference")
        assert note in written.read_text("utf-8")
        assert any(note in line for line in warning_lines(result.record)), "under the table"
        for name in ("report.html", "report.md"):
            assert note in render(result.record, Path(name)).decode(), name


def run_device_tests(site: Path, *words: str) -> str:
    paths = [str(site), str(ROOT / "tests" / "support" / "fake_trt")] if site.is_dir() else []
    run = [
        sys.executable,
        *["-m", "pytest", "tests/device", "-q", "-p", "no:cacheprovider", "-m"],
        "not slow",
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_hardware_tests_pass_on_the_fake_tensorrt(
    install_tensorrt: Callable[[str], None], tmp_path: Path
):
    install_tensorrt("10.16.1.11")
    parsing = "tests/device/test_tensorrt.py::test_asymmetric_quantization_is_refused_with_the_node"
    said = run_device_tests(tmp_path / "site", "--qdq-backend=tensorrt", f"--deselect={parsing}")
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert all(line.endswith("is declared") for line in skipped), said
    assert "passed" in said


def test_the_hardware_tests_pass_with_the_simulated_trtexec(
    install_trtexec: Callable[..., object], tmp_path: Path
):
    """Tests of the Python API are skipped with a reason; the others run with the tool."""
    install_trtexec("10.16")
    said = run_device_tests(tmp_path / "nothing", "--qdq-backend=trtexec")
    assert "this is about the Python API: pytest tests/device --qdq-backend=tensorrt" in said
    assert "trtexec is not usable" not in said
    assert "passed" in said


# ---- fusions for regions -------------------------------------------------------------------------


PREPARED = pytest.mark.usefixtures("engine_threads", "hasty")
MODEL = "digits_resnet_b1.onnx"


@pytest.fixture
def resnet(models: Path, tmp_path: Path) -> Case:
    proto = onnx.load(models / "digits_resnet.onnx")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(proto, tmp_path / MODEL)
    rules = {"regions": RegionRules(by="fusion"), "tune": TuneRules(trials=2)}
    return Case(id="default", model=tmp_path / MODEL, **rules)


def leaves(session: Session, resnet: Case) -> set[tuple[str, ...]]:
    return {region.nodes for region in session.regions(resnet) if region.type == "LEAF"}


@pytest.mark.parametrize(("can_be_half", "built"), [(True, "half.onnx"), (False, MODEL)])
@PREPARED
def test_fusions_are_read_from_one_build_in_float16_if_that_is_possible(
    resnet: Case, tmp_path: Path, newest: None, monkeypatch: pytest.MonkeyPatch, can_be_half: bool, built: str
):
    from onnxruntime.transformers import float16

    if not can_be_half:
        monkeypatch.setattr(float16, "convert_float_to_float16", lambda *_, **__: 1 / 0)
    with Session(backend="tensorrt", root=tmp_path, layout="") as session:
        found = leaves(session, resnet)
        assert leaves(session, resnet) == found
        warnings = [w for w in session.work(resnet).prepared.warnings if "fusions" in w]
    assert any(len(nodes) > 1 for nodes in found)
    said = "a build of the given model, not of its float16 form: it cannot be"
    assert [said in warning for warning in warnings] == ([] if can_be_half else [True])
    lines = (tmp_path / "reports" / "tensorrt" / "builds.jsonl").read_text().splitlines()
    assert [line["model"] for line in map(json.loads, lines) if "plan_bytes" in line] == [built]


@PREPARED
def test_a_file_of_fusions_replaces_the_build(resnet: Case, tmp_path: Path):
    """The file is one that trtexec exports; the backend is ONNX Runtime, which builds nothing for this."""
    names = [node.name for node in onnx.load(resnet.model).graph.node]
    groups = [names[0:3], names[3:5]]
    metadata = ["\x1e".join(f"[ONNX Layer: {name}]" for name in group) for group in groups]
    layers = [{"Name": f"k{index}", "Metadata": text} for index, text in enumerate(metadata)]
    graph = tmp_path / "engine.graph.json"
    graph.write_text(json.dumps({"Layers": [*layers, "of another model"], "Bindings": []}))
    told = replace(resnet, regions=RegionRules(by="fusion", graph=graph))
    with Session(backend="onnxruntime", root=tmp_path) as session:
        found = leaves(session, told)
        assert {tuple(group) for group in groups} <= found
        assert session.work(told).prepared.fused == tuple(map(tuple, groups))
        key = session.work(told).prepared.key
    graph.write_text(graph.read_text().replace("k0", "k9"))
    with Session(backend="onnxruntime", root=tmp_path) as session:
        assert session.work(told).prepared.key != key, "another file is another search"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be used: it is not JSON"),
        ('{"Layers": ["Conv_0 + Relu_1"]}', "no layer in it names a node of"),
        (None, "it cannot be read: No such file"),
    ],
)
@PREPARED
def test_a_file_of_fusions_of_another_model_or_a_missing_one_is_an_error(
    resnet: Case, tmp_path: Path, text: str | None, said: str
):
    graph = tmp_path / "engine.graph.json"
    if text is not None:
        graph.write_text(text)
    told = replace(resnet, regions=RegionRules(by="fusion", graph=graph))
    session = Session(backend="onnxruntime", root=tmp_path)
    with session, pytest.raises(StateError, match=said) as caught:
        session.regions(told)
    assert caught.value.where == str(graph)
    assert "--exportLayerInfo" in str(caught.value.cure)


# ---- models with operators that only a plugin implements ---------------------------------------------


ACTIVATIONS = ("x", "a", "b", "d")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Conv, an operator of domain ``plugins``, Conv, Relu, Conv: large enough that integer kernels are faster."""
    text = """capped (float[1,16,12,12] x) => (float[1,16,12,12] y) {
        [conv0] a = Conv<pads = [1, 1, 1, 1]>(x, w0)
        [cap] b = plugins.SoftCap<plugin_version = "1">(a)
        [conv1] c = Conv<pads = [1, 1, 1, 1]>(b, w1)
        [relu] d = Relu(c)
        [conv2] y = Conv<pads = [1, 1, 1, 1]>(d, w2)
    }"""
    model = saved(tmp_path / "capped.onnx", text, **kernels(3, 16, 16, 3, 3))
    random = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=random.normal(size=(3, 16, 12, 12)).astype(np.float32))
    inputs = Inputs(calibration=tmp_path / "data.npz")
    return Case(id="default", model=model, inputs=inputs, tune=TuneRules(trials=2))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A plugin library of the fake TensorRT: a Python module with the function that the operator computes."""
    body = [helper.make_node("Tanh", ["v"], ["w"])]
    function = helper.make_function("plugins", "SoftCap", ["v"], ["w"], body, [helper.make_opsetid("", 19)])
    path = tmp_path / "softcap.so"
    path.write_bytes(b"\0getCreators\0" + function.SerializeToString())
    return path


@PREPARED
def test_ranges_are_calibrated_on_tensorrt_itself(case: Case, library: Path, tmp_path: Path, newest: None):
    with Session(backend="tensorrt", root=tmp_path, plugin=(library,)) as session:
        prepared = session.work(case).prepared
        assert [unit.id for unit in prepared.candidates.units] == ["conv0", "conv1", "conv2"]
        found = session.tune(case).record.cases[0].evidence
        ranges = prepared.numbers._ranges
    assert found.search.failed == 0
    assert not found.search.unchanged
    assert found.latency.speedup.low > 1
    assert ranges.keys() == set(ACTIVATIONS)
    assert ranges["b"].high == pytest.approx(1, abs=0.01), "the output of a Tanh"
    (note,) = [warning for warning in found.warnings if "calibrated on" in warning]
    assert note.startswith("calibrated on tensorrt itself, since onnxruntime cannot run the model: ")
    assert "plugins:SoftCap" in note


@PREPARED
def test_a_calibration_cache_needs_no_run(
    case: Case, library: Path, tmp_path: Path, newest: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prepare, "open_observer", lambda *_, **__: pytest.fail("nothing has to be run"))
    scales = {name: (number + 1) / 128 for number, name in enumerate(ACTIVATIONS) if name != "d"}
    lines = [f"{name}: {struct.pack('!f', scale).hex()}" for name, scale in scales.items()]
    cache = tmp_path / "calibration.cache"
    cache.write_text("\n".join(["TRT-8601-EntropyCalibration2", *lines, "(Unnamed Layer* 3): 3c010a14", ""]))
    unlimited = replace(case.tune, min_sqnr_db="none")  # these scales fit no data
    asked = replace(case, inputs=replace(case.inputs, scales=cache), tune=unlimited)
    with Session(backend="tensorrt", root=tmp_path, plugin=(library,), layout="") as session:
        found = session.tune(asked).record.cases[0].evidence
    assert not found.search.unchanged
    pairs = SchemeFile.read(tmp_path / "reports" / "scheme.json").pairs
    placed = {pair.site.tensor: pair.scale for pair in pairs if not pair.site.weight}
    assert placed
    assert placed == {tensor: (pytest.approx(scales[tensor]),) for tensor in placed}
    assert "d" not in placed
    assert any("no scale for these, so they stay in floating point: d" in w for w in found.warnings)
