"""Findings of lint on whole models, and their texts: the listing, and the page of all rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trt_corpus import parse

from qdqspec._core.hooks import all_names
from qdqspec.graph.model import load_model
from qdqspec.qdq.lint import Rule, lint_model, rules_for
from qdqspec.qdq.lint.rules import BY_LOADING, range_text, render_findings
from qdqspec.types import Finding

TARGETS = all_names("lint_targets")

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("name", ["squeezenet10", "ultraface_rfb320", "digits_resnet"])
def test_float_models_have_no_findings(models: Path, name: str) -> None:
    model = load_model(models / f"{name}.onnx")
    found = {target: lint_model(model, target) for target in TARGETS}
    found = {
        target: [each for each in own if each.id != "QNN001"] for target, own in found.items()
    }  # open batches
    assert not any(found.values())


# Models that other tools made from one network; without TRT040 on sizes, since its convolutions have 12 channels.
QUANTIZED = {
    "digits_resnet_qat_qdq": {"TRT032", "TRT042", "TRT048"},
    "qdq_modelopt_digits_resnet": {"TRT042"},
    "qdq_nncf_digits_resnet": {"TRT006", "TRT030", "TRT031", "TRT042"},
    "qdq_ort_s8s8_digits_resnet_b1": {"TRT004", "TRT031", "TRT042", "TRT046"},
    "qdq_ort_u8s8_digits_resnet_b1": {"TRT001", "TRT004", "TRT006", "TRT031", "TRT042"},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_findings_of_quantized_models(name: str) -> None:
    found = lint_model(load_model(DATA / f"{name}.onnx"), "tensorrt-11")
    assert {finding.id for finding in found} - {"TRT040"} == QUANTIZED[name]


# ---- texts -------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "lint.md"


def versions_of(rule: Rule) -> str:
    """The versions that a rule applies to, as text for the page."""
    held = range_text(rule.since, rule.until)
    unknown = f"not known {range_text(*rule.unknown)}" if rule.unknown else ""
    return "".join(f", {text}" for text in (held, unknown) if text)


def render_rules() -> str:
    """Each rule as a Markdown page."""
    lines = [
        "# Lint rules",
        "",
        "The rules of `qdqspec lint MODEL --target T` and of the check `lint`. Generated from the code by",
        "`pytest tests/unit/lint --update-golden`.",
        "",
        "A rule applies to all versions of its targets unless a range is given. In versions for which no source states",
        "whether it applies, it is applied, and the finding states this. A target of a major version alone is judged",
        "for all its versions.",
        "",
        "`refused`: the target does not build the model, or computes it wrongly. `slow`: it costs time there. `note`:",
        "for information. An id never changes its meaning and is never used again. A rule that holds for targets with",
        "different sources has all of them.",
        "",
        "ONNX's checker judges a model for every target. The runtime of a target loads the model if it is installed in",
        "the version of the target, unless `--no-load` or `load: false` is given. What they refuse has an id at the",
        "end of this page. A refusal by the checker is a note if the runtime loads the model.",
    ]
    known: dict[str, list[Rule]] = {}
    for rule in rules_for():
        known.setdefault(rule.id, []).append(rule)
    for severity in ("refused", "slow", "note"):
        for first, *others in (rules for rules in known.values() if rules[0].severity == severity):
            lines += [
                "",
                f"## {first.id}",
                "",
                f"{first.title}.",
                "",
                f"- severity: {severity}",
                f"- targets: {', '.join(first.targets)}{versions_of(first)}",
                f"- cure: {first.cure}",
                f"- source: {first.source}",
                *(line for rule in others for line in differences(rule, first)),
            ]
    for finding in BY_LOADING:
        lines += ["", f"## {finding.id}", "", f"{finding.title}.", "", f"- severity: {finding.severity}"]
        lines += ["- targets: all", f"- cure: {finding.cure}", f"- source: {finding.source}"]
    return "\n".join(lines) + "\n"


def differences(rule: Rule, first: Rule) -> list[str]:
    """A rule of an id that another one has, for other targets: its source, and what else is different."""
    words = {"severity": rule.severity, "rule": rule.title, "cure": rule.cure}
    same = {"severity": first.severity, "rule": first.title, "cure": first.cure}
    return [
        f"- {', '.join(rule.targets)}: {rule.source}",
        *(f"    - {name}: {text}" for name, text in words.items() if text != same[name]),
    ]


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
