from __future__ import annotations

import math

import numpy as np
import pytest

from qdqspec.accuracy.metrics import evaluate
from qdqspec.errors import DataError

SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.0, 0.1, 0.9]], np.float32)


def test_top1_gives_the_correct_samples_of_all_batches_at_the_first_output() -> None:
    batches = [{"y": part, "other": part[:, ::-1]} for part in (SCORES[:2], SCORES[2:])]
    found = evaluate("top1", batches, np.array([1, 1, 2]))
    assert (found.value, found.samples) == (pytest.approx(2 / 3), 3)
    assert found.right is not None
    assert found.right.tolist() == [True, False, True]


RISING = np.arange(10, dtype=np.float32)[None]
MISSING = np.where(np.arange(6).reshape(2, 3) == 3, np.float32(9), np.float32(np.nan))
TOKENS = np.array([[[3, 1], [1, 3]], [[3, 1], [3, 1]]], np.float32)


@pytest.mark.parametrize(
    ("metric", "batch", "labels", "value"),
    [
        ("top1", {"other": SCORES[:, ::-1], "y": SCORES}, [1, 0, 2], 1),  # the named output
        ("top5", {"y": RISING}, [5], 1),
        ("top5", {"y": RISING}, [4], 0),
        ("top1", {"y": SCORES[:, :, None, None]}, [1, 0, 2], 1),
        ("top1", {"y": MISSING}, [0, 0], 0),  # NaN is wrong
        ("top1", {"y": TOKENS}, [[0, 0], [0, -100]], 2 / 3),  # of the labels that are not negative
        ("top1", {"y": TOKENS}, [[0, 0], [-100, -100]], 1 / 2),
    ],
)
def test_top_k_accepts_the_k_highest(metric: str, batch: dict, labels: list, value: float) -> None:
    batches = ({name: scores[i : i + 1] for name, scores in batch.items()} for i in range(len(labels)))
    assert evaluate(metric, batches, np.array(labels), output="y").value == pytest.approx(value)


def test_labels_of_tokens_may_have_several_lengths() -> None:
    labels = np.empty(2, dtype=object)
    labels[0], labels[1] = np.array([0, 0]), np.array([1])
    feeds = [{"y": TOKENS[:1]}, {"y": TOKENS[1:, :1]}]
    assert evaluate("top1", feeds, labels).value == pytest.approx(1 / 3)
    with pytest.raises(DataError, match=r"labels of one batch have shapes \[1\] and \[2\]"):
        evaluate("top1", [{"y": TOKENS}], labels)


@pytest.mark.parametrize(
    ("metric", "labels", "output", "problem"),
    [
        ("top1", [1, 0, 2], "logit", "no output 'logit'"),
        ("top1", [1, 0], None, "3 outputs for 2 labels"),
        ("top1", [1, 0, 2, 2], None, "3 outputs for 4 labels"),
        ("top1", [1, 0, 3], None, "label 3 is no class of a model with 3 scores"),
        ("top1", [1, -1, 0], None, "label -1 is no class"),
        ("top1", [0.5, 1, 2], None, "labels are float64 of shape"),
        ("top1", [[1], [0], [2]], None, r"scores for places \[3\], and the labels have \[3, 1\]"),
        ("top1", [], None, "labels are float64"),
        ("top1", [1, 0], "z", r"the output has values of shape \[2, 2\] for each sample"),
        ("miou", [0, 1, 2], None, "not class numbers of pixels"),
    ],
)
def test_outputs_that_cannot_be_scored_are_reported(
    metric: str, labels: list[object], output: str | None, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        evaluate(metric, [{"y": SCORES, "z": TOKENS}], np.array(labels), output=output)


@pytest.mark.parametrize(
    ("labels", "predicted", "classes", "value"),
    [
        # class 0: intersection 2, union 3; class 1: 1 and 2; class 2 is in neither map
        ([[[0, 0], [1, 1]]], [[[0, 0], [0, 1]]], 3, (2 / 3 + 1 / 2) / 2),
        ([[[0, 255], [-1, 1]]], [[[0, 1], [0, 1]]], 2, 1),
        ([[[255]]], [[[0]]], 2, math.nan),
    ],
    ids=["worked example", "void pixels", "void pixels only"],
)
def test_mean_iou(labels: list, predicted: list, classes: int, value: float) -> None:
    scores = np.moveaxis(np.eye(classes, dtype=np.float32)[np.array(predicted)], -1, 1)
    found = evaluate("miou", [{"y": scores}], np.array(labels)).value
    assert found == pytest.approx(value, nan_ok=True)


def own(metric, labels=(1, 0, 2), **words):
    batches = [{"y": SCORES[:2], "z": np.zeros((2, 4))}, {"y": SCORES[2:], "z": np.zeros((1, 5))}]
    return evaluate("mine", batches, np.array(labels), own={"mine": metric}, **words)


def test_a_user_metric_receives_all_outputs_and_labels_at_once() -> None:
    seen: dict = {}

    def metric(outputs, labels):
        seen.update(outputs, labels=labels)
        return float((outputs["y"].argmax(axis=1) == labels).mean())

    found = own(metric)
    assert (found.value, found.right) == (1, None)
    assert seen["y"].shape == (3, 3)
    assert seen["labels"].tolist() == [1, 0, 2]
    # shapes differ between feeds: not concatenated
    assert [part.shape for part in seen["z"]] == [(2, 4), (1, 5)]
    assert own(lambda outputs, _: len(outputs), output="y").value == 1  # the named one only


def writes(_, labels) -> float:
    labels[0] = 9
    return 1.0


def test_an_error_of_a_user_metric_is_reported_with_its_place() -> None:
    with pytest.raises(DataError, match="metric 'mine' raised KeyError: 'logits'") as caught:
        own(lambda outputs, labels: outputs["logits"])
    assert __file__ in str(caught.value.where)
    assert "outputs by name (y [3, 3], z 2 arrays, the first [2, 4]) and labels [3]" in (
        caught.value.cure or ""
    )
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (writes, "metric 'mine' raised ValueError: assignment destination"),
        (lambda *_: None, "metric 'mine' gave None, and one number is wanted"),
        (lambda *_: "good", "metric 'mine' gave 'good'"),
        (lambda *_: np.ones(2), r"metric 'mine' gave an array of shape \[2\]"),
    ],
)
def test_a_user_metric_must_return_one_number_and_not_write_to_the_labels(metric, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        own(metric)
