"""Does the tuned model still do its task? May import floor 0 and pydantic."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec.checks._params import require_a_limit
from qdqspec.checks.base import CheckParams, Fraction
from qdqspec.types import EvidenceKind


class AccuracyParams(CheckParams):
    """A task metric on labelled data, where higher is better."""

    kind: Literal["accuracy"]
    metric: str = Field(
        "top1", min_length=1, description="top1, top5, or the name of a metric that a fixture provides."
    )
    min: Annotated[Fraction, Field(allow_inf_nan=False)] | None = Field(
        None, description="Smallest value of the tuned model: 0.97 or 97%."
    )
    max_drop: Annotated[Fraction, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="Largest loss against the reference, in the metric's own unit: 0.01 or 1%."
    )
    output: str | None = Field(None, description="The output that is scored; the first where not named.")

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, "min", "max_drop")
        return self

    @property
    def evidence_key(self) -> str:
        """The key of ``Evidence.accuracy`` that answers it: ``top1``, or ``top1:logits``."""
        return self.metric if self.output is None else f"{self.metric}:{self.output}"


class AccuracyCheck:
    """Holds a task metric to a floor, or to a largest loss against the reference."""

    Params: ClassVar[type[CheckParams]] = AccuracyParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"accuracy"})


check = AccuracyCheck()
