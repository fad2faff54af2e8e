"""Is the tuned model within its time budget? May import floor 0 and pydantic."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from qdqspec.checks._params import Positive
from qdqspec.checks.base import CheckParams
from qdqspec.types import EvidenceKind

ANY = "any"  # the budget table's entry for every target without one of its own


def _table(value: object) -> object:
    """A single number is the budget of any target."""
    return value if isinstance(value, dict) else {ANY: value}


Table = Annotated[dict[str, Positive], Field(min_length=1)]
Budgets = Annotated[Table, BeforeValidator(_table, json_schema_input_type=Positive | Table)]


class LatencyParams(CheckParams):
    """A time budget in milliseconds, one for all targets or one for each."""

    kind: Literal["latency"]
    max_ms: Budgets = Field(
        description="Budget in milliseconds: a number, or a table of numbers by target or backend "
        "(onnxruntime-cpu, onnxruntime, tensorrt; 'any' for all others)."
    )
    percentile: float = Field(
        50, ge=0, le=100, allow_inf_nan=False, description="Which percentile of the runs is held to it."
    )
    clock: Literal["auto", "cpu", "wall"] = Field(
        "auto", description="Thread CPU time or wall time; auto takes the clock that the search used."
    )


class LatencyCheck:
    """Holds a percentile of the tuned model's runs to the budget of the target that ran it."""

    Params: ClassVar[type[CheckParams]] = LatencyParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"latency"})


check = LatencyCheck()
