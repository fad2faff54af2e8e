from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from qdqspec.errors import DataError
from qdqspec.parity.data import open_data
from qdqspec.parity.metrics import accuracy
from qdqspec.parity.shapes import InputSpec

SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.0, 0.1, 0.9]], np.float32)


def test_top1_of_a_real_model_on_held_out_images(models: Path) -> None:
    inputs = {"input": InputSpec(dtype=np.dtype(np.float32), shape=(60, 1, 16, 16))}
    data = open_data(models.parent / "data" / "digits_evaluation.npz", inputs)
    session = onnxruntime.InferenceSession(models / "digits_resnet.onnx")
    outputs = ({"logits": session.run(None, feed)[0]} for feed in data)
    assert accuracy("top1", outputs, data.require_labels()) == pytest.approx(534 / 540)


def test_top1_counts_over_batches_of_any_size() -> None:
    batches = [{"y": SCORES[:2]}, {"y": SCORES[2:]}]
    assert accuracy("top1", batches, np.array([1, 1, 2])) == pytest.approx(2 / 3)


def test_top5_accepts_the_five_highest() -> None:
    scores = np.arange(10, dtype=np.float32)[None]
    assert accuracy("top5", [{"y": scores}], np.array([5])) == 1
    assert accuracy("top5", [{"y": scores}], np.array([4])) == 0


def test_trailing_axes_of_one_are_no_obstacle() -> None:
    assert accuracy("top1", [{"y": SCORES[:, :, None, None]}], np.array([1, 0, 2])) == 1


def test_an_output_can_be_named() -> None:
    batch = {"other": SCORES[:, ::-1], "y": SCORES}
    assert accuracy("top1", [batch], np.array([1, 0, 2]), output="y") == 1
    assert accuracy("top1", [batch], np.array([1, 2, 0])) == 1


def test_a_model_that_gives_nan_is_never_right() -> None:
    scores = np.full((2, 3), np.nan, np.float32)
    scores[1, 0] = 9
    assert accuracy("top1", [{"y": scores}], np.array([0, 0])) == 0


def test_equal_scores_do_not_make_every_class_right() -> None:
    flat = np.zeros((3, 3), np.float32)
    assert accuracy("top1", [{"y": flat}], np.array([0, 1, 2])) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("metric", "labels", "output", "problem"),
    [
        ("top-1", [1, 0, 2], None, r"unknown metric 'top-1' \(did you mean 'top1'\?\)"),
        ("top1", [1, 0, 2], "logit", "no output 'logit'"),
        ("top1", [1, 0], None, "more outputs than the 2 labels"),
        ("top1", [1, 0, 2, 2], None, "3 outputs for 4 labels"),
        ("top1", [1, 0, 3], None, "label 3 is no class of a model with 3 scores"),
        ("top1", [1, -1, 0], None, "label -1 is no class"),
        ("top1", [0.5, 1, 2], None, "labels are float64 of shape"),
        ("top1", [[1, 0, 2]], None, r"labels are int64 of shape \[1, 3\]"),
        ("top1", [], None, "labels are float64"),
    ],
)
def test_what_cannot_be_scored_is_said(
    metric: str, labels: list[object], output: str | None, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        accuracy(metric, [{"y": SCORES}], np.array(labels), output=output)


def test_no_sample_is_an_error() -> None:
    with pytest.raises(DataError, match="0 outputs for 0 labels"):
        accuracy("top1", [], np.array([], np.int64))
