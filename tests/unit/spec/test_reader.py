"""YAML read as data with positions, and error messages with a caret at the right column."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from qdqspec import load_spec
from qdqspec.errors import SpecError
from qdqspec.spec.problems import Problem, numbered, source_lines, spec_error
from qdqspec.spec.reader import MAX_NODES, Document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("010", 10),
        ("1_000", 1000),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ('"1"', "1"),
        (".inf", math.inf),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_are_read_by_the_rules_of_yaml_1_2(text: str, value: object) -> None:
    document = Document(f"a: {text}\n")
    assert not document.problems
    assert document.data == {"a": value}
    assert type(document.data["a"]) is type(value)


def test_keys_are_read_as_text_and_aliases_as_their_anchor() -> None:
    document = Document("{1: &x [1, 2], on: *x, 2.0: c, null: d}")
    assert document.data == {"1": [1, 2], "on": [1, 2], "2.0": "c", "null": "d"}
    assert not document.problems


def test_keys_of_a_merged_mapping_are_those_not_given() -> None:
    text = "a: &one {x: 1, y: 2}\nb: {y: 3, <<: *one}\nc: {'<<': *one}\n"
    document = Document(text)
    assert not document.problems
    assert document.data["b"] == {"x": 1, "y": 3}
    assert document.data["c"] == {"<<": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a: 1\na: 2\n", 2, 1, "duplicate key 'a'"),
        ("a: !!str 1\n", 1, 4, "explicit tag '!!str'"),
        ("a: !!python/object:os.system []\n", 1, 4, "explicit tag '!!python/object:os.system'"),
        ("a:\nb: 1\n", 1, 1, "'a' has no value"),
        ("a: [1, ~]\n", 1, 8, "a list entry has no value"),
        ("a: 1\n---\nb: 1\n", 2, 1, "a second document begins here"),
        ("a: *b\n", 1, 4, "alias '*b' has no anchor before it"),
        ("? [a]\n: 1\n", 1, 3, "a key is a plain word, not a list, mapping or alias"),
        ("&k a: 1\n", 1, 1, "a key has neither tag nor anchor"),
        ("- a\n", 1, 1, "a spec is a mapping of keys to values"),
        ("", 1, 1, "the file is empty"),
        ("a: 1\nb: 2 # \x00\n", 2, 8, "character U+0000 is not allowed in YAML"),
        ("a: b: c\n", 1, 5, "not valid YAML: mapping values are not allowed here"),
        ("a: [1,\n", 2, 1, "not valid YAML: while parsing a flow"),
        ("a: " + "[" * 51 + "]" * 51, 1, 53, "nested more than 50 deep"),
        ("a: " + "[" * 400_000, 1, 53, "nested more than 50 deep"),
        (
            "a: &x " + "[" + "1, " * 99 + "]\nb: [" + "*x, " * 200 + "]",
            2,
            793,
            f"more than {MAX_NODES:,} values",
        ),
        ("a: [" + "1, " * MAX_NODES + "]", 1, 3 * MAX_NODES - 1, f"more than {MAX_NODES:,} values"),
    ],
)
def test_invalid_yaml_is_a_problem_with_its_position(text: str, line: int, column: int, message: str) -> None:
    (problem,) = Document(text).problems
    assert (problem.line, problem.column) == (line, column)
    assert message in problem.message


def test_all_problems_of_the_yaml_are_found_and_the_first_value_is_kept() -> None:
    document = Document("a: 1\na: {x: !t 2, x: 3}\nb:\n")
    assert [p.line for p in document.problems] == [2, 2, 2, 3]
    assert document.data == {"a": 1}


@pytest.mark.parametrize(
    ("loc", "at_key", "position"),
    [
        (("top", 0, "list", 1), False, (2, 25, 2)),
        (("top", 0, "list"), False, (2, 21, 7)),
        (("top", 0, "list"), True, (2, 15, 4)),
        # a missing value is at its nearest parent
        (("top", 0, "name", "opt", 1), False, (2, 12, 1)),
        (("top", "missing"), False, (1, 1, 3)),
    ],
)
def test_the_position_of_a_problem_is_that_of_the_value_or_of_the_key(loc, at_key, position) -> None:
    document = Document("top:\n  - {name: x, list: [1, 22]}\n")
    at = document.locate(Problem(loc=loc, message="m", at_key=at_key))
    assert (at.line, at.column, at.width) == position
    assert document.line(("nowhere",)) == 1


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


SYNTAX = "qdqspec: 1\nmodel: a.onnx\nchecks:\n  - {kind: speedup, min: 1.2\ntags: [a]\n"


@pytest.mark.parametrize(("name", "text"), [("many", MANY), ("few", FEW), ("syntax", SYNTAX)])
def test_the_message_of_an_invalid_spec(tmp_path, golden, name, text) -> None:
    path = tmp_path / "specs" / "door.qdq.yaml"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(path, root=tmp_path)
    golden(f"spec/{name}.txt", f"{caught.value}\n")


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
