"""The noisiest of many items are found with few measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from qdqspec.accuracy.culprits import noisiest

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


def test_the_noisiest_of_many_items_need_few_measurements() -> None:
    values = dict.fromkeys(range(1000), 1e-6) | {137: 5.0, 900: 3.0, 901: 4.0}
    measured = []

    def measure(items: Sequence[int]) -> float:
        measured.append(items)
        return math.fsum(values[item] for item in items)

    found, _ = noisiest(range(1000), measure, 3)
    assert [item for item, _ in found] == [137, 901, 900]
    assert len(measured) <= 2 * 3 * math.ceil(math.log2(1000))
