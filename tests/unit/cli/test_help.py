"""Help, completion, and the lists of what there is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qdqspec import registry


def test_help_is_short_and_help_all_has_every_option(verb):
    short, whole = verb("tune", "--help").out, verb("tune", "--help-all").out
    for option in ("--calibration", "--quant", "--backend", "--help-all"):
        assert option in short
    assert "--trtexec-args" not in short
    assert "--trtexec-args" in whole
    assert len(short.splitlines()) < len(whole.splitlines())


def test_a_verb_with_few_options_shows_all(verb):
    assert "--help-all" not in verb("strip", "--help").out


@pytest.mark.parametrize(
    ("word", "kind"),
    [("backends", "backend"), ("strategies", "strategy"), ("checks", "check"), ("formats", "format")],
)
def test_list_with_a_word(verb, word, kind):
    result = verb("list", word, "--json")
    assert result.code == 0
    assert [entry["name"] for entry in result.json["entries"]] == list(registry.names(kind))
    assert all(entry["about"] for entry in result.json["entries"])
    lines = verb("list", word).out.splitlines()
    assert [line.split()[0] for line in lines] == list(registry.names(kind))


def test_a_folder_of_that_name_is_listed_as_before(verb, tmp_path):
    (tmp_path / "checks").mkdir()
    result = verb("list", "checks")
    assert result.code == 2
    assert "no spec found" in result.err


def test_a_shell_gets_completions(tmp_path):
    pytest.importorskip("argcomplete")
    line = "qdqspec bas"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": " "}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "found")
    subprocess.run(
        [sys.executable, "-m", "qdqspec"],
        env={**os.environ, **asked},
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert (tmp_path / "found").read_text().split() == ["baseline"]
