"""Is the tuned model small enough? May import floor 0 and pydantic."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec.checks._params import Positive, require_a_limit
from qdqspec.checks.base import ByteSize, CheckParams
from qdqspec.types import EvidenceKind


class SizeParams(CheckParams):
    """How large the tuned model's file may be, external data included."""

    kind: Literal["size"]
    max_bytes: Annotated[ByteSize, Field(gt=0)] | None = Field(
        None, description="Largest size: a number of bytes, or with a unit, such as 4MiB."
    )
    max_ratio: Positive | None = Field(None, description="Largest size over the reference's size.")

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, "max_bytes", "max_ratio")
        return self


class SizeCheck:
    """Compares the tuned model's bytes with a limit, or with the reference's."""

    Params: ClassVar[type[CheckParams]] = SizeParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"size"})


check = SizeCheck()
