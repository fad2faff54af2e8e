"""The check `lint`: whether other targets accept the tuned model and run it fast."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from qdqspec._core.units import count_text, plain
from qdqspec.checks.base import WIDTH, CheckParams, Switch, unmeasured, verdict
from qdqspec.spec import LintTargetName, short_form
from qdqspec.types import Evidence, EvidenceKind, FindingSeverity, Section, Verdict
from qdqspec.types.requests import LintRequest, Request

_SHOWN = 20  # findings in the table; `qdqspec lint` lists them all

Targets = Annotated[
    tuple[LintTargetName, ...],
    short_form(str, lambda name: [name], LintTargetName | list[LintTargetName]),
    Field(min_length=1),
]


class LintCheck(CheckParams):
    """The targets for which the tuned model is linted, and the severities that fail."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"lint"})
    kind: Literal["lint"]
    target: Targets = Field(description="One or several targets for which a backend has rules.")
    strict: Switch = Field(
        False, description="Fail also on findings of severity slow, not only on refused ones."
    )
    load: Switch = Field(
        True, description="Load the model in the runtime of each target, where it is installed."
    )
    ignore: tuple[Annotated[str, Field(pattern=r"^[A-Z]{3}\d{3}$")], ...] = Field(
        (), description="Ids of rules whose findings are accepted, such as TRT042."
    )

    def requests(self) -> tuple[Request, ...]:
        """The findings for each target."""
        return tuple(LintRequest(target=target, load=self.load) for target in self.target)

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if no target refuses anything, nor with ``strict`` runs anything slowly."""
        if missing := [target for target in self.target if target not in evidence.lint]:
            what = f"lint for {missing[0]} was not run"
            return unmeasured(what, "Run the case again, so that it is linted.")
        found = [
            (target, finding)
            for target in self.target
            for finding in evidence.lint[target]
            if finding.id not in self.ignore
        ]
        severities = ("refused", "slow") if self.strict else ("refused",)
        wrong = [(target, finding) for target, finding in found if finding.severity in severities]
        headline, advice = f"nothing {' or '.join(severities)}: {', '.join(self.target)}", ""
        if wrong:
            target, first = wrong[0]
            effect = f"{target} {'refuses' if first.severity == 'refused' else 'is slow with'}"
            sentence = f"{effect} {plain(first.node, 30) or 'the model'}: {plain(first.message)}"
            tail = f" ({first.id})" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
            headline = f"{plain(sentence, WIDTH - len(tail))}{tail}"
            advice = f"{first.id}: {first.title}. To cure it: {first.cure}. `qdqspec lint` lists all."
        listed = wrong or found
        findings: list[tuple[str, ...]] = [
            (target, f.id, f.severity, plain(f.node) or "(the model)", plain(f.message, 60))
            for target, f in listed[:_SHOWN]
        ]
        if len(listed) > _SHOWN:
            findings.append(("", "", "", f"and {count_text(len(listed) - _SHOWN, 'more finding')}", ""))
        loads = [(target, plain(evidence.lint_loads.get(target, ""))) for target in self.target]
        counts = Counter(finding.severity for _, finding in found)
        return verdict(
            "fail" if wrong else "pass",
            headline,
            Section(
                title="Findings",
                headers=("target", "rule", "severity", "node", "what"),
                rows=tuple(findings),
            ),
            Section(title="Loads", headers=("target", "runtime"), rows=tuple(row for row in loads if row[1])),
            numbers={severity: counts[severity] for severity in get_args(FindingSeverity)},
            advice=advice,
        )


check = LintCheck
