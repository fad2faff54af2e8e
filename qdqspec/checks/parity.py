"""Does the tuned model still compute what the reference computes? May import floor 0 and pydantic."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec.checks._params import NotNegative, require_a_limit
from qdqspec.checks.base import CheckParams
from qdqspec.types import EvidenceKind

LIMITS = ("min_sqnr_db", "min_cosine", "max_abs", "max_steps")


class ParityParams(CheckParams):
    """How far the outputs may move. At least one limit; every output must keep every limit."""

    kind: Literal["parity"]
    min_sqnr_db: float | None = Field(
        None, allow_inf_nan=False, description="Smallest signal to quantization-noise ratio, in dB."
    )
    min_cosine: float | None = Field(
        None, ge=-1, le=1, allow_inf_nan=False, description="Smallest cosine similarity, at most 1."
    )
    max_abs: NotNegative | None = Field(
        None, description="Largest absolute difference, in the output's own unit."
    )
    max_steps: NotNegative | None = Field(
        None, description="Largest difference in steps of an 8-bit grid over the reference's range."
    )
    outputs: tuple[str, ...] = Field(
        (), description="Which outputs are held to it, as globs over their names; all where none is named."
    )

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, *LIMITS)
        return self


class ParityCheck:
    """Holds every output to every limit; the worst one leads."""

    Params: ClassVar[type[CheckParams]] = ParityParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"parity"})


check = ParityCheck()
