"""The check `size`: the size of the tuned model's file."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec._core.units import ratio_text, size_text
from qdqspec.checks.base import (
    ByteSize,
    CheckParams,
    LimitResult,
    require_a_limit,
    unmeasured,
    verdict_of_limits,
)
from qdqspec.spec import Positive
from qdqspec.types import Evidence, EvidenceKind, Verdict


class SizeCheck(CheckParams):
    """The largest size of the tuned model's file, external data included."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"size"})
    kind: Literal["size"]
    max_bytes: Annotated[ByteSize, Field(gt=0)] | None = Field(
        None, description="Largest size of the model: a number of bytes, or with a unit, such as 4MiB."
    )
    max_ratio: Positive | None = Field(
        None, description="Largest ratio of the model's size to the reference's."
    )

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, "max_bytes", "max_ratio")
        return self

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if each given limit holds."""
        tuned, reference = evidence.size_bytes.get("tuned"), evidence.size_bytes.get("reference")
        if tuned is None or not reference:
            return unmeasured("the model's size is not known", "Run the case again with its output folder.")
        advice = (
            "The model is unchanged, so its weights are float: raise the limit, or quantize by hand."
            if evidence.status == "unchanged"
            else "Allow more weighted ops (Conv, MatMul, Gemm), whose weights are stored in 8 bits, or raise the limit."
        )
        ratio, of_reference = tuned / reference, " of the reference's size"
        limits = []
        for name, value, most, text, exact, what in (
            ("size", tuned, self.max_bytes, size_text, "{} B", ""),
            ("of the reference", ratio, self.max_ratio, ratio_text, "{:.5f}", of_reference),
        ):
            if most is not None:
                shown, allowed = text(value), text(most)
                if shown == allowed and value != most:
                    shown, allowed = exact.format(value), exact.format(most)
                words = f"{shown}{what} {'<=' if value <= most else '>'} budget {allowed}"
                limits.append(LimitResult(words, value <= most, (name, shown, allowed)))
        return verdict_of_limits(
            limits,
            numbers={"tuned_bytes": tuned, "reference_bytes": reference, "ratio": ratio},
            advice=advice,
        )


check = SizeCheck
