"""The result of a finished search: the confirmation of its finalists, and all that a report states of it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qdqspec._core.units import count_text, interval_text, ratio_text
from qdqspec.app.evidence.kernels import rejected_candidates
from qdqspec.app.preparation.build_logs import LoggedJournal
from qdqspec.app.preparation.candidates import half_reference, note_float_types
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session.confirm import Confirmed, confirm
from qdqspec.app.session.tuning import Tuning, result_of, trials_of
from qdqspec.checks.rejected import why_text
from qdqspec.errors import BackendError
from qdqspec.graph.model import require_path
from qdqspec.search.loop import candidates_of
from qdqspec.search.select import is_candidate, raw_winner
from qdqspec.types import (
    FLOAT32,
    GIVEN,
    BlockError,
    Interval,
    LatencyEvidence,
    Placement,
    RejectedCandidate,
    SearchResult,
    Trial,
    TuneRules,
)

ERRORS_SHARE = (
    0.1  # of the search's time, for the errors of single blocks if the search has not measured them
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome of a search: its result, the confirming measurement if it times, and the winner before it.

    ``confirmed`` are the finalists' lines for the journal, by role, ``intervals`` confirmed ratios by digest.
    """

    result: SearchResult
    latency: LatencyEvidence | None
    raw_winner: Placement
    confirmed: tuple[tuple[str, Trial], ...]
    intervals: Mapping[str, Interval]


def tune_case(prepared: Prepared, journal: LoggedJournal) -> Tuned:
    """The whole search of a case: each trial is in the journal before the next one begins."""
    with Tuning(prepared, journal) as tuning:
        tuning.search.run()  # propose, rehearse, build, race; tell the strategy
        tuning.repair()  # candidates that just missed the SQNR limit
        return finish(tuning)  # finalists, built anew and timed together


def finish(tuning: Tuning) -> Tuned:
    """Rebuild the finalists of a search, time them together, select the final model, and describe the result."""
    prepared, trials = tuning.prepared, tuple(tuning.search.trials)
    prepared.resources.report_step("confirming")
    beside = half_reference(prepared, tuning.folder)
    if prepared.is_converted:  # the placements are of the model in float32
        beside["reference"] = require_path(prepared.given)
    confirmed = confirm(
        trials,
        prepared.space.resolve(prepared.space.everything()),
        tuning.bench,
        tuning.limits,
        tuning.search.deadline,
        pareto=prepared.case.tune.objective == "pareto",
        beside=beside,
    )
    note_float_types(prepared, confirmed.latency)
    placements = {role: trial.placement for role, trial in confirmed.lines}
    ratios = {placements[role].digest: ratio for role, ratio in confirmed.ratios.items()}
    choice = confirmed.choice.placement
    confirmed = _with_profiles(tuning, confirmed)
    _note_given(tuning, confirmed)
    return Tuned(
        result=_result(tuning, confirmed),
        latency=confirmed.latency,
        raw_winner=raw_winner(trials) or placements["winner"],
        confirmed=confirmed.lines,
        intervals={**ratios, choice.digest: confirmed.latency.ratios["tuned"]},
    )


def _result(tuning: Tuning, confirmed: Confirmed) -> SearchResult:
    prepared, search, choice = tuning.prepared, tuning.search, confirmed.choice
    errors, errors_missing = _block_errors(tuning)
    reference_ms = confirmed.latency.samples["reference"].median_ms("wall")
    rejected, ended, rules = _rejected(tuning, confirmed), _ended(tuning), prepared.case.tune
    cut_short = cut_short_text(
        search.ended_by,
        search.trials,
        rules,
        usual=trials_of(replace(rules, minutes=None), prepared.space, tuning.make),
        steps=getattr(tuning.make, "steps", {}),
        untried=prepared.corrections.untried,
    )
    refused = tuning.oracle.refused_text if tuning.oracle is not None and choice.unchanged else ""
    reasons = (choice.reason, why_text(rejected), refused, cut_short or ended)
    return result_of(
        prepared,
        tuning.started,
        winner=choice.placement,
        trials=confirmed.trials,
        unchanged=choice.unchanged,
        reason=prepared.nothing or "; ".join(filter(None, reasons)),
        strategy=tuning.strategy,
        eps=search.contest.eps,
        float_runs=1e3 * (time.monotonic() - tuning.started[0]) / reference_ms,
        ended_by=search.ended_by,
        cut_short=cut_short,
        ended=ended,
        rejected=rejected,
        front=confirmed.front,
        accuracy=tuning.limits.bound(choice.placement),
        errors=errors,
        errors_missing=errors_missing,
    )


def cut_short_text(
    ended_by: str,
    trials: Sequence[Trial],
    rules: TuneRules,
    *,
    usual: int,
    steps: Mapping[str, str],
    untried: Collection[str] = (),
) -> str:
    """A search that ended at a limit: the candidates built, the steps not reached, and the option to raise.

    ``usual`` is the number of candidates without a time limit, ``steps`` are the phases of the strategy in order, and
    ``untried`` the corrections not tried. Empty if no limit ended the search.
    """
    if not ended_by:
        return ""
    built = len({t.placement.digest for t in trials if is_candidate(t)})
    phases = {trial.phase for trial in trials if trial.placement.sites}
    reached = max((number for number, phase in enumerate(steps) if phase in phases), default=-1)
    missing = list(steps.values())[reached + 1 :]
    missing += [f"corrections ({', '.join(untried)})"] if untried else []
    not_reached = f", not reached: {', '.join(missing)}" if missing else ""
    of = f"{built} of about " if usual > built else ""
    return (
        f"the search ended at {ended_by}, before it was done: {of}{count_text(max(built, usual), 'candidate')} built"
        f"{not_reached}, give it more with {_option_to_raise(ended_by, built, rules, usual)}"
    )


def _option_to_raise(ended_by: str, built: int, rules: TuneRules, usual: int) -> str:
    """The option that raises a limit, with a value: 2 to 10 times the time, for the usual number of candidates."""
    if "run" in ended_by:
        return "--qdq-time-limit"
    if "build" in ended_by:
        return f"--trials {2 * usual} (tune.trials)"
    minutes = (rules.minutes or 1.0) * min(max(2.0, usual / max(built, 1)), 10.0)
    shown = math.ceil(minutes) if minutes > 2 else math.ceil(2 * minutes) / 2
    return f"--minutes {shown:g} (tune.minutes)"


def _ended(tuning: Tuning) -> str:
    """The reason why a search ended, if no limit ended it and its strategy estimates the gain of a build."""
    search = tuning.search
    least_gain = getattr(search.strategy, "least_gain", None)
    if search.ended_by or not least_gain:
        return ""
    built = count_text(candidates_of(search.trials), "build")
    return f"the search ended after {built}: less than {least_gain:.0%} of the time is expected of another"


def _note_given(tuning: Tuning, confirmed: Confirmed) -> None:
    """Note the time and the SQNR of the model as given, if it is quantized."""
    trial = next((trial for trial in confirmed.trials if trial.placement.given), None)
    if trial is None:
        return
    if not trial.ok:
        tuning.prepared.note_once(f"the model as given did not run: {trial.error}")
        return
    is_selected = confirmed.choice.placement.given
    ratio = confirmed.latency.ratios.get("tuned" if is_selected else GIVEN)
    sqnr_db = tuning.limits.figures(trial.placement).sqnr_db
    took = ratio_text(trial.ratio or 1.0 if ratio is None else ratio.median)
    took += "" if ratio is None else f" (95 %: {interval_text(ratio)})"
    error = "" if sqnr_db is None else f", with {sqnr_db:.1f} dB"
    missed = "" if tuning.limits.admits(trial.placement) else ", which misses the limits"
    tuning.prepared.note_once(
        f"the given model's own placement takes {took} of the time of its float form{error}{missed}"
        f"{'; it is selected' if is_selected else ''}"
    )


def _with_profiles(tuning: Tuning, confirmed: Confirmed) -> Confirmed:
    """The same with layer times, taken if there is time, of the selected model, or of the best if none is."""
    digests: Iterable[str] = [confirmed.choice.placement.digest]
    if confirmed.choice.unchanged:
        digests = [one.placement for one in _rejected(tuning, confirmed)[:2]]
    deadline, trials, lines = tuning.search.deadline, [*confirmed.trials], [*confirmed.lines]
    for digest in digests:
        known = [*trials, *(trial for _, trial in lines)]
        built = [t for t in known if t.ok and t.placement.digest == digest and not t.subgraph]
        has_time = deadline.run_left() != 0 and deadline.allows(trials[0].build_seconds, times=2)
        if not built or any(trial.layers for trial in built) or not has_time:
            continue
        tuning.prepared.resources.report_step("timing the layers of a candidate")
        try:
            profiled = replace(built[0], layers=tuning.bench.layers_of(built[0].placement))
        except BackendError:
            continue
        is_searched = any(trial is built[0] for trial in trials)
        trials = [profiled if trial is built[0] else trial for trial in trials]
        lines = [(role, profiled if trial is built[0] else trial) for role, trial in lines]
        if is_searched:  # the journal has the trial without layers
            line = replace(profiled, number=len(trials) + len(lines), phase="confirm", incumbent=False)
            lines.append(("profiled", line))
        else:  # everything quantized, which the search did not build
            trials.append(profiled)
    return replace(confirmed, trials=tuple(trials), lines=tuple(lines))


def _rejected(tuning: Tuning, confirmed: Confirmed) -> tuple[RejectedCandidate, ...]:
    if not confirmed.choice.unchanged:
        return ()
    ops = {node.name: node.op_type for node in tuning.prepared.model.nodes}
    plain = confirmed.latency.ratios.get(FLOAT32)
    scale = 1.0 if plain is None else plain.median
    # the profile of a converted model is not that of the reference
    layers = confirmed.trials[0].layers if plain is None else ()
    found = confirmed.trials, confirmed.lines, confirmed.ratios
    return rejected_candidates(*found, layers, tuning.limits, ops, scale)


def _block_errors(tuning: Tuning) -> tuple[tuple[BlockError, ...], str]:
    """The error of each block alone, or why it is missing; measured now if the search did not need it."""
    if tuning.oracle is None:
        if not tuning.prepared.space.units:
            return (), "no block can be quantized"
        if not tuning.limits.are_measured:
            return (), "the search had neither an accuracy constraint nor accuracy as an objective"
        return (), "the device is simulated"
    tuning.prepared.resources.report_step("measuring the error of each block")
    deadline = tuning.search.deadline
    return tuning.oracle.block_errors(deadline.share(ERRORS_SHARE, ERRORS_SHARE * deadline.spent))
