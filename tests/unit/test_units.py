from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec.types import Provenance
from qdqspec.units import (
    count_text,
    db_text,
    ms_text,
    ms_texts_apart,
    origin_text,
    percent_text,
    plain,
    seconds_text,
    size_text,
    wrapped,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0663, "0.066"), (1.314, "1.31"), (26.53, "26.5"), (312.4, "312"), (0.00512, "0.0051"), (0, "0.000")],
)
def test_the_text_of_milliseconds(value: float, text: str) -> None:
    assert ms_text(value) == text


@given(st.floats(1e-4, 1e5), st.floats(-1e-3, 1e-3))
def test_texts_of_different_times_differ(value: float, change: float) -> None:
    other = value * (1 + change)
    shown, shown_other = ms_texts_apart(value, other)
    if abs(change) > 1e-5:
        assert shown != shown_other
        assert (float(shown) > float(shown_other)) == (value > other)


@pytest.mark.parametrize(
    ("decibel", "text"), [(31.44, "31.4"), (math.inf, "exact"), (math.nan, "not a number")]
)
def test_the_text_of_decibels(decibel: float, text: str) -> None:
    assert db_text(decibel) == text


def test_the_texts_of_sizes_counts_and_durations() -> None:
    assert size_text(4_990_000) == "4.76 MiB"
    assert size_text(12) == "12 B"
    assert count_text(1, "pair") == "1 pair"
    assert count_text(0, "pair") == "0 pairs"
    texts = {4.21: "4.2 s", 42: "42 s", 185: "3 min 05 s", 7800: "2 h 10 min"}
    assert {seconds: seconds_text(seconds) for seconds in texts} == texts
    rough = {0.2: "0 s", 89: "89 s", 91: "2 min", 5399: "90 min", 7800: "2 h", 200_000: "2 d"}
    assert {seconds: seconds_text(seconds, rough=True) for seconds in rough} == rough
    assert origin_text(Provenance()) == "measured"
    assert origin_text(Provenance(source="cached", age_seconds=7200)) == "cached (2 h)"
    assert percent_text(0.0917) == "+9.2 %"


@given(st.text(), st.integers(8, 60))
def test_any_text_is_converted_to_one_printable_line(text: str, width: int) -> None:
    line = plain(text, width)
    assert len(line) <= width
    assert line.isprintable()
    if text.isprintable() and len(text) <= width:
        assert line == text


def test_long_lines_are_wrapped_between_words():
    text = "warning: trust the ratio of /a/path/longer/than/the/width.onnx\nshort"
    assert wrapped(text, 20) == "warning: trust the\n  ratio of\n  /a/path/longer/than/the/width.onnx\nshort"
    assert wrapped(text, None) == text
