"""The table of checks in the guide: every example is a valid check, and every kind has an example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qdqspec import load_spec
from qdqspec._core.registry import names

GUIDE = (Path(__file__).parents[3] / "docs" / "guide.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\| `(\{kind: .*\})` \|", GUIDE, re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_valid_check(example: str, tmp_path: Path) -> None:
    spec = tmp_path / "a.qdq.yaml"
    spec.write_text(
        f"qdqspec: 1\nmodel: m.onnx\ninputs: {{evaluation: e.npz}}\nchecks:\n  - {example}\n",
        encoding="utf-8",
    )
    (case,) = load_spec(spec).cases()
    assert len(case.checks) == 1


def test_every_kind_has_an_example() -> None:
    assert {re.match(r"\{kind: (\w+)", example)[1] for example in EXAMPLES} == set(names("check"))
