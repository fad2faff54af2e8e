"""The interface of a check: typed parameters in the spec, the evidence that it requests, and parts of verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qdqspec._core.hooks import owner_of
from qdqspec._core.registry import resolve
from qdqspec._core.units import plain
from qdqspec.errors import QdqspecError
from qdqspec.spec import Number
from qdqspec.types import (
    ERROR_TITLE,
    CheckSpec,
    Evidence as Evidence,
    EvidenceKind,
    Outcome,
    Section as Section,
    Severity,
    Verdict as Verdict,
)
from qdqspec.types.requests import FigureRequest as FigureRequest, Request, ScoreRequest as ScoreRequest

_Kind = TypeVar("_Kind")

# As everywhere in a spec, text is not a number and `true` is not 1.
NotNegative = Annotated[Number, Field(ge=0)]
Whole = Annotated[int, Field(strict=True)]
Switch = Annotated[bool, Field(strict=True)]

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _bytes(value: object) -> object:
    """``4MiB`` or a plain number of bytes."""
    if isinstance(value, str):
        for unit in sorted(_BYTES, key=len, reverse=True):
            if value.strip().endswith(unit):
                try:
                    return int(float(value.strip().removesuffix(unit)) * _BYTES[unit])
                except (ValueError, OverflowError):
                    break
        raise ValueError(f"'{value}' is not a size such as 4MiB")
    return value


ByteSize = Annotated[int, Field(strict=True), BeforeValidator(_bytes, json_schema_input_type=int | str)]


class CheckParams(BaseModel):
    """The keys that every check has, whatever its kind. Unknown keys are errors.

    A subclass with the methods of `Check` is a check itself, and its own ``Params``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    Params: ClassVar[type[CheckParams]]

    id: str | None = None
    severity: Severity = "error"

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.Params = cls


class Check(Protocol):
    """One kind of check. ``Params`` also extends the spec's JSON Schema; ``needs`` lists the evidence to collect.

    The methods get an instance of the check's own ``Params``.

    A check that needs evidence with parameters, such as the value of a metric, also has a method
    ``requests(params) -> Iterable[Request]``; see `qdqspec.types.requests`. The session collects equal requests of
    several checks once.
    """

    Params: ClassVar[type[CheckParams]]
    needs: ClassVar[frozenset[EvidenceKind]]

    def judge(self, params: Any, evidence: Evidence) -> Verdict:
        """Compare the evidence with the parameters."""
        ...


def requests_of(check: CheckSpec) -> tuple[Request, ...]:
    """The evidence that a check of a case requests with parameters."""
    requests = getattr(resolve("check", check.kind), "requests", lambda _: ())
    return tuple(requests(check.params))


def requested(checks: Iterable[CheckSpec], kind: type[_Kind]) -> list[_Kind]:
    """The requests of one type of several checks, in their order."""
    every = (request for check in checks for request in requests_of(check))
    return [request for request in every if isinstance(request, kind)]


def needs_of(check: CheckSpec) -> frozenset[EvidenceKind]:
    """All kinds of evidence that a check of a case needs."""
    kind = cast("Check", resolve("check", check.kind))
    return kind.needs | {request.kind for request in requests_of(check)}


def require_a_limit(params: object, *names: str) -> None:
    """Raise ``ValueError`` if none of the named limits is given: the check would check nothing."""
    if all(getattr(params, name) in (None, (), {}) for name in names):
        known = ", ".join(names)
        raise ValueError(f"nothing to check: give at least one of {known}")


def longest_match(names: Iterable[str], target: str) -> str | None:
    """The most specific match for ``target``: the longest name that equals it, or its beginning up to a hyphen.

    Of ``a`` and ``a-cpu`` the second for ``a-cpu``, the first for ``a-gpu``. A backend's name matches its own targets
    only: ``a-web-wasm`` is no target of ``a`` if there is a backend ``a-web``.
    """
    owner = owner_of(target)
    fits = [
        name
        for name in names
        if target == name or (target.startswith(f"{name}-") and len(name) >= len(owner))
    ]
    return max(fits, key=len) if fits else None


_LONGEST = 400  # characters of a line of an error's text
WIDTH = 79  # a headline is a summary line of pytest and a heading of reports


def verdict(
    outcome: Outcome,
    headline: str,
    *sections: Section,
    numbers: Mapping[str, float] | None = None,
    advice: str = "",
    command: str = "",
) -> Verdict:
    """A verdict with the headline cut to one line; empty sections and numbers that are not finite are omitted."""
    finite = {name: float(value) for name, value in (numbers or {}).items() if math.isfinite(value)}
    return Verdict(
        outcome=outcome,
        headline=plain(headline, WIDTH),
        sections=with_content(sections),
        numbers=finite,
        advice="" if outcome == "pass" else advice,
        command=command,
    )


def with_content(sections: Iterable[Section]) -> tuple[Section, ...]:
    """The sections that have rows or text."""
    return tuple(section for section in sections if section.rows or section.text)


class LimitResult(NamedTuple):
    """A limit of a check that was compared: the headline, whether it holds, and its table row without the verdict."""

    headline: str
    holds: bool
    row: tuple[str, ...]


def verdict_of_limits(
    limits: Sequence[LimitResult], *sections: Section, numbers: Mapping[str, float], advice: str
) -> Verdict:
    """Pass if each limit holds. The headline states the first broken limit, else the first limit."""
    broken = [limit for limit in limits if not limit.holds]
    budget = Section(
        title="Budget",
        headers=("metric", "value", "budget", "verdict"),
        rows=tuple((*limit.row, "pass" if limit.holds else "fail") for limit in limits),
    )
    decisive = broken[0] if broken else limits[0]
    outcome: Outcome = "fail" if broken else "pass"
    return verdict(outcome, decisive.headline, budget, *sections, numbers=numbers, advice=advice)


def raised(error: BaseException) -> Verdict:
    """The verdict of a check whose data, metric or backend raised an error."""
    kind, what, cure = f"{type(error).__name__}: ", str(error), ""
    if isinstance(error, QdqspecError):
        kind, what, cure = "", error.what, error.cure or ""
    text = "\n".join(plain(line, _LONGEST) for line in str(error).splitlines() if line.strip())
    return verdict(
        "fail",
        f"not judged: {plain(kind + what, _LONGEST)}",
        Section(title=ERROR_TITLE, text=kind + text),
        advice=cure,
    )


def timed_out(limit: str, known: Verdict | None = None) -> Verdict:
    """The verdict of a check that was not decided within the run's time limit; ``known`` is its state at the limit."""
    return verdict(
        "inconclusive",
        f"not decided within the time limit of {limit}",
        *(() if known is None else (Section(title="Known by then", text=known.headline), *known.sections)),
        numbers={} if known is None else known.numbers,
        advice="Run it again: it continues where this run stopped. Or raise --qdq-time-limit.",
    )


def unmeasured(what: str, advice: str) -> Verdict:
    """The verdict of a check whose evidence is missing."""
    return verdict("inconclusive", f"{what}: nothing to judge", advice=advice)


def untimed(what: str, evidence: Evidence) -> Verdict:
    """The verdict of a check of times in a run that takes none."""
    if evidence.status == "untimed":
        return unmeasured(
            f"no {what}: selected by coverage, not timed",
            "Time it on a machine with the device: tune with --start-from this scheme, or --qdq-mode=measure.",
        )
    return unmeasured(f"no {what} was measured, as in mode 'verify'", "Run without --qdq-mode=verify.")
