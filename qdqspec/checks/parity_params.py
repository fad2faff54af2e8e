"""The parameters of a parity check: its limits, the text of their values, and the search for inputs that break them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import db_text, digits_of, plain, share_text, texts_apart
from qdqspec.accuracy import NAME_WIDTH, slice_text
from qdqspec.checks.base import CheckParams, NotNegative, Whole, require_a_limit
from qdqspec.spec import Fraction, Number
from qdqspec.types import TensorParity, TopK

_WORST = 1e9  # the value used for NaN and infinity


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

    def value_of(self, out: TensorParity, top: str) -> float | None:
        """The value of an output; ``None`` for the agreement of an output without classes, or without slices."""
        value: float | None = out.agreement.get(top) if self is AGREEMENT else getattr(out, self.fact)
        return value

    def text(self, value: float, more: int = 0) -> str:
        """The value as text for people."""
        if not math.isfinite(value):
            return db_text(value)
        if self.unit == " %":
            return share_text(value) if not more else f"{100 * value:.{self.digits + more}f} %"
        kind = "f" if self.floor else "g"
        return f"{value:.{self.digits + more}{kind}}{self.unit}"

    def own_text(self, allowed: float) -> str:
        """The limit as it was given."""
        return self.text(allowed, digits_of(self.text, allowed))


LIMITS = (  # in the order of preference for headlines
    Limit("min_sqnr_db", "sqnr_db", "SQNR", " dB", True, 1),
    Limit("min_cosine", "cosine", "cosine", "", True, 4),
    Limit("max_abs", "max_abs", "max difference", "", False, 3),
    Limit("max_steps", "max_steps", "max steps", "", False, 3),
)
SLICE = Limit("min_slice_sqnr_db", "slice_sqnr_db", "worst slice", " dB", True, 1)
AGREEMENT = Limit("min_agreement", "agreement", "agreement", " %", True, 1)
WHOLE = (SLICE, AGREEMENT)  # limits on all data together, which mean nothing for a single input


class ParityLimits(BaseModel):
    """Limits on the difference of an output between two computations of one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    names: ClassVar[tuple[str, ...]] = tuple(limit.param for limit in (*LIMITS, *WHOLE))

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
    min_slice_sqnr_db: Number | None = Field(
        None,
        description="Smallest SQNR of a slice of the output along an axis, such as one channel, in dB.",
    )
    min_agreement: Annotated[Fraction, Field(ge=0, le=1)] | None = Field(
        None,
        description="Smallest share of the reference's `top_k` best classes that are among the tuned model's: 99%.",
    )


def broken(limits: ParityLimits, out: TensorParity, top: str, *, whole: bool = True) -> Iterator[str]:
    """A message for each limit that an output exceeds; for a single input, only for limits that it can break alone."""
    name = plain(out.name, NAME_WIDTH)
    if not out.matches:
        yield f"output '{name}': {out.note or 'not equal'}"
        return
    for limit in (*LIMITS, *(WHOLE if whole else ())):
        allowed, value = getattr(limits, limit.param), limit.value_of(out, top)
        if allowed is not None and value is not None and not limit.keeps(value, allowed):
            shown, bound = texts_apart(limit.text, value, allowed)
            title = f"{top} agreement" if limit is AGREEMENT else limit.title
            if limit is SLICE and out.worst_slice is not None:
                title = f"{slice_text(out.worst_slice)}:"
            yield f"output '{name}': {title} {shown} {'<' if limit.floor else '>'} {bound}"


class StepLimits(ParityLimits):
    """Limits for one of the two steps between the float model and the backend's result. At least one."""

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, *self.names)
        return self


class SearchParams(BaseModel):
    """The range, the number of inputs and the time of a search for an input that breaks the limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    examples: Whole = Field(200, ge=1, description="Number of inputs.")
    seconds: Number = Field(60, gt=0, description="Time limit in seconds; inputs found by then are reported.")
    beyond: Number = Field(
        2,
        ge=1,
        description="Range of floats, as a multiple of the range of the calibration data.",
    )
    values: Mapping[str, tuple[Number, Number]] = Field(
        {}, description="By input, the smallest and the largest valid value; values outside are not tried."
    )

    @field_validator("values")
    @classmethod
    def _in_order(cls, values: Mapping[str, tuple[Number, Number]]) -> Mapping[str, tuple[Number, Number]]:
        for name, (low, high) in values.items():
            if not -math.inf < low <= high < math.inf:
                raise ValueError(
                    f"[{low:g}, {high:g}] for '{name}' is no range: the smaller number comes first"
                )
        return values


def _budget(value: object) -> object:
    """``200`` is a number of examples."""
    return {"examples": value} if isinstance(value, int) and not isinstance(value, bool) else value


class ParityParams(CheckParams, ParityLimits):
    """Limits on the difference of the outputs. At least one limit; every output must meet every limit."""

    kind: Literal["parity"]
    top_k: Whole = Field(1, ge=1, description="The number of best classes that `min_agreement` compares.")
    class_axis: Whole | None = Field(
        None,
        description="The axis of the classes, for `min_agreement` (default: the last axis longer than 1).",
    )
    quantization: StepLimits | None = Field(
        None,
        description="Limits for the quantization error: the float model against the Q/DQ arithmetic as ONNX defines "
        "it.",
    )
    runtime: StepLimits | None = Field(
        None,
        description="Limits for the runtime error: the Q/DQ arithmetic against the backend's result.",
    )
    search: (
        Annotated[SearchParams, BeforeValidator(_budget, json_schema_input_type=int | SearchParams)] | None
    ) = Field(
        None,
        description="A search for inputs outside the data that break the limits: the number of inputs, or a table.",
    )
    outputs: tuple[str, ...] = Field(
        (), description="The outputs that are compared, as globs over their names (default: all)."
    )

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, *self.names, "quantization", "runtime")
        if self.search is not None and self._leading is None:
            known = ", ".join(limit.param for limit in LIMITS)
            raise ValueError(
                f"nothing to search for: give at least one of {known}, which single inputs can break"
            )
        return self

    @property
    def evidence_key(self) -> str:
        """The key of ``Evidence.parity_search`` that answers it; checks with equal parameters share one search."""
        return self.model_dump_json(exclude={"id", "severity"}, exclude_none=True)

    def broken_by(self, outputs: tuple[TensorParity, ...], *, whole: bool = False) -> tuple[str, ...]:
        """A message for each limit that the outputs of one input exceed, or those of the ``whole`` data."""
        chosen = self.chosen(outputs)
        found = (words for out in chosen for words in broken(self, out, self.top.key, whole=whole))
        return (*self.unmatched(outputs), *found)

    def unmatched(self, outputs: tuple[TensorParity, ...]) -> tuple[str, ...]:
        """A message for each name or glob of outputs that matches none: nothing would be judged."""
        names = [out.name for out in outputs]
        return tuple(
            f"no output has the name '{plain(glob, NAME_WIDTH)}' given in outputs{did_you_mean(glob, names)}"
            for glob in self.outputs
            if not any(fnmatchcase(name, glob) for name in names)
        )

    def error_excess(self, outputs: tuple[TensorParity, ...]) -> float:
        """The distance of an input's error from the first limit: larger is worse."""
        assert self._leading is not None
        signed = []
        for out in self.chosen(outputs):
            value = getattr(out, self._leading.fact)
            if out.compared and math.isnan(value):
                signed.append(_WORST)
            elif out.compared:
                signed.append(max(-_WORST, min(-value if self._leading.floor else value, _WORST)))
        return max(signed, default=0.0)

    def polygraphy_words(self, outputs: tuple[TensorParity, ...]) -> list[str]:
        """The options of `polygraphy run` for the limits that it knows; empty if it knows none of them.

        A limit in steps is one of the difference, by the step of each output. Outputs that must be equal and are not
        have one of zero.
        """
        chosen = {out.name: out for out in self.chosen(outputs) if out.compared}
        sqnr, cosine = dict.fromkeys(chosen, self.min_sqnr_db), dict.fromkeys(chosen, self.min_cosine)
        most: dict[str, float | None] = {}
        for name, out in chosen.items():
            steps = self.max_steps
            of_steps = None if steps is None or not out.max_steps else steps * out.max_abs / out.max_steps
            most[name] = min((each for each in (self.max_abs, of_steps) if each is not None), default=None)
        most |= {out.name: 0.0 for out in self.chosen(outputs) if not (out.compared or out.matches)}
        names, words = list[str](), list[str]()
        for name, option, others, limits in (
            ("snr", "--snr-threshold", f":{-_WORST:g}", sqnr),
            ("cosine_similarity", "--cosine-similarity-threshold", ":-1", cosine),
            ("simple", "--atol", f":{_WORST:g}", most),
        ):
            given = [f"{output}:{limit:.9g}" for output, limit in limits.items() if limit is not None]
            if given:
                names.append(name)
                words += [option, others, *given]
        exact = ["--rtol", "0", "--check-error-stat", "max"] if "simple" in names else []
        return ["--compare", *names, *words, *exact] if names else []

    @property
    def _leading(self) -> Limit | None:
        return next((limit for limit in LIMITS if getattr(self, limit.param) is not None), None)

    @property
    def top(self) -> TopK:
        """The parameters of the agreement that the evidence must contain."""
        return TopK(k=self.top_k, axis=self.class_axis)

    def chosen(self, outputs: tuple[TensorParity, ...]) -> list[TensorParity]:
        """The outputs that the check applies to, the worst first: unequal ones and those with NaN, then by SQNR."""
        globs = self.outputs or ("*",)
        named = (out for out in outputs if any(fnmatchcase(out.name, glob) for glob in globs))
        return sorted(
            named, key=lambda out: out.sqnr_db if out.matches and not math.isnan(out.sqnr_db) else -math.inf
        )

    def asks(self, limit: Limit) -> bool:
        """Whether any of its limits is this one."""
        every = (self, self.quantization, self.runtime)
        return any(limits and getattr(limits, limit.param) is not None for limits in every)
