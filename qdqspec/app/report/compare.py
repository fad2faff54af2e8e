"""Compares the latency of the cases of two run records.

A case counts as faster or slower only if both the bootstrap interval over fresh builds and a rank test show
it; otherwise it is reported as the same. The runs were not interleaved: the drift of the reference model
between them may apply to the tuned model too, so the interval covers the change with and without it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from qdqspec._core.node_digests import changes_text
from qdqspec._core.units import count_text, ms_text, percent_text, plain
from qdqspec.app.report.tables import Column, Table, known, named_cases
from qdqspec.errors import StateError
from qdqspec.timing.stats import BuildTimes, builds_of, change_between
from qdqspec.types import Evidence, Interval, LatencyEvidence, RunRecord, TimeChange

SpeedWord: TypeAlias = Literal["faster", "same", "slower", "not timed"]
_REPORTED_DRIFT = 0.01
_ORDER: tuple[SpeedWord, ...] = ("slower", "faster", "same", "not timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCase:
    """One case of both runs: medians in milliseconds on the gating clock, and the change."""

    case: str
    word: SpeedWord
    before_ms: float | None = None
    after_ms: float | None = None
    change: TimeChange | None = None
    notes: tuple[str, ...] = ()

    def is_slower_beyond(self, allowed: float) -> bool:
        """Whether the case is significantly slower, and the estimate exceeds ``allowed``."""
        return self.word == "slower" and self.change is not None and self.change.builds.median > 1 + allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All cases, the slower ones first; cases of only one run by name."""

    device: str
    cases: tuple[ComparedCase, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]


def compare_runs(before: RunRecord, after: RunRecord) -> Comparison:
    """Compare the latency of the selected models. Raises `StateError` if the runs are not comparable."""
    left, right = _by_name(before), _by_name(after)
    common = [name for name in left if name in right]
    if not common:
        raise StateError("the runs have no case in common", cure="compare two runs of the same specs")
    for name in common:
        _refuse_unlike(name, left[name], right[name])
    cases = [_compare_case(name, left[name], right[name]) for name in common]
    return Comparison(
        device=left[common[0]].device.key,
        cases=tuple(sorted(cases, key=lambda case: _ORDER.index(case.word))),
        only_before=tuple(name for name in left if name not in right),
        only_after=tuple(name for name in right if name not in left),
    )


def comparison_text(comparison: Comparison) -> str:
    """The table, other differences, cases of only one run, and a summary sentence."""
    table = Table.of(
        "",
        comparison.cases,
        Column("case", lambda case: plain(case.case)),
        Column("A ms", lambda case: known(ms_text, case.before_ms)),
        Column("B ms", lambda case: known(ms_text, case.after_ms)),
        Column(
            "change", lambda case: known(lambda change: percent_text(change.builds.median - 1), case.change)
        ),
        Column("95 % interval", lambda case: known(lambda change: _bounds_text(change.builds), case.change)),
        Column("verdict", lambda case: case.word),
    )
    lines = [table.text]
    lines += [f"note: {case.case}: {note}" for case in comparison.cases for note in case.notes]
    lines += [f"only in A: {plain(name)}" for name in comparison.only_before]
    lines += [f"only in B: {plain(name)}" for name in comparison.only_after]
    counts = Counter(case.word for case in comparison.cases)
    counted = ", ".join(f"{counts[word]} {word}" for word in _ORDER if counts[word])
    lines.append(f"{count_text(len(comparison.cases), 'case')} on {plain(comparison.device)}: {counted}")
    return "\n".join(lines)


def _bounds_text(change: Interval) -> str:
    return f"{percent_text(change.low - 1)} to {percent_text(change.high - 1)}"


def comparison_to_json(comparison: Comparison, allowed: float) -> dict[str, Any]:
    """The comparison as data; ``ratio`` is B over A, ``beyond`` whether the case is slower by more than ``fail_on``."""
    cases = [
        {
            "case": case.case,
            "verdict": case.word,
            "beyond": case.is_slower_beyond(allowed),
            "a_ms": case.before_ms,
            "b_ms": case.after_ms,
            "ratio": change and change.builds.median,
            "ci95": change and [change.builds.low, change.builds.high],
            "change": change and change.builds.median - 1,
            "change_ci95": change and [change.builds.low - 1, change.builds.high - 1],
            "p_value": change and change.p_value,
            "notes": list(case.notes),
        }
        for case in comparison.cases
        for change in [case.change]
    ]
    return {
        "schema_version": 1,
        "device": comparison.device,
        "fail_on": allowed,
        "cases": cases,
        "counts": Counter(case.word for case in comparison.cases),
        "only_in_a": list(comparison.only_before),
        "only_in_b": list(comparison.only_after),
    }


def _by_name(record: RunRecord) -> dict[str, Evidence]:
    """Cases by name; with their folders if two specs of the run have the same name."""
    return {name: case.evidence for case, name in named_cases(record.cases)}


def _refuse_unlike(name: str, before: Evidence, after: Evidence) -> None:
    unlike = [
        f"{what} of {plain(name)} is {plain(left)} in A and {plain(right)} in B"
        for what, left, right in (
            ("device", before.device.key, after.device.key),
            ("backend", before.target, after.target),
        )
        if left != right
    ]
    if before.latency and after.latency and before.latency.clock != after.latency.clock:
        unlike.append(f"{plain(name)} was timed on two clocks")
    if unlike:
        raise StateError(
            f"the runs are not comparable: {unlike[0]}",
            cure="compare runs of one backend on one device, with the same --qdq-threads",
        )


def _compare_case(name: str, before: Evidence, after: Evidence) -> ComparedCase:
    left, right = _read_times(name, before.latency), _read_times(name, after.latency)
    notes = _note_differences(before, after)
    if left is None or right is None or before.latency is None or after.latency is None:
        return ComparedCase(case=name, word="not timed", notes=notes)
    drift = _drift_of_reference(before, after)
    if abs(drift - 1) > _REPORTED_DRIFT:
        notes += (
            f"the reference took {percent_text(drift - 1)} in B: the bounds cover the change with and without that",
        )
    change = _widen_by_drift(change_between(right, left), drift)
    return ComparedCase(
        case=name,
        word=_choose_word(change),
        before_ms=before.latency.samples["tuned"].median_ms(before.latency.clock),
        after_ms=after.latency.samples["tuned"].median_ms(after.latency.clock),
        change=change,
        notes=notes,
    )


def _read_times(name: str, latency: LatencyEvidence | None) -> BuildTimes | None:
    if latency is None or "tuned" not in latency.samples:
        return None
    roles = {
        role: builds_of(samples, latency.clock, latency.builds) for role, samples in latency.samples.items()
    }
    if not all(roles.values()) or not all(0 < ms < math.inf for r in roles.values() for b in r for ms in b):
        raise StateError(f"{plain(name)} has no usable times", cure="run it again with --qdq-json")
    tuned = roles.pop("tuned")
    # If the reference is the selected model, both roles have the same builds, and count once.
    return BuildTimes(
        tuned=tuned, beside=tuple({builds: None for builds in roles.values() if builds != tuned})
    )


def _drift_of_reference(before: Evidence, after: Evidence) -> float:
    """The reference's time in the later run over that in the earlier one; 1 if the models differ."""
    if before.latency is None or after.latency is None or before.model_sha256 != after.model_sha256:
        return 1.0
    if "reference" not in before.latency.samples or "reference" not in after.latency.samples:
        return 1.0
    return after.latency.median_ms("reference") / before.latency.median_ms("reference")


def _widen_by_drift(change: TimeChange, drift: float) -> TimeChange:
    """One interval that covers the change with and without correction for the drift."""
    less, more = min(1.0, 1 / drift), max(1.0, 1 / drift)
    builds, ranks = change.builds, change.ranks
    return replace(
        change,
        builds=replace(builds, low=builds.low * less, high=builds.high * more),
        ranks=replace(ranks, low=ranks.low * less, high=ranks.high * more),
    )


def _choose_word(change: TimeChange) -> SpeedWord:
    if change.builds.high < 1 and change.ranks.high < 1:
        return "faster"
    return "slower" if change.builds.low > 1 and change.ranks.low > 1 else "same"


def _note_differences(before: Evidence, after: Evidence) -> tuple[str, ...]:
    """Other differences between the runs that may explain a change."""
    notes = []
    if before.model_sha256 != after.model_sha256:
        what = changes_text(before.model_nodes, after.model_nodes)
        notes.append(f"the model is another one{what and f': {what}'}")
    if before.search and after.search and before.search.winner.digest != after.search.winner.digest:
        notes.append("the placement is another one")
    old, new = before.device.details, after.device.details
    moved = [fact for fact in sorted(old.keys() & new.keys()) if old[fact] != new[fact]]
    return (*notes, *(f"{plain(fact)} was {plain(old[fact])}, is {plain(new[fact])}" for fact in moved))
