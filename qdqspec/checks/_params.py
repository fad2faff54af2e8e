"""Number types that several checks' parameters share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

# As everywhere in a spec, text is not a number and `true` is not 1.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Whole = Annotated[int, Field(strict=True)]
Switch = Annotated[bool, Field(strict=True)]


def require_a_limit(params: object, *names: str) -> None:
    """Raise ``ValueError`` if none of the named limits is given: the check would check nothing."""
    if all(getattr(params, name) in (None, ()) for name in names):
        known = ", ".join(names)
        raise ValueError(f"nothing to check: give at least one of {known}")
