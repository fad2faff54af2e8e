"""JSON of other sources: plain data, or a ``ValueError`` with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec._core.plain_json import TooLargeError, parse_json, read_json

BAD = {
    '{"a": 1, "b": 2, "a": 3}': "the key 'a' occurs twice",
    "[NaN]": "NaN is no number",
    '{"a": -Infinity}': "-Infinity is no number",
    "[1e999]": "the number 1e999 is too large",
    '"\\ud800"': "a text in it is no Unicode",
    "[" * 100_000: "it nests too deep",
    "9" * 5000: "limit",
    "": "Expecting value",
    b'"\xff"': "not UTF-8",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: str(text[:20]) or "nothing")
def test_ambiguous_or_invalid_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=BAD[text]):
        parse_json(text if isinstance(text, bytes) else text.encode())


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_json(b'"\\ud83d\\ude00"') == "\U0001f600"


def test_a_file_above_the_size_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1, 2]")
    assert read_json(tmp_path / "a.json", most_bytes=6) == [1, 2]
    with pytest.raises(TooLargeError, match="it has 6 bytes, and at most 5"):
        read_json(tmp_path / "a.json", most_bytes=5)


def test_a_deeply_nested_file_is_refused() -> None:
    with pytest.raises(TooLargeError, match="more than 5,000,000 parts"):
        parse_json(b"[" + b"[]," * 5_000_001 + b"[]]")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)  # fmt: skip
def test_values_are_equal_after_writing_and_reading(value: object) -> None:
    assert parse_json(json.dumps(value).encode()) == value
