"""Number formats in a spec: one, or several between which the search may choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, get_args

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError

from qdqspec.spec.vocabulary import Format

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
