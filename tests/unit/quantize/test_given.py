"""Ranges read from TensorRT's calibration caches and from JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdqspec.errors import DataError
from qdqspec.qdq.quantize.calibrate import given_ranges, read_ranges
from qdqspec.qdq.quantize.ranges import TensorRange

HEADER = "TRT-100001-EntropyCalibration2"
names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12)
sizes = st.floats(0, 2.0**90, width=32)


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "calibration.cache"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, sizes, max_size=6))
def test_ranges_of_a_cache_and_of_json_are_equal(tmp_path: Path, scales: dict[str, float]):
    lines = [f"{name}: {struct.pack('!f', scale).hex()}" for name, scale in scales.items()]
    found = read_ranges(written(tmp_path, "\n".join([HEADER, *lines])))
    assert {name: span.high for name, span in found.items()} == pytest.approx(
        {name: 127 * scale for name, scale in scales.items()}
    )
    again = read_ranges(written(tmp_path, json.dumps({n: [s.low, s.high] for n, s in found.items()})))
    assert again == found


def test_ranges_are_read_from_json(tmp_path: Path):
    found = read_ranges(written(tmp_path, '{"a": 6, "b": [-1.5, 3.0], "c": [1, 2]}'))
    assert found == {"a": TensorRange(-6, 6), "b": TensorRange(-1.5, 3), "c": TensorRange(0, 2)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TRT-\na: 3c010a14", "line 1 is no header"),
        (f"{HEADER}\na: 3c010a1", "line 2 is not 'tensor: 3c010a14': 'a: 3c010a1'"),
        (f"{HEADER}\na: 7fc00000", "line 2: nan is no largest magnitude"),
        ("[1]", "it is no table of tensors"),
        ('{"a": "six"}', "'a': 'six' is no number"),
        ('{"a": [2, 1]}', "'a': 2 is above 1"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        ("", "cannot be read"),
    ],
)
def test_invalid_values_are_an_error_with_their_place(tmp_path: Path, text: str | bytes, message: str):
    path = written(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        read_ranges(path)
    assert caught.value.where == str(path)
    assert caught.value.cure


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda end: f"{HEADER}\na: ".encode() + end))
def test_reading_any_bytes_returns_ranges_or_raises_one_error(tmp_path: Path, data: bytes):
    found: dict[str, TensorRange] = {}
    refused: DataError | None = None
    try:
        found = read_ranges(written(tmp_path, data))
    except DataError as error:
        refused = error
    assert refused is None or (refused.cure and "\n" not in refused.what)
    assert all(isinstance(span, TensorRange) for span in found.values())


def test_tensors_without_a_range_are_noted_and_an_unrelated_or_missing_file_is_an_error(tmp_path: Path):
    notes: list[str] = []
    path = written(tmp_path, '{"a": 1, "other": 2}')
    assert given_ranges(path, {"a", "b", "c"}, "m.onnx", notes.append) == {"a": TensorRange(-1, 1)}
    assert notes == ["calibration.cache has no scale for these, so they stay in floating point: b, c"]
    with pytest.raises(DataError, match=r"has a scale for no tensor of m\.onnx"):
        given_ranges(path, {"b"}, "m.onnx", notes.append)
    for other, said in (
        (tmp_path / "missing", "cannot be read: No such file"),
        (tmp_path, "this is no file"),
    ):
        with pytest.raises(DataError, match=said):
            read_ranges(other)
