"""Matrix expansion: the rules of GitHub Actions, and stable ids of cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.spec.fields import is_id
from qdqspec.spec.matrix import MatrixError, case_id, combinations, named_combinations


def test_the_example_of_github_actions() -> None:
    # https://docs.github.com/actions "Example: Expanding configurations" with other axes: fruit is quant,
    # animal is weights, color is calibration, shape is preset.
    choices = combinations(
        {"quant": ["apple", "pear"], "weights": ["cat", "dog"]},
        include=[
            {"calibration": "green"},
            {"calibration": "pink", "weights": "cat"},
            {"quant": "apple", "preset": "circle"},
            {"quant": "banana"},
            {"quant": "banana", "weights": "cat"},
        ],
    )
    assert [tuple(choice.values()) for choice in choices] == [
        ("apple", "pink", "cat", "circle"),
        ("apple", "green", "dog", "circle"),
        ("pear", "pink", "cat"),
        ("pear", "green", "dog"),
        ("banana",),
        ("banana", "cat"),
    ]


@pytest.mark.parametrize(
    ("axes", "exclude", "include", "why"),
    [
        ({"batch": range(1, 258)}, [], [], "more than 256"),
        ({"batch": range(1, 5000)}, [{"batch": 1}], [], "more than 4,096 combinations"),
        ({"batch": [1, 2]}, [], [{"batch": 3}, {"batch": 3}], "'b3'"),
    ],
)
def test_an_invalid_matrix_is_an_error(axes: dict, exclude: list, include: list, why: str) -> None:
    with pytest.raises(MatrixError, match=why):
        named_combinations(combinations(axes, exclude, include))


QUANT = st.sampled_from(["int8", "uint8", "int16"])
BATCH = st.integers(1, 6)
CHOICE = st.fixed_dictionaries({}, optional={"quant": QUANT, "batch": BATCH}).filter(bool)


@given(
    st.fixed_dictionaries({"quant": st.lists(QUANT, min_size=1, unique=True)}).flatmap(
        lambda axes: st.lists(BATCH, min_size=1, unique=True).map(lambda batch: {**axes, "batch": batch})
    ),
    st.lists(CHOICE, max_size=3),
    st.lists(CHOICE, max_size=3),
)
def test_original_combinations_are_kept_and_excluded_ones_are_not_added(
    axes: dict, exclude: list, include: list
) -> None:
    choices = combinations(axes, exclude, include)
    originals = [{"quant": q, "batch": b} for q in axes["quant"] for b in axes["batch"]]
    kept = [o for o in originals if not any(e.items() <= o.items() for e in exclude)]
    assert list(choices[: len(kept)]) == kept
    assert all(choice in include for choice in choices[len(kept) :])
    assert all(is_id(case_id(choice)) for choice in choices)
