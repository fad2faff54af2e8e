"""Comparisons as text and JSON: the latency of two run records, several runtimes, and two versions of one runtime.

A case of two records counts as faster or slower only if both the bootstrap interval over fresh builds and a rank test
show it; otherwise it is reported as the same. The runs were not interleaved: the drift of the reference model between
them may apply to the tuned model too, so the interval covers the change with and without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from qdqspec._core.node_digests import changes_text
from qdqspec._core.units import (
    count_text,
    db_text,
    interval_text,
    list_text,
    ms_text,
    percent_text,
    plain,
    ratio_text,
    shapes_text,
)
from qdqspec.app.report.facts import LONG
from qdqspec.app.report.tables import RIGHT, Column, Table, known, median_text, named_cases
from qdqspec.errors import StateError
from qdqspec.types import (
    Evidence,
    LatencyEvidence,
    RunRecord,
    RuntimeComparison,
    RuntimeModel,
    TimeChange,
    UpgradeCheck,
)

if TYPE_CHECKING:
    from qdqspec.timing import BuildTimes

MOST_LAYERS = 12  # of a case in the text of an upgrade check
SpeedWord: TypeAlias = Literal["faster", "same", "slower", "not timed"]
_ORDER: tuple[SpeedWord, ...] = ("slower", "faster", "same", "not timed")


# ---- two runs ------------------------------------------------------------------------------------


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
    left, right = (
        {name: case.evidence for case, name in named_cases(record.cases)} for record in (before, after)
    )
    common = [name for name in left if name in right]
    if not common:
        raise StateError("the runs have no case in common", cure="compare two runs of the same specs")
    for name in common:
        one, other = left[name], right[name]
        unlike = [
            f"{what} of {plain(name)} is {plain(here)} in A and {plain(there)} in B"
            for what, here, there in (
                ("device", one.device.key, other.device.key),
                ("backend", one.target, other.target),
                ("shapes", _shapes_text(one, other), _shapes_text(other, one)),
            )
            if here != there
        ]
        if one.latency and other.latency and one.latency.clock != other.latency.clock:
            unlike.append(f"{plain(name)} was timed on two clocks")
        if unlike:
            raise StateError(
                f"the runs are not comparable: {unlike[0]}",
                cure="compare runs of one backend on one device, with the same --qdq-threads and shapes",
            )
    cases = [_compare_case(name, left[name], right[name]) for name in common]
    return Comparison(
        device=left[common[0]].device.key,
        cases=tuple(sorted(cases, key=lambda case: _ORDER.index(case.word))),
        only_before=tuple(name for name in left if name not in right),
        only_after=tuple(name for name in right if name not in left),
    )


def comparison_text(comparison: Comparison) -> str:
    """The table, other differences, cases of only one run, and a summary sentence."""

    def bounds(change: TimeChange) -> str:
        return f"{percent_text(change.builds.low - 1)} to {percent_text(change.builds.high - 1)}"

    table = Table.of(
        "",
        comparison.cases,
        Column("case", lambda case: plain(case.case)),
        Column("A ms", lambda case: known(ms_text, case.before_ms)),
        Column("B ms", lambda case: known(ms_text, case.after_ms)),
        Column(
            "change", lambda case: known(lambda change: percent_text(change.builds.median - 1), case.change)
        ),
        Column("95 % interval", lambda case: known(bounds, case.change)),
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
        "device": comparison.device,
        "fail_on": allowed,
        "cases": cases,
        "counts": Counter(case.word for case in comparison.cases),
        "only_in_a": list(comparison.only_before),
        "only_in_b": list(comparison.only_after),
    }


def _compare_case(name: str, before: Evidence, after: Evidence) -> ComparedCase:
    """The change of a case: one interval that covers it with and without the drift of the reference."""
    left, right = _read_times(name, before.latency), _read_times(name, after.latency)
    notes = _note_differences(before, after)
    if left is None or right is None or before.latency is None or after.latency is None:
        for run, times, found in (("A", left, before), ("B", right, after)):
            if times is None:
                why = found.skipped and f": {plain(found.skipped, LONG)}"
                notes += (f"not timed in {run}{why}",)
        return ComparedCase(case=name, word="not timed", notes=notes)
    drift = 1.0  # the reference's time in the later run over that in the earlier one, of one model
    timed = (latency.samples for latency in (before.latency, after.latency))
    if before.model_sha256 == after.model_sha256 and all("reference" in samples for samples in timed):
        drift = after.latency.median_ms("reference") / before.latency.median_ms("reference")
    if abs(drift - 1) > 0.01:
        notes += (
            f"the reference's time changed by {percent_text(drift - 1)} in B: the bounds are with and without it",
        )
    change, less, more = right.change_from(left), min(1.0, 1 / drift), max(1.0, 1 / drift)
    builds, ranks = (
        replace(found, low=found.low * less, high=found.high * more)
        for found in (change.builds, change.ranks)
    )
    word: SpeedWord = "same"
    if builds.high < 1 and ranks.high < 1:
        word = "faster"
    elif builds.low > 1 and ranks.low > 1:
        word = "slower"
    return ComparedCase(
        case=name,
        word=word,
        before_ms=before.latency.samples["tuned"].median_ms(before.latency.clock),
        after_ms=after.latency.samples["tuned"].median_ms(after.latency.clock),
        change=replace(change, builds=builds, ranks=ranks),
        notes=notes,
    )


def _shapes_text(found: Evidence, other: Evidence) -> str:
    """The shapes that a case was timed at, of the inputs whose shapes both records have."""
    known = {name for profile in other.profiles for name in profile.shapes}
    shapes = (
        {name: own for name, own in profile.opt().items() if name in known} for profile in found.profiles
    )
    return "; ".join(filter(None, map(shapes_text, shapes)))


def _read_times(name: str, latency: LatencyEvidence | None) -> BuildTimes | None:
    from qdqspec.timing import BuildTimes, builds_of

    if latency is None or "tuned" not in latency.samples:
        return None
    roles = {
        role: builds_of(samples.on(latency.clock), latency.builds)
        for role, samples in latency.samples.items()
    }
    if not all(roles.values()) or not all(0 < ms < math.inf for r in roles.values() for b in r for ms in b):
        raise StateError(f"{plain(name)} has no usable times", cure="run it again with --qdq-json")
    tuned = roles.pop("tuned")
    # If the reference is the selected model, both roles have the same builds, and count once.
    return BuildTimes(
        tuned=tuned, beside=tuple({builds: None for builds in roles.values() if builds != tuned})
    )


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


# ---- several runtimes ----------------------------------------------------------------------------


def runtimes_text(found: Sequence[RuntimeComparison]) -> str:
    """The table and sentences of each comparison; empty if there are none."""
    parts = [(runtimes_table(one), conclusions(one)) for one in found]
    return "\n\n".join("\n".join([table.title, table.text, *lines]) for table, lines in parts)


def runtimes_table(found: RuntimeComparison) -> Table:
    """Each model of each runtime, the fastest first; models that were not timed are last."""

    def interval(model: RuntimeModel) -> str:
        return "" if model.label == found.reference else known(interval_text, model.ratio)

    def sqnr(model: RuntimeModel) -> str:
        return "" if model.ratio is None else known(db_text, model.sqnr_db)

    def pairs(model: RuntimeModel) -> str:
        return str(model.pairs) if model.ratio is not None and model.model == "tuned" else ""

    def remarks(model: RuntimeModel) -> str:
        if model.ratio is None:
            return f"not timed: {plain(model.failure, 80)}"
        words = ["reference"] if model.label == found.reference else []
        if model.label == found.winner:
            words.append("fastest")
        elif model in found.tied:
            words.append("not proved slower")
        if model.limit_db is not None:
            words.append(f"below {model.limit_db:g} dB")
        return ", ".join(words)

    builds = count_text(found.builds, "build")
    return Table.of(
        f"Runtimes of {plain(found.name)} ({found.clock} clock, {builds} each, interleaved; reference: "
        f"{plain(found.reference)})",
        sorted(found.models, key=lambda m: (m.ratio is None, m.ratio.median if m.ratio else 0.0)),
        Column("runtime", lambda model: plain(model.target, 30)),
        Column("model", lambda model: model.model),
        Column("ms", lambda model: known(ms_text, model.median_ms), RIGHT),
        Column("of reference", lambda model: median_text(model.ratio), RIGHT),
        Column("95 % interval", interval),
        Column("SQNR dB", sqnr, RIGHT),
        Column("pairs", pairs, RIGHT),
        Column("", remarks),
    )


def conclusions(found: RuntimeComparison) -> list[str]:
    """Sentences: the winner, models not proved slower, and float models that are faster than a tuned model."""
    winner = found.named(found.winner)
    assert winner.ratio is not None  # a winner was timed
    head = f"fastest that meets the accuracy limits: {_model_text(winner)}"
    if winner.label != found.reference:
        head += (
            f", {ratio_text(winner.ratio.median)} of the time of {plain(found.reference)} "
            f"(95 %: {interval_text(winner.ratio)})"
        )
    lines = [f"{plain(found.name)}: {head}"]
    if found.tied:
        lines.append(f"not proved slower than it: {', '.join(_model_text(model) for model in found.tied)}")
    lines += [  # the intervals, over the same reference, exclude that the second is as fast
        f"{_model_text(fast)} is faster than {_model_text(slow)}"
        for fast in found.models
        for slow in found.models
        if fast.model == "float" and slow.model == "tuned"
        if fast.ratio and slow.ratio and fast.ratio.high < slow.ratio.low
    ]
    lines += [f"{_model_text(m)} was not timed: {plain(m.failure, LONG)}" for m in found.models if m.failure]
    return lines


def _model_text(model: RuntimeModel) -> str:
    return f"{'the model tuned for' if model.model == 'tuned' else 'float on'} {plain(model.target)}"


# ---- two versions of a runtime -------------------------------------------------------------------


def upgrade_text(check: UpgradeCheck) -> str:
    """Versions, a row for each case, the layers that changed, and a summary."""
    lines = []
    for backend, here in check.here.items():
        there = check.there.get(backend, {})
        lines += [
            f"{backend}: {plain(key)} {plain(here.get(key, '-'))} here, {plain(there.get(key, '-'))} there"
            for key in sorted({*here, *there})
            if here.get(key) != there.get(key)
        ] or [f"{backend}: both environments report the same versions"]
    table = Table.of(
        "",
        check.cases,
        Column("case", lambda case: plain(case.case, 44)),
        Column("here ms", lambda case: known(ms_text, case.here_ms)),
        Column("there ms", lambda case: known(ms_text, case.there_ms)),
        Column("change", lambda case: median_text(case.change)),
        Column("95 % interval", lambda case: known(interval_text, case.change)),
        Column("of float here", lambda case: median_text(case.ratio_here)),
        Column("there", lambda case: median_text(case.ratio_there)),
        Column("SQNR dB", lambda case: known(db_text, case.sqnr_there_db)),
        Column("", lambda case: case.state),
    )
    lines.append(table.text)
    for case in (one for one in check.cases if one.layers):
        lines.append(f"{plain(case.case)}: {count_text(len(case.layers), 'group')} of kernels changed")
        for change in case.layers[:MOST_LAYERS]:
            converted = [f"conversion of {tensor}" for tensor in change.tensors]
            names = plain(list_text(change.nodes or converted or ("unnamed kernel",), 4))
            moved = f"{ms_text(change.before_ms)} to {ms_text(change.after_ms)} ms"
            lines.append(f"  {names}: {', '.join(change.kinds)}; {moved}")
            if change.before != change.after:
                lines += [f"    - {plain(text, 120)}" for text in change.before]
                lines += [f"    + {plain(text, 120)}" for text in change.after]
        if len(case.layers) > MOST_LAYERS:
            lines.append(f"  and {len(case.layers) - MOST_LAYERS} more; --json lists all")
    lines += [f"{plain(c.case)}: {c.state}: {plain(c.reason, 400)}" for c in check.cases if c.state != "ok"]
    good = sum(case.state == "ok" for case in check.cases)
    lines.append(f"{good} of {count_text(len(check.cases), 'tuned model')} fast and accurate enough there")
    return "\n".join(lines)
