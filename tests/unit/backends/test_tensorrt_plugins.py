"""Ranges of activations in models with operators that only a TensorRT plugin implements."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graph_text import kernels, saved
from onnx import helper

from qdqspec.app.preparation import prepare
from qdqspec.app.session import Session
from qdqspec.qdq.scheme.scheme_file import read_scheme
from qdqspec.types import Case, Inputs, TuneRules

pytestmark = pytest.mark.usefixtures("engine_threads", "hasty")
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


def test_ranges_are_calibrated_on_tensorrt_itself(case: Case, library: Path, tmp_path: Path, newest: None):
    with Session(backend="tensorrt", root=tmp_path, plugin=(library,)) as session:
        prepared = session.work(case).prepared
        assert [unit.id for unit in prepared.candidates.units] == ["conv0", "conv1", "conv2"]
        found = session.tune(case).record.cases[0].evidence
        ranges = prepared.numbers._ranges
    assert found.search is not None
    assert found.search.failed == 0
    assert not found.search.unchanged
    assert ranges.keys() == set(ACTIVATIONS)
    assert ranges["b"].high == pytest.approx(1, abs=0.01), "the output of a Tanh"
    (note,) = [warning for warning in found.warnings if "calibrated on" in warning]
    assert note.startswith("calibrated on tensorrt itself, since onnxruntime cannot run the model: ")
    assert "plugins:SoftCap" in note


def test_another_calibration_cache_is_another_search(case: Case, tmp_path: Path):
    cache = tmp_path / "calibration.cache"
    keys = set()
    for bits in ("3c010a14", "3c010a15", ""):
        cache.write_text(f"TRT-8601-EntropyCalibration2\nx: {bits}\n")
        told = replace(case, inputs=replace(case.inputs, scales=cache)) if bits else case
        with Session(backend="fake", root=tmp_path) as session:
            keys.add(session.work(told).prepared.key)
    assert len(keys) == 3


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
    assert found.search is not None
    assert not found.search.unchanged
    pairs = read_scheme(tmp_path / "reports" / "scheme.json").pairs
    placed = {pair.site.tensor: pair.scale for pair in pairs if not pair.site.weight}
    assert placed
    assert placed == {tensor: (pytest.approx(scales[tensor]),) for tensor in placed}
    assert "d" not in placed
    assert any("no scale for these, so they stay in floating point: d" in w for w in found.warnings)
