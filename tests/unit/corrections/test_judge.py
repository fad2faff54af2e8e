"""Errors of placements on calibration samples, by the power of signal and noise."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from qdqspec.accuracy.corrections.judge import Errors, powers_at
from qdqspec.accuracy.gate import MOST_DB

A, B = ("a", None), ("b", None)


def test_powers_are_sums_of_squares_where_the_reference_is_finite() -> None:
    reference = {A: np.array([1.0, 2.0, np.inf], np.float32), B: np.array([3, 4])}
    seen = {A: np.array([1.0, 2.5, 0.0], np.float32), B: np.array([0, 0])}
    assert powers_at([A, B], reference, seen).tolist() == [[5.0, 0.25], [1.0, 0.0]]


@pytest.mark.parametrize("seen", [np.ones((1, 2, 4), np.float32), np.full((1, 3, 4), np.nan, np.float32)])
def test_values_that_cannot_be_compared_have_infinite_noise(seen: np.ndarray) -> None:
    """A decoder's loop ends by its data: with quantized weights its output may have another length."""
    powers = powers_at([A], {A: np.ones((1, 3, 4), np.float32)}, {A: seen})
    assert powers.tolist() == [[12.0, np.inf]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = Errors(np.stack([powers, [[12.0, 0.012]]]))
        assert errors.total_db == -MOST_DB
        assert errors.gain_db(errors) == 0.0
