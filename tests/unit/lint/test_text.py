"""Texts of lint: the listing of findings, and the page of all rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lint_page import render_rules
from trt_corpus import parse

from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.lint.rules import render_findings
from qdqspec.types import Finding

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "lint.md"


def test_the_page_of_rules_is_up_to_date(request) -> None:
    if request.config.getoption("--update-golden"):
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(render_rules(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == render_rules(), (
        "the rules changed; renew the page with: pytest tests/unit/lint --update-golden"
    )


def pairs(count: int, zero: str = "zu") -> str:
    text = "".join(
        f"q{i} = QuantizeLinear(x, s, {zero})  a{i} = DequantizeLinear(q{i}, s, {zero}) "
        for i in range(count)
    )
    text += "".join(f"n{i} = Softmax(a{i}) " for i in range(count))
    return text + f"y = Sum({', '.join(f'n{i}' for i in range(count))})"


def test_the_listing_of_findings(golden: Callable[[str, str], None]) -> None:
    found = lint_model(parse("float[4,16] x", "y", pairs(7)), "tensorrt-11")
    text = render_findings("tensorrt-11", found)
    assert "and 2 more" in text
    assert "more" not in render_findings("tensorrt-11", found, most=0)
    golden("lint/listing.txt", f"{text}\n")


def test_control_characters_in_names_are_escaped() -> None:
    finding = Finding(
        id="TRT001", severity="slow", node="a\x1b[2J\n", message="is odd", title="T", cure="c", source="s"
    )
    text = render_findings("tensorrt-10", (finding,))
    assert "\x1b" not in text
    assert len(text.splitlines()) == 5
