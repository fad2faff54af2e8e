"""Number types that several checks' parameters share. May import pydantic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def require_a_limit(params: object, *names: str) -> None:
    """Raise ``ValueError`` where none of the named limits is given: such a check would check nothing."""
    if all(getattr(params, name) in (None, ()) for name in names):
        known = ", ".join(names)
        raise ValueError(f"nothing to check: give at least one of {known}")
