"""The contract suite for checks. Inherit it in a test class.

    class TestMine(CheckContract):
        check = my_check
        passing = ({"kind": "mine", "max": 3}, evidence)
        failing = ({"kind": "mine", "max": 1}, evidence)
        inconclusive = ({"kind": "mine", "max": 1}, evidence_without_it)

pytest collects the subclass like any other test class.
"""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar, TypeAlias

import pytest
from pydantic import ValidationError

from qdqspec.checks import Check, CheckParams
from qdqspec.types import CheckSpec, Evidence, Outcome, Verdict

Example: TypeAlias = tuple[dict[str, Any], Evidence]  # parameters as in a spec, and the evidence

HEADLINE_WIDTH = 79


class CheckContract:
    """The properties that sessions, terminals and reports rely on, with one example for each outcome."""

    check: ClassVar[Check]
    passing: ClassVar[Example]
    failing: ClassVar[Example]
    inconclusive: ClassVar[Example]

    def judged(self, outcome: Outcome) -> Verdict:
        """The verdict of the example for an outcome."""
        examples = {"pass": self.passing, "fail": self.failing, "inconclusive": self.inconclusive}
        values, evidence = examples[outcome]
        return self.check.judge(self.check.Params.model_validate(values), evidence)

    def test_schema(self) -> None:
        """Parameters have a JSON Schema with descriptions, for editors of specs."""
        schema = self.check.Params.model_json_schema()
        json.dumps(schema, allow_nan=False)
        assert "kind" in schema["properties"], "name the kind: `kind: Literal['mine']`"
        silent = [
            name
            for name, part in schema["properties"].items()
            if name not in ("kind", *CheckParams.model_fields) and not part.get("description")
        ]
        assert not silent, f"no Field(description=...) for {silent}"

    def test_unknown_keys(self) -> None:
        """A misspelt key is an error, so that a check never omits a limit silently."""
        with pytest.raises(ValidationError, match="nobody_means_this"):
            self.check.Params.model_validate({**self.passing[0], "nobody_means_this": 1})

    def test_common_keys(self) -> None:
        """The keys of all checks are accepted, and parameters enter a case unchanged."""
        params = self.check.Params.model_validate({**self.passing[0], "id": "mine", "severity": "warn"})
        assert CheckSpec(id="mine", kind=self.passing[0]["kind"], params=params).params.severity == "warn"

    def test_needs(self) -> None:
        """The check declares the evidence it needs."""
        assert self.check.needs, "a check that needs no evidence judges nothing"

    @pytest.mark.parametrize("outcome", ["pass", "fail", "inconclusive"])
    def test_verdict(self, outcome: Outcome) -> None:
        """Each example has its declared outcome.

        The headline is pytest's summary line: one printable line that fits a terminal. Records are strict JSON, so
        numbers are finite. Tables have a printable cell for each header. A verdict other than a pass has advice, and a
        failure shows its numbers.
        """
        verdict = self.judged(outcome)
        assert verdict.outcome == outcome
        assert verdict.headline.strip() == verdict.headline != ""
        assert verdict.headline.isprintable()
        assert len(verdict.headline) <= HEADLINE_WIDTH
        assert all(isinstance(value, float) and math.isfinite(value) for value in verdict.numbers.values())
        for section in verdict.sections:
            for row in section.rows:
                assert len(row) == len(section.headers), section.title
                assert all(cell.isprintable() for cell in row), section.title
        assert verdict.advice or outcome == "pass"
        assert verdict.sections or outcome != "fail"

    def test_pure(self) -> None:
        """The same evidence gives the same verdict."""
        assert self.judged("fail") == self.judged("fail")

    def test_nothing_measured(self) -> None:
        """Evidence without its parts is inconclusive, never a pass and never an error."""
        values, evidence = self.passing
        kept = ("case", "backend", "target", "device", "model_sha256")
        bare = Evidence(**{name: getattr(evidence, name) for name in kept})
        verdict = self.check.judge(self.check.Params.model_validate(values), bare)
        assert verdict.outcome == "inconclusive"
