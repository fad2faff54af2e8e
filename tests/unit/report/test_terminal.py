"""Tables within the width of a terminal, and colours if enabled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tabulate import tabulate

from qdqspec.app.report.terminal import color_words, fit_to_width, narrow_tables, wants_color


@pytest.mark.parametrize(
    ("choice", "environment", "is_terminal", "wanted"),
    [
        ("auto", {}, True, True),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour_follows_the_option_then_the_environment(choice, environment, is_terminal, wanted):
    assert wants_color(choice, environment, is_terminal=is_terminal) is wanted


def test_only_verdicts_and_labels_of_messages_are_coloured():
    assert color_words("latency FAIL, 4 passed") == "latency \x1b[31mFAIL\x1b[0m, \x1b[32m4 passed\x1b[0m"
    assert color_words("warning: x\nfail: y") == "\x1b[33mwarning:\x1b[0m x\n\x1b[31mfail:\x1b[0m y"
    plain = "case  ref ms\nFAILURE a warning: of x"
    assert color_words(plain) == plain


CELLS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=90)


@given(st.lists(st.tuples(CELLS, CELLS, st.integers(0, 10**6)), min_size=1, max_size=5), st.integers(52, 160))
def test_a_table_is_within_the_width_and_keeps_its_rows(rows, width):
    table = tabulate(rows, headers=("first", "second", "number"), disable_numparse=True)
    shown = narrow_tables(f"Title\n\n{table}\n\nA line after it", width).split("\n")
    assert all(len(line) <= width for line in shown)
    assert len(shown) == len(rows) + 6
    assert (shown[0], shown[-1]) == ("Title", "A line after it")
    for line, (first, second, number) in zip(shown[4:], rows, strict=False):
        assert str(number) in line
        assert line.startswith(first[:4])
        assert second[:4] in line


def test_columns_that_do_not_fit_are_omitted_with_a_note():
    """Otherwise the layer names of `explain` would be cut to 12 equal characters at 80 columns."""
    names = [f"/layer{number}/layer{number}.1/conv{number}/Conv + Add + Relu" for number in range(9)]
    rows = [(name, "0.0130", "0.0096", "-0.0034", "float", "integer", "fusion lost: 1 > 2") for name in names]
    heads = ("largest differences", "reference ms", "tuned ms", "ms", "reference", "tuned", "remark")
    table = tabulate(rows, headers=heads, disable_numparse=True)
    shown = narrow_tables(table, 80).split("\n")
    assert all(len(line) <= 80 for line in shown)
    assert len({line[:20] for line in shown[2:-1]}) == len(names)
    assert shown[0].split()[-1] == "tuned"
    assert shown[-1] == "1 column left out: widen the terminal"


ADVICE = "The model is unchanged: a gain of +12.0 % does not prove the 2 % of tune.min_gain."


def test_prose_is_wrapped_between_words_and_commands_and_tables_are_not():
    command = "  pytest specs/digits.qdq.yaml::default::speedup --qdq-scheme=e3b0c44298fc1c14"
    excerpt = "   24 |   - {kind: speedup, min: 1.1}      # reference time over tuned time"
    table = "role    ms\n------  ----\ntuned   0.10"
    text = "\n".join((table, "", ADVICE, f"  {ADVICE}", "Reproduce with:", command, excerpt))
    shown = fit_to_width(text, 60).split("\n")
    assert shown[:4] == [*table.split("\n"), ""]
    assert shown[4:6] == [ADVICE[:60], f"  {ADVICE[61:]}"]
    assert shown[-3:] == ["Reproduce with:", command, excerpt]
    assert [line[:2] for line in shown[6:-3]] == ["  ", "  "]
    assert " ".join(" ".join(shown[6:-3]).split()) == ADVICE
    assert all(len(line) <= 60 for line in shown[:-2])
