"""Parameters of checks: values that are parsed, and values that are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from qdqspec._core.registry import names
from qdqspec.testing.records import params_of


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("latency", {}, "Field required"),
        ("latency", {"max_ms": 0}, "greater than 0"),
        ("latency", {"max_ms": {"tensorrt": -1}}, "greater than 0"),
        ("latency", {"max_ms": float("inf")}, "finite"),
        ("latency", {"max_ms": {}}, "at least 1 item"),
        ("latency", {"max_ms": {"onnxrutime-cpu": 3}}, r"no backend, .*\(did you mean 'onnxruntime'\?\)"),
        ("latency", {"max_ms": {"any": {"p101": 3}}}, "'p101' is no percentile"),
        ("latency", {"max_ms": {"any": {"p50": 3, "tensorrt": 3}}}, "'tensorrt' is no percentile"),
        ("latency", {"max_ms": {"any": {}}}, "at least 1 item"),
        ("latency", {"max_ms": 1, "percentile": 101}, "less than or equal to 100"),
        ("latency", {"max_ms": True}, "valid number"),
        ("latency", {"max_ms": 1, "percentile": "99"}, "valid number"),
        ("latency", {"max_ms": 1, "profile": True}, "valid integer"),
        ("speedup", {"min": 0}, "greater than 0"),
        ("speedup", {"min": "1.3"}, "valid number"),
        ("speedup", {"min": True}, "valid number"),
        ("parity", {"min_sqnr_db": "25"}, "valid number"),
        ("parity", {"top_k": True, "min_cosine": 1}, "valid integer"),
        ("accuracy", {"max_drop": True}, "valid number"),
        ("accuracy", {"min": 97}, "top1 is a share, and 97 of it is no valid limit: write 97% or 0.97"),
        ("accuracy", {"metric": "top5", "max_drop": 1}, "top5 is a share, .* write 1% or 0.01"),
        ("accuracy", {"metric": "miou", "min": 1.01}, "miou is a share"),
        ("placement", {"max_pairs": True}, "valid integer"),
        ("placement", {"require": {"Conv": True}}, "valid integer"),
        ("size", {"max_bytes": True}, "valid integer"),
        ("lint", {"target": "tensorrt-11", "strict": 1}, "valid boolean"),
        ("parity", {}, "nothing to check"),
        ("parity", {"outputs": ["x"]}, "nothing to check"),
        ("parity", {"min_cosine": 2}, "less than or equal to 1"),
        ("parity", {"max_steps": -1}, "greater than or equal to 0"),
        ("parity", {"top_k": 5}, "nothing to check"),
        ("parity", {"top_k": 0, "min_cosine": 1}, "greater than or equal to 1"),
        ("parity", {"min_agreement": "101%"}, "less than or equal to 1"),
        ("parity", {"runtime": {}}, "nothing to check"),
        ("parity", {"runtime": {"outputs": ["x"]}}, "Extra inputs"),
        ("parity", {"min_agreement": 1, "search": 9}, "nothing to search for"),
        ("parity", {"min_slice_sqnr_db": 20, "search": 9}, "nothing to search for"),
        ("parity", {"min_cosine": 1, "search": 0}, "greater than or equal to 1"),
        ("parity", {"min_cosine": 1, "search": True}, "valid dictionary"),
        ("parity", {"min_cosine": 1, "search": {"seconds": 0}}, "greater than 0"),
        ("parity", {"min_cosine": 1, "search": {"beyond": 0.5}}, "greater than or equal to 1"),
        ("parity", {"min_cosine": 1, "search": {"example": 9}}, "Extra inputs"),
        ("parity", {"min_cosine": 1, "search": {"values": {"x": [1, 0]}}}, "no range"),
        ("accuracy", {"metric": "top1"}, "nothing to check"),
        ("accuracy", {"max_drop": "-1%"}, "greater than or equal to 0"),
        ("accuracy", {"min": "high%"}, "not a percentage"),
        ("placement", {}, "nothing to check"),
        ("placement", {"require": []}, "nothing to check"),
        ("placement", {"require": [""]}, "at least 1 character"),
        ("placement", {"require": {"Conv": 0}}, "greater than or equal to 1"),
        ("placement", {"require": {"Conv": "many"}}, "a number of nodes, or 'all'"),
        ("placement", {"require": [{"": 1}]}, "at least 1 character"),
        ("placement", {"require": [3]}, "valid string"),
        ("placement", {"min_pairs": 3, "max_pairs": 2}, "min_pairs 3 is above max_pairs 2"),
        ("survival", {}, "Field required"),
        ("survival", {"through": []}, "nothing to check"),
        ("survival", {"through": ["onnxruntime"]}, "^1 validation error"),
        ("survival", {"through": ["onnxslim", "onnxslim"]}, "onnxslim: named twice"),
        ("lint", {}, "Field required"),
        ("lint", {"target": []}, "at least 1 item"),
        ("lint", {"target": ["tensorrt-9"]}, "unknown lint target 'tensorrt-9'"),
        ("lint", {"target": "tensorrt-11", "ignore": ["zero points"]}, "should match pattern"),
        ("size", {}, "nothing to check"),
        ("size", {"max_bytes": "0KiB"}, "greater than 0"),
        ("size", {"max_bytes": "4 apples"}, "not a size"),
    ],
)
def test_checks_without_a_limit_or_with_an_impossible_one_are_refused(
    kind: str, values: dict, words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        params_of(kind, **values)


def test_a_budget_of_one_number_applies_to_any_target() -> None:
    assert params_of("latency", max_ms=3).max_ms == params_of("latency", max_ms={"any": 3}).max_ms


def test_percentages_and_sizes_are_parsed() -> None:
    assert params_of("accuracy", max_drop="1%").max_drop == pytest.approx(0.01)
    assert params_of("size", max_bytes="4MiB").max_bytes == 4 * 2**20


@pytest.mark.parametrize("text", ["1e999MiB", "nanMiB", "four MiB", "4"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="is not a size such as 4MiB"):
        params_of("size", max_bytes=text)


def test_the_kind_of_parameters_cannot_be_another_one() -> None:
    with pytest.raises(ValidationError, match="kind"):
        type(params_of("speedup", min=1)).model_validate({"kind": "latency", "min": 1})


def test_checks_import_no_slow_module() -> None:
    code = (
        "import sys; from qdqspec._core.registry import names, resolve\n"
        "for name in names('check'): resolve('check', name)\n"
        "print(sorted({'numpy', 'onnx', 'onnxruntime', 'tabulate'} & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
    assert {"latency", "speedup", "parity", "accuracy", "placement", "size"} <= set(names("check"))


def test_a_search_of_one_number_is_its_number_of_examples() -> None:
    short, long = (params_of("parity", max_abs=1, search=search) for search in (30, {"examples": 30}))
    assert short == long
    assert short.evidence_key == long.evidence_key
    other = params_of("parity", max_abs=1, search={"examples": 30, "values": {"x": [0, 1]}}, id="mine")
    assert other.evidence_key != long.evidence_key
    assert (
        params_of("parity", max_abs=1, search=30, id="mine", severity="warn").evidence_key
        == long.evidence_key
    )
