"""Colours of a terminal if enabled."""

from __future__ import annotations

import pytest

from qdqspec.app.report.terminal import color_words, wants_color


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
