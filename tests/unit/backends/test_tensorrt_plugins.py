"""Ranges of activations in models with operators that only a TensorRT plugin implements."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqspec.app.session import Session
from qdqspec.errors import DataError
from qdqspec.qdq.scheme.scheme_file import read_scheme
from qdqspec.types import Case, Inputs, TuneRules

pytestmark = pytest.mark.usefixtures("engine_threads", "hasty")
Install = Callable[[str], None]
SHAPE = (1, 16, 12, 12)
ACTIVATIONS = ("x", "a", "b", "d")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Conv, an operator of domain ``plugins``, Conv, Relu, Conv: large enough that integer kernels are faster."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "conv0", pads=[1, 1, 1, 1]),
        helper.make_node("SoftCap", ["a"], ["b"], "cap", domain="plugins", plugin_version="1"),
        helper.make_node("Conv", ["b", "w1"], ["c"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"], "relu"),
        helper.make_node("Conv", ["d", "w2"], ["y"], "conv2", pads=[1, 1, 1, 1]),
    ]
    weights = [
        numpy_helper.from_array(random.normal(0, 0.2, (16, 16, 3, 3)).astype(np.float32), f"w{i}")
        for i in range(3)
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE)] for name in "xy"]
    graph = helper.make_graph(nodes, "capped", *ends, weights)
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("plugins", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "capped.onnx")
    np.savez(tmp_path / "data.npz", x=random.normal(size=(3, *SHAPE[1:])).astype(np.float32))
    inputs = Inputs(calibration=tmp_path / "data.npz")
    return Case(id="default", model=tmp_path / "capped.onnx", inputs=inputs, tune=TuneRules(trials=2))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A plugin library of the fake TensorRT: a Python module with the function that the operator computes."""
    body = [helper.make_node("Tanh", ["v"], ["w"])]
    function = helper.make_function("plugins", "SoftCap", ["v"], ["w"], body, [helper.make_opsetid("", 19)])
    path = tmp_path / "softcap.so"
    path.write_bytes(b"\0getCreators\0" + function.SerializeToString())
    return path


def test_ranges_are_calibrated_on_tensorrt_itself(
    case: Case, library: Path, tmp_path: Path, install_tensorrt: Install
):
    install_tensorrt("11.4.0.106")
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


def test_a_calibration_cache_needs_no_run(
    case: Case, library: Path, tmp_path: Path, install_tensorrt: Install, monkeypatch: pytest.MonkeyPatch
):
    install_tensorrt("10.16.1.11")
    monkeypatch.setattr(
        "qdqspec.app.preparation.prepare.open_observer", lambda *_, **__: pytest.fail("nothing has to be run")
    )
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


def test_a_cache_of_another_model_is_an_error(case: Case, tmp_path: Path):
    cache = tmp_path / "calibration.cache"
    cache.write_text("TRT-8601-EntropyCalibration2\nother: 3c010a14\n")
    told = replace(case, inputs=replace(case.inputs, scales=cache))
    with (
        Session(backend="fake", root=tmp_path) as session,
        pytest.raises(DataError, match=r"has a scale for no tensor of .*capped\.onnx"),
    ):
        session.tune(told)


def test_another_calibration_cache_is_another_search(case: Case, tmp_path: Path):
    cache = tmp_path / "calibration.cache"
    told = replace(case, inputs=replace(case.inputs, scales=cache))
    keys = set()
    for bits in ("3c010a14", "3c010a15"):
        cache.write_text(f"TRT-8601-EntropyCalibration2\nx: {bits}\n")
        with Session(backend="fake", root=tmp_path) as session:
            keys.add(session.work(told).prepared.key)
    with Session(backend="fake", root=tmp_path) as session:
        keys.add(session.work(case).prepared.key)
    assert len(keys) == 3
