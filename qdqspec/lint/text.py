"""Renders findings as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

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
