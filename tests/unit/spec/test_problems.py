"""Error messages of specs: complete texts, and carets at the right column of any line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec import load_spec
from qdqspec.errors import SpecError
from qdqspec.spec.problems import Problem, numbered, source_lines, spec_error

MANY = """\
# a spec with many planted errors
qdqspec: 2
modle: models/a.onnx
title: [not, text]
tags: [ok, ""]
inputs:
  shapes: {x: [8, 3, -224, "224"], y: {min: [2], opt: [1], weigth: 3}}
  calibration: ../../secrets.npz
matrix:
  quant: [int8, fp9, int88]
  bach: [1, 8]
  batch: [1, 1]
patterns:
  allow_file: nowhere.txt
  nodes: {exlude: ["/head/*"]}
regions: {by: manual}
quantize: {calibration: entrophy, weights: !!str per-channel}
tune:
  strategy: atribution
  trials: true
  minutes: 10x
  minutes: 5
checks: []
"""

FEW = """\
qdqspec: 1
model: models/a.onnx
checks:
  - {kind: speedupp, min: 1.2}
  - kind: latency
    max_msec: 1.20
  - {kind: parity, min_sqnr_db: 25, id: "Bad Id"}
  - {min: 3}
skip_unless: {backend: onnxrutime, compute_capability: 8.9}
xfail: {strict: false}
"""


@pytest.mark.parametrize(("name", "text"), [("many", MANY), ("few", FEW)])
def test_the_message_of_an_invalid_spec(
    tmp_path: Path, golden: Callable[[str, str], None], name: str, text: str
) -> None:
    path = tmp_path / "specs" / "door.qdq.yaml"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(path, root=tmp_path)
    golden(f"spec/{name}.txt", f"{caught.value}\n")


def test_the_message_of_a_syntax_error(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    path = tmp_path / "door.qdq.yaml"
    path.write_text("qdqspec: 1\nmodel: a.onnx\nchecks:\n  - {kind: speedup, min: 1.2\ntags: [a]\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path, root=tmp_path)
    golden("spec/syntax.txt", f"{caught.value}\n")


def test_a_long_line_is_truncated_around_the_caret() -> None:
    line = "a" * 500 + "WRONG" + "b" * 500
    shown, carets = numbered([line], 1, 501, width=5)
    assert len(shown) < 110
    assert shown[carets.index("^") :].startswith("WRONGb")
    assert carets.count("^") == 5


@given(st.text(max_size=300), st.integers(1, 310), st.integers(1, 400))
def test_the_caret_is_below_the_reported_column(text: str, column: int, width: int) -> None:
    lines = source_lines(text)
    column = min(column, len(lines[0]) + 1)
    shown, carets = numbered(lines, 1, column, width=width)
    assert len(shown.splitlines()) <= 1
    assert 0 <= carets.index("^") < 120
    if column <= len(lines[0]) and lines[0][column - 1].isprintable() and lines[0][column - 1] != " ":
        assert shown[carets.index("^")] == lines[0][column - 1]


@pytest.mark.parametrize("odd", ["\ud800", "two\nlines", "\x1b[31m", "k" * 900_000])
def test_any_message_is_one_short_printable_line(odd: str) -> None:
    error = spec_error([Problem(line=1, column=1, message=f"bad {odd} end")], [odd], "a.yaml")
    first, *rest = str(error).splitlines()
    assert first.startswith("a.yaml:1:1: bad ")
    assert first.endswith(" end")
    assert len(first) < 250
    assert len(rest) == 2
    assert str(error).replace("\n", "").isprintable()
