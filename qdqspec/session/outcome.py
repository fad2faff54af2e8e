"""The result of a finished search: the confirmation of its finalists, and all that a report states of it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qdqspec.checks.rejected import why_text
from qdqspec.errors import BackendError
from qdqspec.graph.float32 import FLOAT16
from qdqspec.preparation.float_types import note_float_types, other_references
from qdqspec.search.loop import candidates_of
from qdqspec.search.select import raw_winner
from qdqspec.session.confirm import Confirmed, confirm
from qdqspec.session.cut_short import cut_short_text
from qdqspec.session.kernels import known_candidates, rejected_candidates
from qdqspec.types import (
    FLOAT32,
    GIVEN,
    BlockError,
    Interval,
    LatencyEvidence,
    LayerTime,
    Placement,
    RejectedCandidate,
    SearchResult,
    Trial,
)
from qdqspec.units import count_text, interval_text, ratio_text

if TYPE_CHECKING:
    from qdqspec.session.tuning import Tuning

ERRORS_SHARE = 0.1  # of the time of a search, for the error of single blocks that it did not need


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome of a search: its result, the confirming measurement if it times, and the winner before it.

    ``confirmed`` are the finalists' lines for the journal, by role.
    """

    result: SearchResult
    latency: LatencyEvidence | None
    raw_winner: Placement
    confirmed: tuple[tuple[str, Trial], ...]

    @property
    def intervals(self) -> dict[str, Interval]:
        """Confirmed ratios to the reference, by digest of the placement; empty without timing."""
        if self.latency is None:
            return {}
        ratios = self.latency.ratios
        found = {trial.placement.digest: ratios[role] for role, trial in self.confirmed if role in ratios}
        return {**found, self.result.winner.digest: ratios["tuned"]}


def finish(tuning: Tuning) -> Tuned:
    """Rebuild the finalists of a search, time them together, select the final model, and describe the result."""
    prepared, trials = tuning.prepared, tuple(tuning.search.trials)
    tuning.prepared.resources.report_step("confirming")
    confirmed = confirm(
        trials,
        prepared.space.resolve(prepared.space.everything()),
        tuning.bench,
        tuning.constraint,
        tuning.search.deadline,
        pareto=prepared.case.tune.objective == "pareto",
        beside=other_references(prepared, tuning.folder),
    )
    note_float_types(prepared, confirmed.latency)
    confirmed = _with_profiles(tuning, confirmed)
    winner = next(trial.placement for role, trial in confirmed.lines if role == "winner")
    _note_given(tuning, confirmed)
    return Tuned(
        result=_result(tuning, confirmed),
        latency=confirmed.latency,
        raw_winner=raw_winner(trials) or winner,
        confirmed=confirmed.lines,
    )


def _result(tuning: Tuning, confirmed: Confirmed) -> SearchResult:
    prepared, search, choice = tuning.prepared, tuning.search, confirmed.choice
    errors, errors_missing = _block_errors(tuning)
    seconds, cpu = (now - then for now, then in zip(_now(), tuning.started, strict=True))
    rejected, cut_short, ended = _rejected(tuning, confirmed), _cut_short(tuning), _ended(tuning)
    reasons = (choice.reason, why_text(rejected), _rehearsed(tuning, confirmed), cut_short or ended)
    return SearchResult(
        winner=choice.placement,
        trials=confirmed.trials,
        unchanged=choice.unchanged,
        reason=prepared.nothing or "; ".join(filter(None, reasons)),
        strategy=tuning.strategy,
        seconds=seconds,
        cpu_seconds=cpu,
        eps=search.eps,
        blocks=len(prepared.space.units),
        regions=len(prepared.regions),
        patterns=len({region.pattern for region in prepared.regions}),
        float_runs=1e3 * seconds / confirmed.latency.samples["reference"].median_ms("wall"),
        ended_by=search.ended_by,
        cut_short=cut_short,
        ended=ended,
        rejected=rejected,
        front=confirmed.front,
        accuracy=tuning.constraint.bound(choice.placement),
        limits=tuning.constraint.limits,
        errors=errors,
        errors_missing=errors_missing,
        corrections=prepared.corrections.gains,
        converted_from=FLOAT16 if prepared.is_converted else "",
    )


def _now() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def _cut_short(tuning: Tuning) -> str:
    """The steps that the search did not reach, if a limit ended it."""
    prepared = tuning.prepared
    return cut_short_text(
        tuning.search.ended_by,
        tuning.search.trials,
        prepared.case.tune,
        usual=tuning.usual_trials,
        steps=getattr(tuning.make, "steps", {}),
        untried=prepared.corrections.untried,
    )


def _ended(tuning: Tuning) -> str:
    """The reason why a search ended, if no limit ended it and its strategy estimates the gain of a build."""
    search = tuning.search
    if search.ended_by or not search.least_gain:
        return ""
    built = count_text(candidates_of(search.trials), "build")
    return f"the search ended after {built}: less than {search.least_gain:.0%} of the time is expected of another"


def _note_given(tuning: Tuning, confirmed: Confirmed) -> None:
    """Note the time and the SQNR of the model as given, if it is quantized."""
    trial = next((trial for trial in confirmed.trials if trial.placement.given), None)
    if trial is None:
        return
    if not trial.ok:
        tuning.prepared.note_once(f"the model as given did not run: {trial.error}")
        return
    role = "tuned" if confirmed.choice.placement.given else GIVEN
    ratio, sqnr_db = confirmed.latency.ratios.get(role), tuning.constraint.sqnr_db(trial)
    took = ratio_text(trial.ratio or 1.0 if ratio is None else ratio.median)
    took += "" if ratio is None else f" (95 %: {interval_text(ratio)})"
    error = "" if sqnr_db is None else f", with {sqnr_db:.1f} dB"
    missed = "" if tuning.constraint.reaches(trial) else ", which misses the limits"
    selected = "; it is selected" if confirmed.choice.placement.given else ""
    tuning.prepared.note_once(
        f"the given model's own placement takes {took} of the time of its float form{error}{missed}{selected}"
    )


def _with_profiles(tuning: Tuning, confirmed: Confirmed) -> Confirmed:
    """The same with layer times of the selected model, or of the best candidates if the reference is selected.

    They are taken now if no trial has any. Without time for a build, or if they cannot be taken, there are none.
    """
    choice, deadline = confirmed.choice, tuning.search.deadline
    trials = [*confirmed.trials, *(trial for _, trial in confirmed.lines)]
    names = [choice.placement.digest]
    if choice.unchanged:
        names = [one.placement for one in _rejected(tuning, confirmed)[:2]]
    taken: dict[str, tuple[LayerTime, ...]] = {}
    for digest in names:
        built = [t for t in trials if t.ok and t.placement.digest == digest and not t.subgraph]
        has_time = deadline.run_left() != 0 and deadline.allows(trials[0].build_seconds, times=2)
        if not built or any(trial.layers for trial in built) or not has_time:
            continue
        tuning.prepared.resources.report_step("timing the layers of a candidate")
        with suppress(BackendError):
            taken[digest] = tuning.bench.layers_of(built[0].placement)

    def profiled(trial: Trial) -> Trial:
        layers = None if trial.subgraph or not trial.ok else taken.get(trial.placement.digest)
        return trial if layers is None else replace(trial, layers=layers)

    trials, lines = list(map(profiled, confirmed.trials)), [(r, profiled(t)) for r, t in confirmed.lines]
    for digest in taken:
        line = next((trial for _, trial in lines if trial.placement.digest == digest), None)
        trial = next((trial for trial in trials if trial.placement.digest == digest), None)
        if trial is None and line is not None:  # everything quantized, which the search did not build
            trials.append(line)
        elif line is None and trial is not None:  # the journal has the trial without layers
            number = len(confirmed.trials) + len(lines)
            lines.append(("profiled", replace(trial, number=number, phase="confirm", incumbent=False)))
    return replace(confirmed, trials=tuple(trials), lines=tuple(lines))


def _rejected(tuning: Tuning, confirmed: Confirmed) -> tuple[RejectedCandidate, ...]:
    """The candidates to compare with the reference, if that is selected."""
    if not confirmed.choice.unchanged:
        return ()
    ops = {node.name: node.op_type for node in tuning.prepared.model.nodes}
    plain = confirmed.latency.ratios.get(FLOAT32)
    known = known_candidates(
        confirmed.trials,
        dict(confirmed.lines),
        confirmed.ratios,
        tuning.constraint,
        scale=1.0 if plain is None else plain.median,
    )
    # the profile of a converted model is not that of the reference
    layers = confirmed.trials[0].layers if plain is None else ()
    return rejected_candidates(known, layers, tuning.constraint, ops)


def _block_errors(tuning: Tuning) -> tuple[tuple[BlockError, ...], str]:
    """The error of each block alone, or why it is missing; measured now if the search did not need it."""
    if tuning.oracle is None:
        if not tuning.prepared.space.units:
            return (), "no block can be quantized"
        if tuning.constraint.admission is None:
            return (), "the search had neither an accuracy constraint nor accuracy as an objective"
        return (), "the device is simulated"
    tuning.prepared.resources.report_step("measuring the error of each block")
    deadline = tuning.search.deadline
    return tuning.oracle.block_errors(deadline.share(ERRORS_SHARE, ERRORS_SHARE * deadline.spent))


def _rehearsed(tuning: Tuning, confirmed: Confirmed) -> str:
    """The rehearsed figures for the reason of a choice."""
    choice, least = confirmed.choice, tuning.constraint.min_sqnr_db
    if tuning.oracle is None:
        return ""
    if choice.unchanged:
        return tuning.oracle.refused_text(least)
    return "" if least is None or choice.placement.given else tuning.oracle.text(choice.placement)
