"""Do the Q/DQ pairs stand where they should? May import floor 0 and pydantic."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec.checks._params import require_a_limit
from qdqspec.checks.base import CheckParams
from qdqspec.types import EvidenceKind

Entry = Annotated[str, Field(min_length=1)]


class PlacementParams(CheckParams):
    """What must be quantized, what must not, and how many activation pairs there may be."""

    kind: Literal["placement"]
    require: tuple[Entry, ...] = Field(
        (), description="Op types, or globs over node names; each needs a node that reads a quantized tensor."
    )
    forbid: tuple[Entry, ...] = Field(
        (), description="Op types, or globs over node names; none of these nodes may read a quantized tensor."
    )
    max_pairs: int | None = Field(None, ge=0, description="Most activation Q/DQ pairs.")
    min_pairs: int | None = Field(None, ge=0, description="Fewest activation Q/DQ pairs.")

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, "require", "forbid", "max_pairs", "min_pairs")
        if None not in (self.min_pairs, self.max_pairs) and (self.min_pairs or 0) > (self.max_pairs or 0):
            raise ValueError(f"min_pairs {self.min_pairs} is above max_pairs {self.max_pairs}")
        return self


class PlacementCheck:
    """Looks at the pairs as shipped, in names of the model without Q/DQ."""

    Params: ClassVar[type[CheckParams]] = PlacementParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"placement"})


check = PlacementCheck()
