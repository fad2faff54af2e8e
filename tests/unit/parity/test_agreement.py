"""The share of equal best classes of two outputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qdqspec.accuracy.compare import Agreement, class_axis, in_common
from qdqspec.types import TopK

scores = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(2, 8)), elements=st.floats(-9, 9, width=16)
)


def shares(*pairs: tuple[np.ndarray, np.ndarray], k: int = 1, axis: int | None = None) -> dict[str, float]:
    found = Agreement((TopK(k=k, axis=axis),))
    for reference, tuned in pairs:
        found.add(reference, tuned)
    return found.result()


@given(scores, st.integers(1, 4), st.randoms(use_true_random=False))
def test_sets_of_the_best_are_compared(reference: np.ndarray, k: int, random) -> None:
    tuned = reference[:, random.sample(range(reference.shape[1]), reference.shape[1])]
    expected = 0
    for ours, theirs in zip(reference, tuned, strict=True):
        best = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in (ours, theirs)]
        expected += len({*best[0]} & {*best[1]})
    assert in_common(reference, tuned, k, axis=1) == expected


def test_order_among_the_best_does_not_count_and_k_does() -> None:
    ours, theirs = np.array([[3.0, 2.0, 1.0, 0.0]]), np.array([[2.0, 3.0, 0.0, 1.0]])
    assert shares((ours, theirs)) == {"top1": 0.0}
    assert shares((ours, theirs), k=2) == {"top2": 1.0}
    assert shares((ours, theirs), k=3) == {"top3": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("shape", "top", "axis"),
    [
        ((20, 10), TopK(), 1),
        ((1, 1000, 1, 1), TopK(k=5), 1),  # squeezenet: what follows the classes is empty
        ((4, 128, 30522), TopK(), 2),
        ((4, 21, 64, 64), TopK(axis=1), 1),
        ((4, 21, 64, 64), TopK(axis=-3), 1),
        ((10,), TopK(), 0),
        ((20, 1), TopK(), None),  # the first axis counts samples, never classes
        ((20, 3), TopK(k=3), None),
        ((20, 3), TopK(axis=5), None),
        ((), TopK(), None),
    ],
)
def test_where_classes_lie(shape: tuple[int, ...], top: TopK, axis: int | None) -> None:
    assert class_axis(shape, top) == axis


def test_a_tie_is_won_by_the_earlier_class_so_that_a_constant_output_is_no_agreement() -> None:
    random = np.random.default_rng(0)
    reference = random.normal(size=(200, 10)).astype(np.float32)
    share = shares((reference, np.zeros_like(reference)))["top1"]
    assert share == pytest.approx(0.1, abs=0.06)


def test_nan_is_never_best() -> None:
    ours = np.array([[np.nan, 1.0, 0.0]])
    assert shares((ours, np.array([[np.nan, 2.0, 0.0]]))) == {"top1": 1.0}
