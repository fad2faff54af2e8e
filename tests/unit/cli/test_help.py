"""Help, completion, and lists of backends, checks and other named things."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qdqspec._core import registry
from qdqspec.app.cli.asked import equivalents


def test_help_has_groups_and_every_option(verb):
    whole = verb("tune", "--help").out
    for title in ("data and shapes:", "quantization:", "limits:", "search:", "where and how it runs:"):
        assert title in whole
    for option in ("--calibration", "--quant", "--backend", "--trtexec-args", "--min-shapes", "--graph-json"):
        assert option in whole


@pytest.mark.parametrize(
    ("word", "kind"),
    [("backends", "backend"), ("strategies", "strategy"), ("checks", "check"), ("formats", "format")],
)
def test_list_with_a_kind_prints_its_names(verb, word, kind):
    result = verb("list", word, "--json")
    assert result.code == 0
    known = [*registry.names(kind), *(["github"] if word == "formats" else [])]
    assert [entry["name"] for entry in result.json["entries"]] == known
    assert all(entry["about"] for entry in result.json["entries"])
    lines = verb("list", word).out.splitlines()
    assert [line.split()[0] for line in lines[: len(known)]] == known
    more = [line[:40] for line in lines[len(known) :]]
    assert more == (["number formats of --quant: int8, uint8, "] if word == "formats" else [])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("qdqspec bas", ["baseline"]),
        ("qdqspec tune --strat", ["--strategy"]),
    ],
)
def test_completions_of_a_shell(tmp_path, line, found):
    pytest.importorskip("argcomplete")
    (tmp_path / "specs").mkdir()
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": " "}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "found")
    subprocess.run(
        [sys.executable, "-m", "qdqspec"],
        env={**os.environ, **asked},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert (tmp_path / "found").read_text().split() == found


def test_the_page_has_every_option_of_modelopt() -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "from-modelopt.md"
    listed = set(re.findall(r"^\| `(--\w+)", page.read_text(encoding="utf-8"), flags=re.M))
    assert equivalents().keys() | {"--mode"} == listed
