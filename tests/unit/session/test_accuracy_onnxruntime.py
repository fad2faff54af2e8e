"""A search on ONNX Runtime with a task metric as constraint: the written model meets it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from arrays import arrays_of
from onnx import numpy_helper
from simulated_times import simulate_times

from qdqspec.app.session import Session
from qdqspec.types import AccuracyRules, Case, Inputs, InputShape, QuantizeRules, ShapeProfile, TuneRules

SPREAD = 1e4  # ratio of the largest to the smallest channel of a scaled layer
SCALED = (
    "layer1.0",
    "layer1.1",
    "layer2.1",
)  # residual blocks whose inner tensor is hard to quantize
BATCH = 20


@pytest.fixture
def model(models: Path, tmp_path: Path) -> Path:
    """The digits classifier with scaled channels of a few inner tensors, whose scaling is undone in the next layer.

    Its outputs are unchanged, since Relu commutes with scaling, but a per-tensor scale loses the small
    channels. The scaling is the inverse of cross-layer equalization (Nagel et al. 2019).
    """
    proto = onnx.load(models / "digits_resnet.onnx")
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = {node.name: node for node in proto.graph.node}
    for block in SCALED:
        first, second = (nodes[f"/{block.split('.')[0]}/{block}/conv{number}/Conv"] for number in (1, 2))
        count = weights[first.input[1]].dims[0]
        factors = np.random.default_rng(0).permutation(np.geomspace(1, SPREAD, count)).astype(np.float32)
        _scale(weights[first.input[1]], factors.reshape(-1, 1, 1, 1))
        _scale(weights[first.input[2]], factors)
        _scale(weights[second.input[1]], 1 / factors.reshape(1, -1, 1, 1))
    path = tmp_path / "digits.onnx"
    onnx.save(proto, path)
    return path


def _scale(tensor: onnx.TensorProto, factors: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * factors, tensor.name))


def top1(path: Path, data: Path) -> float:
    """The share of images that a model file classifies correctly, computed without the package."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    arrays = arrays_of(data)
    images, labels = arrays["input"], arrays["labels"]
    logits = [
        session.run(None, {"input": images[start : start + BATCH]})[0]
        for start in range(0, len(images), BATCH)
    ]
    return float((np.concatenate(logits).argmax(axis=1) == labels).mean())


def test_the_selected_model_meets_the_metric_that_full_quantization_misses(
    models: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_times(monkeypatch)
    evaluation = models.parent / "data" / "digits_evaluation.npz"
    reference = top1(model, evaluation)
    assert reference == pytest.approx(top1(models / "digits_resnet.onnx", evaluation), abs=0.01)
    shape = (BATCH, 1, 16, 16)
    case = Case(
        id="default",
        model=model,
        inputs=Inputs(
            profiles=(ShapeProfile(shapes={"input": InputShape(min=shape, opt=shape, max=shape)}),),
            calibration=models.parent / "data" / "digits_calibration.npz",
            evaluation=evaluation,
        ),
        quantize=QuantizeRules(corrections="none"),  # equalization would undo the scaling
        tune=TuneRules(trials=14, accuracy=AccuracyRules(metric="top1", max_drop=0.01)),
    )
    least = reference - 0.01
    with Session(root=tmp_path, output=Path("out"), layout="") as session:
        with session.study(case) as study:
            everything = study.space.resolve(study.space.everything())
            assert top1(study.export(tmp_path / "everything.onnx", everything), evaluation) < 0.5
        result = session.search(case)
    refused = [trial for trial in result.trials if trial.accuracy is not None and trial.accuracy < least]
    assert not any(trial.incumbent for trial in refused)
    assert result.winner != everything
    assert result.accuracy is not None
    assert result.accuracy.least == pytest.approx(least)
    shipped = top1(tmp_path / "out" / "tuned.onnx", evaluation)
    assert shipped == pytest.approx(result.accuracy.selected)
    assert shipped >= least
