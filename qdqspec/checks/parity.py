"""Does the tuned model still compute what the reference computes? May import floor 0 and pydantic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from qdqspec.checks._params import NotNegative, require_a_limit
from qdqspec.checks._verdicts import unmeasured, verdict
from qdqspec.checks.base import CheckParams
from qdqspec.types import Evidence, EvidenceKind, ParityEvidence, Section, TensorParity, Verdict
from qdqspec.units import db_text, plain

_NAME_WIDTH = 30


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit's parameter, the fact of `TensorParity` it bounds, and how the two are shown."""

    param: str
    fact: str
    title: str
    unit: str
    floor: bool  # whether the limit is the smallest value allowed, else the largest
    digits: int

    def keeps(self, value: float, allowed: float) -> bool:
        """Whether the value is within the limit; not a number never is."""
        return value >= allowed if self.floor else value <= allowed

    def text(self, value: float, more: int = 0) -> str:
        """The value as people read it."""
        if not math.isfinite(value):
            return db_text(value)
        kind = "f" if self.floor else "g"
        return f"{value:.{self.digits + more}{kind}}{self.unit}"

    def texts_apart(self, value: float, allowed: float) -> tuple[str, str]:
        """Value and limit with enough digits to see which one is larger."""
        for more in range(6):
            texts = self.text(value, more), self.text(allowed, more)
            if texts[0] != texts[1] or value == allowed:
                break
        return texts


_LIMITS = (  # in the order that headlines prefer
    _Limit("min_sqnr_db", "sqnr_db", "SQNR", " dB", True, 1),
    _Limit("min_cosine", "cosine", "cosine", "", True, 4),
    _Limit("max_abs", "max_abs", "max difference", "", False, 3),
    _Limit("max_steps", "max_steps", "max steps", "", False, 3),
)


class ParityParams(CheckParams):
    """How far the outputs may move. At least one limit; every output must keep every limit."""

    kind: Literal["parity"]
    min_sqnr_db: float | None = Field(
        None, allow_inf_nan=False, description="Smallest signal to quantization-noise ratio, in dB."
    )
    min_cosine: float | None = Field(
        None, ge=-1, le=1, allow_inf_nan=False, description="Smallest cosine similarity, at most 1."
    )
    max_abs: NotNegative | None = Field(
        None, description="Largest absolute difference, in the output's own unit."
    )
    max_steps: NotNegative | None = Field(
        None, description="Largest difference in steps of an 8-bit grid over the reference's range."
    )
    outputs: tuple[str, ...] = Field(
        (), description="Which outputs are held to it, as globs over their names; all where none is named."
    )

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        require_a_limit(self, *(limit.param for limit in _LIMITS))
        return self


class ParityCheck:
    """Holds every output to every limit; the worst one leads."""

    Params: ClassVar[type[CheckParams]] = ParityParams
    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"parity"})

    def judge(self, params: CheckParams, evidence: Evidence) -> Verdict:
        """Pass where every output judged keeps every limit; outputs that are no floats must be equal."""
        assert isinstance(params, ParityParams)
        parity = evidence.parity
        if parity is None or not parity.outputs:
            return unmeasured(
                "no parity was measured", "Run without --qdq-mode=plan, so that it is measured."
            )
        judged = sorted((out for out in parity.outputs if _chosen(params, out)), key=_badness)
        if not judged:
            known = ", ".join(plain(out.name, _NAME_WIDTH) for out in parity.outputs[:5])
            return unmeasured("no output has a name given in outputs", f"The model's outputs: {known}.")
        broken = [words for out in judged for words in _broken(params, out)]
        return verdict(
            "fail" if broken else "pass",
            broken[0] if broken else _kept(params, judged),
            _table(params, parity, judged),
            numbers={**{limit.fact: _worst(limit, judged) for limit in _LIMITS}, "samples": parity.samples},
            advice=f"Output '{plain(judged[0].name, _NAME_WIDTH)}' moved most. Exclude layers before it "
            "(patterns.nodes.exclude), set tune.min_sqnr_db, try another quantize.calibration, or accept less.",
        )


def _chosen(params: ParityParams, out: TensorParity) -> bool:
    return not params.outputs or any(fnmatchcase(out.name, glob) for glob in params.outputs)


def _badness(out: TensorParity) -> tuple[bool, float]:
    """Sorts the worst output first: unequal ones and those that are not a number, then by SQNR."""
    lost = math.isnan(out.sqnr_db) or not out.matches
    return not lost, 0.0 if lost else out.sqnr_db


def _worst(limit: _Limit, judged: list[TensorParity]) -> float:
    values: list[float] = [getattr(out, limit.fact) for out in judged if out.compared]
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    return min(values) if limit.floor else max(values)


def _broken(params: ParityParams, out: TensorParity) -> list[str]:
    """What is said of each limit that an output does not keep."""
    name = plain(out.name, _NAME_WIDTH)
    if not out.matches:
        return [f"output '{name}': {out.note or 'not equal'}"]
    said = []
    for limit in _LIMITS:
        allowed, value = getattr(params, limit.param), getattr(out, limit.fact)
        if allowed is not None and not limit.keeps(value, allowed):
            shown, bound = limit.texts_apart(value, allowed)
            said.append(f"output '{name}': {limit.title} {shown} {'<' if limit.floor else '>'} {bound}")
    return said


def _kept(params: ParityParams, judged: list[TensorParity]) -> str:
    """The headline of a pass: every limit with the worst value that kept it."""
    if judged[0].sqnr_db == math.inf:  # the worst one
        return "every output equals the reference's"
    kept = []
    for limit in _LIMITS:
        allowed = getattr(params, limit.param)
        if allowed is not None:
            shown, bound = limit.texts_apart(_worst(limit, judged), allowed)
            kept.append(f"{limit.title} {shown} {'>=' if limit.floor else '<='} {bound}")
    return ", ".join(kept[:2])


def _table(params: ParityParams, parity: ParityEvidence, judged: list[TensorParity]) -> Section:
    limits = ("limit", *(_bound(params, limit) for limit in _LIMITS), "")
    rows = [_row(params, out) for out in judged]
    return Section(
        title=f"Outputs, worst first ({parity.samples} samples of {parity.data} data)",
        headers=("output", *(limit.title for limit in _LIMITS), "verdict"),
        rows=(*rows, limits),
    )


def _bound(params: ParityParams, limit: _Limit) -> str:
    allowed = getattr(params, limit.param)
    return "" if allowed is None else f"{'>=' if limit.floor else '<='} {limit.text(allowed)}"


def _row(params: ParityParams, out: TensorParity) -> tuple[str, ...]:
    outcome = "fail" if _broken(params, out) else "pass"
    if not out.compared or not out.matches:
        said = plain(out.note or ("equal" if out.matches else "not equal"), 40)
        return (plain(out.name), said, *("" for _ in _LIMITS[1:]), outcome)
    return (plain(out.name), *(limit.text(getattr(out, limit.fact)) for limit in _LIMITS), outcome)


check = ParityCheck()
