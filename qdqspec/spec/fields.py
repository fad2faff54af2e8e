"""Types that all sections of a spec share, and number formats: one, or several between which the search may choose.

Numbers are strict: text is not a number, ``true`` is not ``1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from qdqspec.spec.vocabulary import Format
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


_WORD = "|".join(get_args(Format))
_Joined: TypeAlias = Annotated[str, Field(pattern=rf"^({_WORD})(\+({_WORD}))+$")]
_Listed: TypeAlias = Annotated[list[Format], Field(min_length=1, json_schema_extra={"uniqueItems": True})]


def _joined(value: object, one: ValidatorFunctionWrapHandler) -> str:
    """``[int8, int4]`` and ``int8+int4`` as the latter, which names and ids contain."""
    if isinstance(value, list | tuple) and value:
        words = _each(value, one)
    elif isinstance(value, str):
        words = [str(one(word)) for word in value.split("+")]
    else:
        return str(one(value))
    for word in words:
        if words.count(word) > 1:
            raise PydanticCustomError("formats", "'{word}' stands twice among the formats", {"word": word})
    return "+".join(words)


def _each(values: Sequence[object], one: ValidatorFunctionWrapHandler) -> list[str]:
    """All words of a list; each error is reported at its own index."""
    words, wrong = [], []
    for index, value in enumerate(values):
        try:
            words.append(str(one(value)))
        except ValidationError as error:
            (details,) = error.errors(include_url=False)
            kind, context = details["type"], details.get("ctx", {})
            wrong.append(InitErrorDetails(type=kind, loc=(index,), input=value, ctx=context))
    if wrong:
        raise ValidationError.from_exception_data("formats", wrong)
    return words


Formats: TypeAlias = Annotated[
    Format, WrapValidator(_joined, json_schema_input_type=Format | _Joined | _Listed)
]
