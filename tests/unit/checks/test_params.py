"""Parameters of checks: values that are parsed, and values that are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from qdqspec.testing.records import params_of


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("latency", {"max_ms": float("inf")}, "finite"),
        ("latency", {"max_ms": {"onnxrutime-cpu": 3}}, r"no backend, .*\(did you mean 'onnxruntime'\?\)"),
        ("latency", {"max_ms": {"any": {"p101": 3}}}, "'p101' is no percentile"),
        ("parity", {"min_sqnr_db": "25"}, "valid number"),
        ("placement", {}, "nothing to check"),
        ("survival", {"through": []}, "nothing to check"),
        ("accuracy", {"min": 97}, "top1 is a share, and 97 of it is no valid limit: write 97% or 0.97"),
        ("parity", {}, "nothing to check"),
        ("parity", {"runtime": {"outputs": ["x"]}}, "Extra inputs"),
        ("parity", {"min_agreement": 1, "search": 9}, "nothing to search for"),
        ("parity", {"min_cosine": 1, "search": {"values": {"x": [1, 0]}}}, "no range"),
        ("accuracy", {"min": "high%"}, "not a percentage"),
        ("placement", {"require": {"Conv": "many"}}, "a number of nodes, or 'all'"),
        ("placement", {"min_pairs": 3, "max_pairs": 2}, "min_pairs 3 is above max_pairs 2"),
        ("survival", {"through": ["onnxruntime"]}, "^1 validation error"),
        ("survival", {"through": ["onnxslim", "onnxslim"]}, "onnxslim: named twice"),
        ("lint", {"target": ["tensorrt-9"]}, "unknown lint target 'tensorrt-9'"),
        ("lint", {"target": "tensorrt-11", "ignore": ["zero points"]}, "should match pattern"),
        ("size", {"max_bytes": "1e999MiB"}, "is not a size such as 4MiB"),
        ("partition", {}, "nothing to check"),
        ("regression", {"max": "-1%"}, "max"),
    ],
)
def test_checks_without_a_limit_or_with_an_impossible_one_are_refused(
    kind: str, values: dict, words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        params_of(kind, **values)


def test_percentages_and_sizes_are_parsed() -> None:
    assert params_of("accuracy", max_drop="1%").max_drop == pytest.approx(0.01)
    assert params_of("size", max_bytes="4MiB").max_bytes == 4 * 2**20


def test_checks_with_equal_limits_share_a_search() -> None:
    def key(search: object, **words: object) -> str:
        return params_of("parity", max_abs=1, search=search, **words).evidence_key  # type: ignore[attr-defined]

    assert key(30) == key({"examples": 30}) == key(30, id="mine", severity="warn")
    assert key(30) != key({"examples": 30, "values": {"x": [0, 1]}})
