"""The check `survival`: whether Q/DQ pairs survive the optimizers that process the model later."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from qdqspec._core.units import count_text, plain
from qdqspec.checks.base import CheckParams, unmeasured, verdict
from qdqspec.spec import OptimizerName
from qdqspec.types import Evidence, EvidenceKind, Optimizer, Outcome, Section, Verdict
from qdqspec.types.requests import Request, SurvivalRequest

_SHOWN = 12  # lost pairs that a verdict names
_LOST_ADVICE = (
    "Exclude the lost pairs (patterns.nodes.exclude), which cost time without a gain, or do not run this optimizer on "
    "the model."
)


class SurvivalCheck(CheckParams):
    """Optimizers after which every Q/DQ pair must be present, or part of an integer kernel."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"survival"})
    kind: Literal["survival"]
    through: tuple[OptimizerName, ...] = Field(  # min_length would count a misspelt name as missing
        description="Optimizers that are run on the tuned model; onnxslim and onnxscript only if they are installed.",
        json_schema_extra={"minItems": 1},
    )

    @field_validator("through")
    @classmethod
    def _some_each_once(cls, through: tuple[Optimizer, ...]) -> tuple[Optimizer, ...]:
        if not through:
            raise ValueError("nothing to check: name at least one optimizer")
        twice = {name for name in through if through.count(name) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: named twice")
        return through

    def requests(self) -> tuple[Request, ...]:
        """The surviving pairs for each optimizer."""
        return tuple(SurvivalRequest(optimizer=name) for name in self.through)

    def judge(self, evidence: Evidence) -> Verdict:
        """Fail if an optimizer lost a pair; inconclusive if one could not be run, or was not."""
        found = [evidence.survival[name] for name in self.through if name in evidence.survival]
        if len(found) < len(self.through):
            missing = next(name for name in self.through if name not in evidence.survival)
            return unmeasured(f"{missing} was not run", "Run the case again, so that it is tuned.")
        lost = [result for result in found if result.lost]
        untried = [result for result in found if result.error]
        outcome: Outcome = "pass"
        pairs, advice = max(result.pairs for result in found), ""
        alone = " (unchanged)" if evidence.status == "unchanged" and not pairs else ""
        kept = f"all {count_text(pairs, 'pair')}" if pairs > 1 else count_text(pairs, "pair")
        headline = f"{kept}{alone} survived {count_text(len(found), 'optimizer')}"
        if lost:
            first, more = lost[0], f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            words = f"{first.optimizer}{more} lost {len(first.lost)} of {count_text(first.pairs, 'pair')}"
            outcome, advice = "fail", _LOST_ADVICE
            headline = f"{words}, first {plain(first.lost[0], 76 - len(words) - 8)}"
        elif untried:
            optimizer, why, cure = untried[0].optimizer, plain(untried[0].error), untried[0].cure
            outcome, advice = "inconclusive", f"To get it: {cure}" if cure else f"Its message: {why}"
            headline = f"not run through {optimizer}: {why}"
        rows = []
        for result in found:
            counts = (result.pairs, result.kept, result.integer, len(result.lost))
            judged = "inconclusive" if result.error else "fail" if result.lost else "pass"
            rows.append((result.optimizer, *("" if result.error else str(count) for count in counts), judged))
        headers = ("optimizer", "pairs", "still Q/DQ", "in integer kernels", "lost", "verdict")
        sections = [Section(title="Survival", headers=headers, rows=tuple(rows))]
        for result in lost:
            names = [(plain(name, 100),) for name in result.lost[:_SHOWN]]
            if len(result.lost) > _SHOWN:
                names.append((f"and {len(result.lost) - _SHOWN} more",))
            title = f"Lost in {result.optimizer}"
            sections.append(Section(title=title, headers=("tensor > readers",), rows=tuple(names)))
        return verdict(
            outcome,
            headline,
            *sections,
            numbers={f"lost {result.optimizer}": len(result.lost) for result in found if not result.error},
            advice=advice,
        )


check = SurvivalCheck
