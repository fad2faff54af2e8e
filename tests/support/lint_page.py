"""The page of the documentation that lists all lint rules, generated from the rules."""

from __future__ import annotations

from qdqspec.qdq.lint import Rule, rules_for
from qdqspec.qdq.lint.rules import BY_LOADING, range_text


def _range(rule: Rule) -> str:
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
                f"- targets: {', '.join(first.targets)}{_range(first)}",
                f"- cure: {first.cure}",
                f"- source: {first.source}",
                *(line for rule in others for line in _differences(rule, first)),
            ]
    for finding in BY_LOADING:
        lines += ["", f"## {finding.id}", "", f"{finding.title}.", "", f"- severity: {finding.severity}"]
        lines += ["- targets: all", f"- cure: {finding.cure}", f"- source: {finding.source}"]
    return "\n".join(lines) + "\n"


def _differences(rule: Rule, first: Rule) -> list[str]:
    """A rule of an id that another one has, for other targets: its source, and what else is different."""
    words = {"severity": rule.severity, "rule": rule.title, "cure": rule.cure}
    same = {"severity": first.severity, "rule": first.title, "cure": first.cure}
    return [
        f"- {', '.join(rule.targets)}: {rule.source}",
        *(f"    - {name}: {text}" for name, text in words.items() if text != same[name]),
    ]
