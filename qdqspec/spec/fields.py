"""Types that all sections of a spec share.

Numbers are strict: text is not a number, ``true`` is not ``1``.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from qdqspec.units import fraction

_T = TypeVar("_T")

# A YAML list. Strict for its items; a list and a tuple are both accepted.
Listed: TypeAlias = Annotated[tuple[_T, ...], Field(strict=False)]


def _said(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty", "empty text where something must be said")
    return text


def _explained(text: str) -> str:
    """Reject ``skip: no``, which YAML reads as the text "no": as a reason, it would skip the case."""
    if text.strip().lower() in ("yes", "no", "on", "off", "true", "false", "y", "n"):
        raise PydanticCustomError(
            "reason", "'{text}' is no reason: leave the key out, or say why", {"text": text}
        )
    return text


Words: TypeAlias = Annotated[str, AfterValidator(_said), Field(json_schema_extra={"minLength": 1})]
Reason: TypeAlias = Annotated[Words, AfterValidator(_explained)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[
    float,
    BeforeValidator(fraction, json_schema_input_type=float | str),
    Field(allow_inf_nan=False),
]


class SpecSection(BaseModel):
    """A mapping of the spec. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
