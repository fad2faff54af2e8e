"""The share of equal best classes of two outputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qdqspec.accuracy.compare import class_axis, in_common
from qdqspec.types import TopK

scores = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(2, 8)), elements=st.floats(-9, 9, width=16)
)


@given(scores, st.integers(1, 4), st.randoms(use_true_random=False))
def test_sets_of_the_best_are_compared(reference: np.ndarray, k: int, random) -> None:
    tuned = reference[:, random.sample(range(reference.shape[1]), reference.shape[1])]
    expected = 0
    for ours, theirs in zip(reference, tuned, strict=True):
        best = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in (ours, theirs)]
        expected += len({*best[0]} & {*best[1]})
    assert in_common(reference, tuned, k, axis=1) == expected


@pytest.mark.parametrize(
    ("shape", "top", "axis"),
    [
        ((1, 1000, 1, 1), TopK(k=5), 1),  # squeezenet: what follows the classes is empty
        ((4, 128, 30522), TopK(), 2),
        ((4, 21, 64, 64), TopK(axis=-3), 1),
        ((10,), TopK(), 0),
        ((20, 1), TopK(), None),  # the first axis counts samples, never classes
        ((20, 3), TopK(k=3), None),
        ((), TopK(), None),
    ],
)
def test_where_classes_lie(shape: tuple[int, ...], top: TopK, axis: int | None) -> None:
    assert class_axis(shape, top) == axis


def test_nan_is_never_best() -> None:
    ours, theirs = np.array([[np.nan, 1.0, 0.0]]), np.array([[-1.0, 2.0, 0.0]])
    assert in_common(ours, theirs, 1, axis=1) == 1
