"""The encoding of integers that are not the nearest ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from qdqspec.qdq.quantizer import packed, unpacked


@given(seed=st.integers(0, 99))
def test_rounding_is_equal_after_encoding_as_text(seed: int) -> None:
    random = np.random.default_rng(seed)
    nearest = random.integers(-60, 60, (3, 4)).astype(np.int8)
    integers = (nearest + random.integers(-3, 4, (3, 4))).astype(np.int8)
    steps = unpacked(packed(integers - nearest), np.dtype(np.int8), nearest.size)
    np.testing.assert_array_equal(nearest + steps.reshape(nearest.shape), integers)
