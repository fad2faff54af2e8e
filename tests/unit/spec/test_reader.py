"""YAML read as data with positions: valid documents, invalid ones, and the positions of problems."""

from __future__ import annotations

import math

import pytest

from qdqspec.spec.reader import MAX_ALIASES, MAX_NODES, read_yaml


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
    ],
)
def test_scalars_are_read_by_the_rules_of_yaml_1_2(text: str, value: object) -> None:
    document = read_yaml(f"a: {text}\n")
    assert not document.problems
    assert document.data == {"a": value}
    assert type(document.data["a"]) is type(value)


def test_keys_are_read_as_text() -> None:
    assert read_yaml("{1: a, on: b, 2.0: c, null: d}").data == {"1": "a", "on": "b", "2.0": "c", "null": "d"}


def test_aliases_are_replaced_by_their_anchor() -> None:
    document = read_yaml("a: &x [1, 2]\nb: *x\n")
    assert (document.data, document.problems) == ({"a": [1, 2], "b": [1, 2]}, ())


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
        ("%YAML 1.1\n---\na: yes\n", 1, 1, "a spec is YAML 1.2"),
        ("- a\n", 1, 1, "a spec is a mapping of keys to values"),
        ("", 1, 1, "the file is empty"),
        ("a: 1\nb: 2 # \x00\n", 2, 8, "character U+0000 is not allowed in YAML"),
        ("a: " + "9" * 41, 1, 4, "a number of more than 40 digits"),
        ("a: b: c\n", 1, 5, "not valid YAML: mapping values are not allowed here"),
        ("a: [1,\n", 2, 1, "not valid YAML: while parsing a flow"),
        ("a: " + "[" * 51 + "]" * 51, 1, 53, "nested more than 50 deep"),
        (
            "a: &x 1\nb: [" + "*x, " * (MAX_ALIASES + 1) + "]",
            2,
            5 + 4 * MAX_ALIASES,
            f"more than {MAX_ALIASES} aliases",
        ),
        ("a: [" + "1, " * MAX_NODES + "]", 1, 3 * MAX_NODES - 1, f"more than {MAX_NODES:,} values"),
    ],
)
def test_invalid_yaml_is_a_problem_with_its_position(text: str, line: int, column: int, message: str) -> None:
    (problem,) = read_yaml(text).problems
    assert (problem.line, problem.column) == (line, column)
    assert message in problem.message


def test_all_problems_of_the_yaml_are_found_and_the_first_value_is_kept() -> None:
    document = read_yaml("a: 1\na: {x: !t 2, x: 3}\nb:\n")
    assert [p.line for p in document.problems] == [2, 2, 2, 3]
    assert document.data == {"a": 1}


def test_the_position_of_a_problem_is_that_of_the_value_or_of_the_key() -> None:
    document = read_yaml("top:\n  - {name: x, list: [1, 22]}\n")
    at = document.problem(("top", 0, "list", 1), "m")
    assert (at.line, at.column, at.width) == (2, 25, 2)
    at = document.problem(("top", 0, "list"), "m")
    assert (at.column, at.width) == (21, 7)
    at = document.problem(("top", 0, "list"), "m", at_key=True)
    assert (at.column, at.width) == (15, 4)


def test_the_position_of_a_missing_value_is_that_of_the_nearest_parent() -> None:
    document = read_yaml("top:\n  x: [1, 2]\n")
    at = document.problem(("top", 0, "x", "opt", 1), "a part that the short form does not contain")
    assert (at.line, at.column) == (2, 10)
    at = document.problem(("top", "missing"), "the key of the mapping it is missing in")
    assert (at.line, at.column, at.width) == (1, 1, 3)
    assert document.line(("nowhere",)) == 1
