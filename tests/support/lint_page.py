"""The page of the documentation that lists all lint rules, generated from the rules."""

from __future__ import annotations

from qdqspec.lint import Rule, rules_for
from qdqspec.lint.rules import range_text


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
        "for information. An id never changes its meaning and is never used again.",
    ]
    for severity in ("refused", "slow", "note"):
        for rule in (rule for rule in rules_for() if rule.severity == severity):
            lines += [
                "",
                f"## {rule.id}",
                "",
                f"{rule.title}.",
                "",
                f"- severity: {severity}",
                f"- targets: {', '.join(rule.targets)}{_range(rule)}",
                f"- cure: {rule.cure}",
                f"- source: {rule.source}",
            ]
    return "\n".join(lines) + "\n"
