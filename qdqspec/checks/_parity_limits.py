"""The limits of a parity check, and the text of their values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from qdqspec.checks._params import NotNegative, Number
from qdqspec.checks.base import Fraction
from qdqspec.types import TensorParity
from qdqspec.units import db_text, plain, share_text

NAME_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit's parameter, the fact of `TensorParity` it bounds, and how both are displayed."""

    param: str
    fact: str
    title: str
    unit: str
    floor: bool  # whether the limit is the smallest value allowed, else the largest
    digits: int

    def keeps(self, value: float, allowed: float) -> bool:
        """Whether the value is within the limit; NaN never is."""
        return value >= allowed if self.floor else value <= allowed

    def text(self, value: float, more: int = 0) -> str:
        """The value as text for people."""
        if not math.isfinite(value):
            return db_text(value)
        if self.unit == " %":
            return share_text(value) if not more else f"{100 * value:.{self.digits + more}f} %"
        kind = "f" if self.floor else "g"
        return f"{value:.{self.digits + more}{kind}}{self.unit}"

    def texts_apart(self, value: float, allowed: float) -> tuple[str, str]:
        """Value and limit with enough digits to see which is larger."""
        for more in range(6):
            texts = self.text(value, more), self.text(allowed, more)
            if texts[0] != texts[1] or value == allowed:
                break
        return texts


LIMITS = (  # in the order of preference for headlines
    Limit("min_sqnr_db", "sqnr_db", "SQNR", " dB", True, 1),
    Limit("min_cosine", "cosine", "cosine", "", True, 4),
    Limit("max_abs", "max_abs", "max difference", "", False, 3),
    Limit("max_steps", "max_steps", "max steps", "", False, 3),
)
AGREEMENT = Limit("min_agreement", "agreement", "agreement", " %", True, 1)


class ParityLimits(BaseModel):
    """Limits on how far an output may move between two computations of one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    names: ClassVar[tuple[str, ...]] = tuple(limit.param for limit in (*LIMITS, AGREEMENT))

    min_sqnr_db: Number | None = Field(
        None, description="Smallest signal to quantization-noise ratio, in dB."
    )
    min_cosine: Number | None = Field(None, ge=-1, le=1, description="Smallest cosine similarity, at most 1.")
    max_abs: NotNegative | None = Field(
        None, description="Largest absolute difference, in the output's own unit."
    )
    max_steps: NotNegative | None = Field(
        None, description="Largest difference in steps of an 8-bit grid over the reference's range."
    )
    min_agreement: Annotated[Fraction, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        None,
        description="Smallest share of the reference's `top_k` best classes that stay among the best: 99%.",
    )


def value_of(limit: Limit, out: TensorParity, top: str) -> float | None:
    """The value that a limit bounds; ``None`` for the agreement of an output without classes."""
    if limit is AGREEMENT:
        return out.agreement.get(top)
    value: float = getattr(out, limit.fact)
    return value


def broken(limits: ParityLimits, out: TensorParity, top: str, *, whole: bool = True) -> Iterator[str]:
    """A message for each limit that an output exceeds.

    For a single input, not ``whole`` data, agreement is not meaningful and is not checked.
    """
    name = plain(out.name, NAME_WIDTH)
    if not out.matches:
        yield f"output '{name}': {out.note or 'not equal'}"
        return
    for limit in (*LIMITS, *((AGREEMENT,) if whole else ())):
        allowed, value = getattr(limits, limit.param), value_of(limit, out, top)
        if allowed is not None and value is not None and not limit.keeps(value, allowed):
            shown, bound = limit.texts_apart(value, allowed)
            title = f"{top} agreement" if limit is AGREEMENT else limit.title
            yield f"output '{name}': {title} {shown} {'<' if limit.floor else '>'} {bound}"
