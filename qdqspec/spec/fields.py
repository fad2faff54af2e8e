"""Words and types that all sections of a spec share: number formats, axes, the grammar of ids, paths and numbers.

Numbers are strict: text is not a number, ``true`` is not ``1``. Parameters of checks use them too.
Number formats are repeated here, because the package that computes with them imports numpy, which collection must not.
A test compares both lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from qdqspec._core.units import fraction, refuse_more_than_all

# Formats of Q/DQ pairs. A format is added to `quantize.formats` and to this line.
Format: TypeAlias = Literal[
    "int8", "uint8", "int16", "uint16", "fp8", "int8_b16", "int8_b32", "int8_b64", "int8_b128", "int8_b256",
    "int4", "uint4", "nvfp4", "mxfp8",
]  # fmt: skip
Activations: TypeAlias = Literal["auto", "int8", "uint8", "int16", "uint16", "fp8"]
Correction: TypeAlias = Literal["bits", "equalization", "bias", "ranges"]
LabelKind: TypeAlias = Literal["in+out", "in-only", "dynamic"]

_ID = re.compile(r"[a-z0-9][a-z0-9._-]*")


def is_id(text: str) -> bool:
    """Whether the text can be part of a test id: pytest 9.2 loses brackets, xdist splits at ``@``."""
    return _ID.fullmatch(text) is not None


def slug(text: str) -> str:
    """The text as part of an id: lower case, other characters as dashes; may be empty."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")


_T = TypeVar("_T")

# A YAML list. Strict for its items; a list and a tuple are both accepted.
Listed: TypeAlias = Annotated[tuple[_T, ...], Field(strict=False)]


def _not_empty(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty", "empty text where a text is required")
    return text


def _explained(text: str) -> str:
    """Reject ``skip: no``, which YAML reads as the text "no": as a reason, it would skip the case."""
    if text.strip().lower() in ("yes", "no", "on", "off", "true", "false", "y", "n"):
        raise PydanticCustomError(
            "reason", "'{text}' is no reason: remove the key, or state the reason", {"text": text}
        )
    return text


Words: TypeAlias = Annotated[str, AfterValidator(_not_empty), Field(json_schema_extra={"minLength": 1})]
Reason: TypeAlias = Annotated[Words, AfterValidator(_explained)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[Number, Field(gt=0)]
Fraction: TypeAlias = Annotated[Number, BeforeValidator(fraction, json_schema_input_type=float | str)]


class SpecSection(BaseModel):
    """A mapping of the spec. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MetricLimits(BaseModel):
    """Limits of a task metric, in the search and in the check ``accuracy``."""

    metric: Words = Field(
        default="top1",
        description="top1, top5, any top<k>, miou, or the name of a metric of fixture qdq_metrics.",
    )
    min: Fraction | None = Field(default=None, description="Smallest value of the tuned model: 0.97 or 97%.")
    max_drop: Annotated[Fraction, Field(ge=0)] | None = Field(
        default=None, description="Largest loss against the reference, in the metric's own unit: 0.01 or 1%."
    )
    output: Words | None = Field(default=None, description="The output that is scored (default: the first).")

    @model_validator(mode="after")
    def _of_a_share(self) -> Self:
        refuse_more_than_all(self.metric, min=self.min, max_drop=self.max_drop)
        return self


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
            raise PydanticCustomError("formats", "'{word}' occurs twice among the formats", {"word": word})
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
