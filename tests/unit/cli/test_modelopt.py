"""Options of ModelOpt's autotune on the command line, and the page that maps all of them."""

from __future__ import annotations

import re
from pathlib import Path

from qdqspec.app.cli.asked import equivalents

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "from-modelopt.md"


def test_modes_of_this_project_are_accepted(verb) -> None:
    assert "ModelOpt" not in verb("tune", "no-such.onnx", "--mode", "plan").err


def test_the_page_has_every_option_of_modelopt() -> None:
    listed = set(re.findall(r"^\| `(--\w+)", PAGE.read_text(encoding="utf-8"), flags=re.M))
    assert equivalents().keys() | {"--mode"} == listed
