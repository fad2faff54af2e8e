"""The check `size`: the size of the tuned model's file."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec._core.units import ratio_text, size_text
from qdqspec.checks.base import ByteSize, CheckParams, require_a_limit
from qdqspec.checks.verdicts import LimitResult, is_unchanged, unmeasured, verdict_of_limits
from qdqspec.spec.fields import Positive
from qdqspec.types import Evidence, EvidenceKind, Verdict


class SizeParams(CheckParams):
    """The largest size of the tuned model's file, external data included."""

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


class SizeCheck:
    """Compares the tuned model's bytes with a limit, or with the reference's."""

    Params: ClassVar[type[CheckParams]] = SizeParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"size"})

    def judge(self, params: SizeParams, evidence: Evidence) -> Verdict:
        """Pass if each given limit holds."""
        tuned, reference = evidence.size_bytes.get("tuned"), evidence.size_bytes.get("reference")
        if tuned is None or not reference:
            return unmeasured("the model's size is not known", "Run the case again with its output folder.")
        advice = "The model is unchanged, so its weights are float: raise the limit, or quantize by hand."
        if not is_unchanged(evidence):
            ops = "Conv, MatMul, Gemm"
            advice = (
                f"Allow more weighted ops ({ops}), whose weights are stored in 8 bits, or raise the limit."
            )
        return verdict_of_limits(
            _limits(params, tuned, reference),
            numbers={"tuned_bytes": tuned, "reference_bytes": reference, "ratio": tuned / reference},
            advice=advice,
        )


def _limits(params: SizeParams, tuned: int, reference: int) -> list[LimitResult]:
    found: list[LimitResult] = []
    if params.max_bytes is not None:
        holds = tuned <= params.max_bytes
        shown, allowed = size_text(tuned), size_text(params.max_bytes)
        if shown == allowed and tuned != params.max_bytes:
            shown, allowed = f"{tuned} B", f"{params.max_bytes} B"
        found.append(LimitResult(f"{shown} {_sign(holds)} budget {allowed}", holds, ("size", shown, allowed)))
    if params.max_ratio is not None:
        ratio = tuned / reference
        holds = ratio <= params.max_ratio
        shown, allowed = ratio_text(ratio), ratio_text(params.max_ratio)
        if shown == allowed and ratio != params.max_ratio:
            shown, allowed = f"{ratio:.5f}", f"{params.max_ratio:.5f}"
        words = f"{shown} of the reference's size {_sign(holds)} budget {allowed}"
        found.append(LimitResult(words, holds, ("of the reference", shown, allowed)))
    return found


def _sign(holds: bool) -> str:
    return "<=" if holds else ">"


check = SizeCheck()
