"""Weights that are also graph inputs, as older exporters write them, so that a caller could replace them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec import Session


def network(ir: int) -> onnx.ModelProto:
    """Conv, BatchNormalization and Relu; all weights are graph inputs."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: {ir}, opset_import: ["": 9]>
        g (float[1, 3, 8, 8] x, float[4, 3, 3, 3] w, float[4] s, float[4] b, float[4] m, float[4] v)
            => (float[1, 4, 6, 6] y) {{
          c = Conv(x, w)  n = BatchNormalization(c, s, b, m, v)  y = Relu(n)
        }}"""
    )
    random = np.random.default_rng(0)
    shapes = {"w": (4, 3, 3, 3), "s": (4,), "b": (4,), "m": (4,), "v": (4,)}
    proto.graph.initializer.extend(
        numpy_helper.from_array(random.uniform(0.5, 1, shape).astype(np.float32), name)
        for name, shape in shapes.items()
    )
    return proto


@pytest.fixture(params=[3, 4, 8])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(network(request.param), path)
    return path


def inputs(proto: onnx.ModelProto) -> list[str]:
    return [value.name for value in proto.graph.input]


@pytest.mark.usefixtures("engine_threads")
def test_candidates_and_reference_have_constant_weights(file: Path, tmp_path: Path) -> None:
    data = {"x": np.random.default_rng(2).random((4, 3, 8, 8), np.float32)}
    with (
        Session(output=tmp_path / "out", no_cache=True) as session,
        session.study(file, trials=1, calibration=data, evaluation=data, min_sqnr_db="none") as study,
    ):
        trial = study.evaluate(study.space.everything())
        assert trial.ok, trial.error
        quantized = onnx.load(study.export(tmp_path / "quantized.onnx", trial.placement))
        assert inputs(quantized) == ["x"]
        reference = onnx.load(study.export(tmp_path / "reference.onnx", study.space.resolve({})))
    assert reference.ir_version < 4 or inputs(reference) == ["x"]
