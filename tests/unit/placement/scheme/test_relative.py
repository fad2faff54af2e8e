"""Schemes as values: equality, digest, distance, text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.errors import PlacementError
from qdqspec.qdq.scheme.relative import PatternPlace, RelativeSite, Scheme, parse_scheme, scheme

KINDS = ("in", "out", "result")
PLACES = st.builds(PatternPlace, st.sampled_from(KINDS), st.integers(0, 40), st.integers(0, 4))
SITES = st.builds(
    RelativeSite,
    place=PLACES,
    format=st.sampled_from(("int8", "uint8", "int32")),
    axis=st.integers(-1, 3),
    weight=st.booleans(),
)
SCHEMES = st.frozensets(SITES, max_size=6).map(scheme)


def site(place: tuple[str, int, int], fmt: str = "uint8") -> RelativeSite:
    return RelativeSite(place=PatternPlace(*place), format=fmt)


def test_the_text_of_a_scheme() -> None:
    weight = RelativeSite(place=PatternPlace("in", 0, 1), format="int8", axis=0, weight=True)
    made = scheme([weight, site(("out", 2, 0)), site(("in", 0, 0))])
    assert str(made) == "in0.0=uint8 in0.1=w:int8/0 out2.0=uint8"


@given(SCHEMES)
def test_a_scheme_is_parsed_from_its_text_unchanged(made: Scheme) -> None:
    assert parse_scheme(str(made)) == made
    assert parse_scheme(str(made)).digest == made.digest


@given(SCHEMES, SCHEMES, SCHEMES)
def test_distance_is_a_metric(a: Scheme, b: Scheme, c: Scheme) -> None:
    assert a.distance(b) == b.distance(a)
    assert (a.distance(b) == 0) == (a == b)
    assert a.distance(c) <= a.distance(b) + b.distance(c)


@pytest.mark.parametrize(
    "text", ["in0=uint8", "in0.0", "at0.0=uint8", "in0.0=U8", "in0.0=uint8/", "in-1.0=uint8"]
)
def test_text_that_is_no_site_is_an_error(text: str) -> None:
    with pytest.raises(PlacementError, match="is not a site") as caught:
        parse_scheme(f"in0.0=uint8 {text}")
    assert f"'{text}'" in str(caught.value)


@given(st.text(max_size=40))
def test_parsing_any_text_returns_a_scheme_or_raises_one_error(text: str) -> None:
    try:
        made = parse_scheme(text)
    except PlacementError:
        return
    assert parse_scheme(str(made)) == made
