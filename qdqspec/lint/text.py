"""Renders findings as text, and the table of all rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from qdqspec.lint import Rule, rules_for
from qdqspec.lint.rules import range_text
from qdqspec.types import Finding, LintTarget
from qdqspec.units import count_text, plain


def render_findings(target: LintTarget, findings: Sequence[Finding], *, most: int = 5) -> str:
    """Findings by rule, most severe first, ``most`` nodes each; all of them if ``most`` is 0."""
    lines = [f"{target}: {_counts(findings)}"]
    for (severity, name), group in groupby(findings, key=lambda finding: (finding.severity, finding.id)):
        found = list(group)
        lines += ["", f"{severity} {name}: {found[0].title}"]
        shown = found[:most] if most else found
        lines += [f"  {plain(f'{f.node}: {f.message}' if f.node else f.message)}" for f in shown]
        lines += [f"  and {len(found) - len(shown)} more"] if len(found) > len(shown) else []
        lines.append(f"  cure: {found[0].cure}")
    return "\n".join(lines)


def _counts(findings: Iterable[Finding]) -> str:
    severities = [finding.severity for finding in findings]
    counted = [(severities.count("refused"), "refused"), (severities.count("slow"), "slow")]
    parts = [f"{count} {what}" for count, what in counted if count]
    if notes := severities.count("note"):
        parts.append(count_text(notes, "note"))
    return ", ".join(parts) or "nothing found"


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
        "What `qdqspec lint MODEL --target T` and the check `lint` look for. Made from the rules themselves; renew it",
        "with `pytest tests/unit/lint --update-golden`.",
        "",
        "A rule holds for all versions of its targets unless a range is given. Where no source tells, it is applied,",
        "and the finding says so. A target of a major version alone is judged for all its versions.",
        "",
        "`refused`: the target does not build it, or computes it wrongly. `slow`: it costs time there. `note`: worth",
        "knowing. An id never changes its meaning and is never used again.",
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
