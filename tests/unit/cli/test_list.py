"""``qdqspec list``."""

from __future__ import annotations

import pytest

SPEC = """\
qdqspec: 1
model: m.onnx
title: Door camera
tags: [vision]
matrix: {quant: [int8], batch: [1, 8]}
tune: {trials: 12}
checks:
  - {kind: speedup, min: 1.1}
  - {kind: parity, min_sqnr_db: 25, severity: warn}
"""


@pytest.fixture
def specs(tmp_path):
    (tmp_path / "specs" / ".hidden").mkdir(parents=True)
    (tmp_path / "specs" / "a.qdq.yaml").write_text(SPEC)
    (tmp_path / "specs" / ".hidden" / "b.qdq.yaml").write_text(SPEC)
    (tmp_path / "specs" / "other.yaml").write_text("a: 1\n")
    return tmp_path / "specs"


@pytest.mark.parametrize("where", [[], ["specs", "specs/a.qdq.yaml"]])
def test_cases_are_listed_with_their_checks(verb, specs, where):
    result = verb("list", *where)
    assert result.code == 0
    assert result.out == (
        "specs/a.qdq.yaml::int8-b1  Door camera\n  speedup: {min: 1.1}\n  parity: {min_sqnr_db: 25.0}\n"
        "specs/a.qdq.yaml::int8-b8  Door camera\n  speedup: {min: 1.1}\n  parity: {min_sqnr_db: 25.0}\n"
    )


def test_json_has_cases_and_checks(verb, specs):
    found = verb("list", "specs", "--json").json
    case = found["cases"][1]
    assert (case["id"], case["model"]) == ("specs/a.qdq.yaml::int8-b8", "specs/m.onnx")
    assert (case["tags"], case["tune"]["trials"]) == (["vision"], 12)
    assert case["checks"][1] == {
        "id": "parity", "kind": "parity", "severity": "warn", "line": 9,
        "params": {"min_sqnr_db": 25.0, "severity": "warn"},
    }  # fmt: skip


def test_the_other_specs_are_listed_beside_a_wrong_one(verb, specs):
    (specs / "c.qdq.yaml").write_text("qdqspec: 1\nmodel: m.onnx\nchecks: [{kind: speedupp}]\n")
    result = verb("list", "specs", "--json")
    assert result.code == 2
    assert len(result.json["cases"]) == 2
    assert "specs/c.qdq.yaml:3:17: unknown check kind 'speedupp'" in result.err
