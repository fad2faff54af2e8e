"""Records made of evidence: verdicts and run records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qdqspec.types.evidence import Evidence
from qdqspec.types.runtimes import CommonPlacement, RuntimeComparison
from qdqspec.types.words import Outcome, Severity

ERROR_TITLE = "Error"  # of the section with the whole text of an error that kept a check from being judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled table of a verdict's body: ``rows`` under ``headers``, or free ``text``."""

    title: str
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check. ``headline`` is a complete sentence shorter than 80 columns."""

    outcome: Outcome
    headline: str
    sections: tuple[Section, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    advice: str = ""  # what to do next; empty for a pass
    command: str = ""  # a command that decides an inconclusive verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A verdict with its check."""

    id: str
    kind: str
    severity: Severity
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """One case of a run: its evidence and the results of its checks."""

    evidence: Evidence
    results: tuple[CheckResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, as input of reports. ``started`` is an ISO 8601 time in UTC.

    ``runtimes`` are comparisons of cases that differ in the runtime only, ``common`` one placement for all of these.
    """

    version: str
    started: str
    seconds: float
    cases: tuple[CaseRecord, ...]
    runtimes: tuple[RuntimeComparison, ...] = ()
    common: tuple[CommonPlacement, ...] = ()
