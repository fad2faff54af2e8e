"""Options of ModelOpt's autotune on the command line, and the page that maps all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qdqspec.app.cli.asked import equivalents

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "from-modelopt.md"


@pytest.mark.parametrize(
    ("words", "said", "cure"),
    [
        (["m.onnx", "--mode", "quick"], "--mode quick is an option of ModelOpt", "use --preset quick"),
        (
            ["m.onnx", "--schemes_per_region", "30"],
            "--schemes_per_region is an option of ModelOpt",
            "--trials",
        ),
        (["m.onnx", "--schemes-per-region=30"], "--schemes-per-region is an option of ModelOpt", "--trials"),
        (["--onnx_path", "m.onnx"], "--onnx_path is an option of ModelOpt", "as the first argument"),
    ],
)
def test_the_error_for_an_option_of_modelopt_names_the_equivalent(verb, words, said, cure) -> None:
    result = verb("tune", *words)
    assert result.code == 2
    assert said in result.err
    assert cure in result.err


def test_modes_of_this_project_are_accepted(verb) -> None:
    assert "ModelOpt" not in verb("tune", "no-such.onnx", "--mode", "plan").err


def test_the_page_has_every_option_of_modelopt() -> None:
    listed = set(re.findall(r"^\| `(--\w+)", PAGE.read_text(encoding="utf-8"), flags=re.M))
    assert equivalents().keys() | {"--mode"} == listed
