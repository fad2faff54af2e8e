"""The items with the most noise are found by measuring groups."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.app.evidence.parity import noisiest

powers = st.lists(st.floats(0, 1e6), max_size=60)


@given(powers.filter(bool), st.integers(1, 60))
def test_the_noisiest_items_are_sorted_and_the_rest_is_that_of_the_others(
    values: list[float], wanted: int
) -> None:
    found, rest = noisiest(range(len(values)), lambda items: math.fsum(values[i] for i in items), wanted)
    assert len({item for item, _ in found}) == len(found)
    assert all(power == pytest.approx(values[item]) for item, power in found)
    powers = [power for _, power in found]
    assert powers == pytest.approx(sorted(values, reverse=True)[:wanted])
    assert math.fsum(powers) + rest == pytest.approx(math.fsum(values))
