"""The pipeline of a case, from its model to the verdict of a check.

    case > model > regions > units > space of placements > limits > corrections > strategy
                                                                                    |  ^
                                                                          placement v  | trial
                                                               rehearse > insert Q/DQ > build > race
                                                                                    |
                               finalists: built anew and timed with the reference > winner
                                                                                    |
                       latency, parity, accuracy, size, survival, lint > evidence > check > verdict

`CaseWork.judge` (`work.py`) is the whole pipeline. `find_winner` is its part up to the winner, which comes from the
cache if that passes its recheck, from a digest, or from a search now: `tune`. `Tuning` prepares a search, up to its
first build. Each step is done once for a case; docs/architecture.md names the modules of each step. `study` runs a
search step by step; `evidence.timing` and `app.upgrade` compare finished searches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from qdqspec._core.store import Store
from qdqspec._core.units import count_text, interval_text, metric_text, names_text, ratio_text
from qdqspec.app.evidence.builds import rejected_candidates
from qdqspec.app.evidence.timing import time_tuned
from qdqspec.app.preparation.files import (
    half_reference,
    note_float_types,
    refuse_own,
    take_results,
    write_patterns,
    write_results,
)
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.stored import (
    CORRECTIONS,
    JOURNAL,
    MODEL,
    PATTERNS,
    RAW_MODEL,
    REFERENCE,
    FinishedSearch,
    keep,
    make_folder,
    open_journal,
    other_winner,
    recall,
)
from qdqspec.app.session.confirm import Confirmed, confirm
from qdqspec.app.session.covering import cover_case, covers
from qdqspec.app.session.tuning import Tuned, Tuning, result_of, trials_of
from qdqspec.checks import why_text
from qdqspec.errors import BackendError, StateError
from qdqspec.graph import require_path
from qdqspec.search import candidates_of, is_candidate, raw_winner
from qdqspec.timing import CONFIRM_BUILDS, CONFIRM_ROUNDS
from qdqspec.types import (
    FLOAT32,
    GIVEN,
    BlockError,
    LatencyEvidence,
    Placement,
    RejectedCandidate,
    SearchResult,
    Trial,
    TuneRules,
)

Outcome: TypeAlias = Literal["faster", "inconclusive", "slower", "broken", "inaccurate"]


def find_winner(
    prepared: Prepared, store: Store, validate: Callable[[], None]
) -> tuple[FinishedSearch, LatencyEvidence | None]:
    """The finished search of a case, and its latency if that was measured; ``validate`` is called before a search."""
    settings = prepared.settings
    prepared.resources.report_step("reading the model and its data")
    known = None if settings.no_cache else recall(store, prepared.key)
    if known is not None:  # for other placements of this search, as another scheme
        prepared.keep_corrections(known.folder / CORRECTIONS, read_only=True)
    if settings.scheme is not None or settings.mode in ("measure", "verify"):
        found = known if settings.scheme is None else _placement_of(prepared, settings.scheme, known)
        if found is None:
            case, other = prepared.case, other_winner(store, prepared)
            raise StateError(
                f"no winner is known for {case.name} on this device, and mode '{settings.mode}' does not search"
                f"{other and f'; {other}'}",
                where=case.spec or case.model,
                cure="run it once with --qdq-mode=run",
            )
        if found is known:
            take_results(found, prepared.given, prepared.output)
        return found, None
    if known is not None and not settings.retune:
        is_kept, latency = _recheck_winner(prepared, known)
        if is_kept:
            take_results(known, prepared.given, prepared.output)
            return known, latency
    if known is not None:  # now rather than later: another process may store its own result meanwhile
        store.discard(prepared.key)
    return tune(prepared, store, validate)


def tune(
    prepared: Prepared, store: Store, validate: Callable[[], None]
) -> tuple[FinishedSearch, LatencyEvidence | None]:
    """Search for the fastest placement within the limits of a case; write its results to its folder and the cache.

    ``validate`` raises if inputs of the checks cannot be used. The latency is that of the confirmation, if any.
    """
    output, resources = prepared.output, prepared.resources
    refuse_own(output, (REFERENCE, MODEL, RAW_MODEL), prepared.given)  # before the work
    resources.report_step("checking the data")
    validate()
    with open_journal(output, prepared.journal_header, prepared.warnings) as journal:
        if known := len(journal.trials()):
            resources.report_wait(f"continues from {count_text(known, 'build')} in {output / JOURNAL}")
        prepared.keep_corrections(output / CORRECTIONS)
        if covers(prepared):
            tuned = cover_case(prepared, journal)
        else:
            with Tuning(prepared, journal) as tuning:
                # propose, rehearse, build, race; each trial is in the journal before the next one begins
                tuning.search.run()
                tuned = finish(tuning)  # finalists, built anew and timed together
        write_results(prepared, tuned.result, tuned.raw_winner, output)
        if tuned.latency is not None:
            write_patterns(prepared, tuned.result, tuned.intervals, output / PATTERNS)
        found = FinishedSearch(
            result=tuned.result,
            folder=output,
            is_cut_short=resources.seconds_left() == 0,  # by the time limit of the run: not cached
        )
        if not (prepared.settings.no_cache or found.is_cut_short):
            found = keep(store, found, prepared)
        # Last, because they mark the journal as finished: a result that could not be written is not searched again.
        for role, trial in tuned.confirmed:
            journal.append(trial, role=role)
    return found, tuned.latency


def finish(tuning: Tuning) -> Tuned:
    """Rebuild the finalists of a search, time them together, select the final model, and describe the result."""
    prepared, trials = tuning.prepared, tuple(tuning.search.trials)
    prepared.resources.report_step("confirming")
    beside = half_reference(prepared, tuning.folder)
    if prepared.converted_from:  # the placements are of the model in float32
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
    _note_refused(tuning)
    return Tuned(
        result=_result(tuning, confirmed),
        latency=confirmed.latency,
        raw_winner=raw_winner(trials) or placements["winner"],
        confirmed=confirmed.lines,
        intervals={**ratios, choice.digest: confirmed.latency.ratios["tuned"]},
    )


def _result(tuning: Tuning, confirmed: Confirmed, *, errors_share: float = 0.05) -> SearchResult:
    """The result of a search.

    The errors of single blocks that the search has not measured may take ``errors_share`` of the time that it took:
    with less they are of fewer samples, or missing, in the reports of more searches.
    """
    prepared, search, choice, oracle = tuning.prepared, tuning.search, confirmed.choice, tuning.oracle
    errors, missing = tuple[BlockError, ...](), "the device is simulated"
    if oracle is not None:
        prepared.resources.report_step("measuring the error of each block")
        seconds, left = errors_share * search.deadline.spent, search.deadline.left
        errors, missing = oracle.block_errors(seconds if left is None else min(seconds, left))
    elif not prepared.space.units:
        missing = "no block can be quantized"
    elif not tuning.limits.are_measured:
        missing = "the search had neither an accuracy constraint nor accuracy as an objective"
    rejected, ended, ended_by = _rejected(tuning, confirmed), "", search.ended_by
    least_gain = getattr(search.strategy, "least_gain", None)
    if least_gain and not search.ended_by:  # the strategy estimates the gain of a build
        built = count_text(candidates_of(search.trials), "build")
        ended_by = f"expected gain below {100 * least_gain:g} %"
        ended = (
            f"the search ended after {built}: less than {least_gain:.0%} of the time is expected of another"
        )
    rules = prepared.case.tune
    usual = trials_of(replace(rules, minutes=None), prepared.space, tuning.make)
    cut_short = cut_short_text(search.ended_by, search.trials, rules, usual)
    refused = oracle.refused_text if oracle is not None and choice.unchanged else ""
    reasons = (choice.reason, why_text(rejected), refused, cut_short or ended)
    reference_ms = confirmed.latency.samples["reference"].median_ms("wall")
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
        ended_by=ended_by,
        cut_short=cut_short,
        ended=ended,
        rejected=rejected,
        front=confirmed.front,
        accuracy=tuning.limits.bound(choice.placement),
        errors=errors,
        errors_missing=missing,
    )


def cut_short_text(ended_by: str, trials: Sequence[Trial], rules: TuneRules, usual: int) -> str:
    """A search that ended at a limit: the candidates built, and the option to raise; empty if no limit ended it.

    ``usual`` is the number of candidates without a time limit.
    """
    if not ended_by:
        return ""
    built = len({t.placement.digest for t in trials if is_candidate(t)})
    of = f"{built} of about " if usual > built else ""
    if "run" in ended_by:
        option = "--qdq-time-limit"
    elif "build" in ended_by:
        option = f"--trials {2 * usual} (tune.trials)"
    else:  # 2 to 10 times the time, for the usual number of candidates
        minutes = (rules.minutes or 1.0) * min(max(2.0, usual / max(built, 1)), 10.0)
        shown = math.ceil(minutes) if minutes > 2 else math.ceil(2 * minutes) / 2
        option = f"--minutes {shown:g} (tune.minutes)"
    return (
        f"the search ended at {ended_by}, before it was done: {of}{count_text(max(built, usual), 'candidate')} built, "
        f"give it more with {option}"
    )


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


def _note_refused(tuning: Tuning) -> None:
    """Note the nodes with which no placement was built, with the error of the smallest one."""
    units: Sequence[str] = getattr(tuning.search.strategy, "refused", ())
    if units:
        failed = (trial for trial in tuning.search.trials if not trial.ok)
        error = min(failed, key=lambda trial: len(trial.placement.labels)).error
        tuning.prepared.note_once(
            f"nodes left in floating point, as no model with them quantized was built, {names_text(units)}: {error}"
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


# ---- a known winner ------------------------------------------------------------------------------


def measure_winner(
    prepared: Prepared, kept: FinishedSearch, builds: int = CONFIRM_BUILDS, rounds: int = CONFIRM_ROUNDS
) -> LatencyEvidence:
    """Time reference and selected model from fresh builds; raises `BackendError` if the latter does not run."""
    if kept.model is None:
        given = require_path(prepared.given)
        return time_tuned(prepared, given, builds=2, rounds=12)  # of one model with itself
    measured = time_tuned(prepared, kept.model, builds, rounds)
    if "tuned" not in measured.samples:
        raise BackendError(
            f"the tuned model could not be built and run again: {measured.failures['tuned']}",
            where=kept.model,
            cure="tune it anew with --qdq-mode=run",
        )
    return measured


def _recheck_winner(prepared: Prepared, known: FinishedSearch) -> tuple[bool, LatencyEvidence | None]:
    """Whether a cached winner is reused, and its latency. If not, a new search follows, which CI has to request."""
    if known.model is None or known.result.coverage is not None:
        return True, None
    prepared.resources.report_step("timing the cached winner again")
    outcome, latency, finding = _measure_again(prepared, known.model)
    if outcome == "inconclusive":
        prepared.note_once(f"{finding}; it is kept. Measure again later, or tune again with --qdq-retune")
    if outcome in ("faster", "inconclusive"):
        return True, latency
    if not prepared.settings.in_ci:
        prepared.note_once(f"{finding}; it was tuned again")
        prepared.resources.report_wait(f"{finding}: tuning again")  # before the search, which takes minutes
        return False, latency
    if outcome != "slower":
        raise StateError(
            f"{finding}; no search is started in CI", where=known.model, cure="tune again with --qdq-retune"
        )
    prepared.note_once(
        f"{finding}; it is kept, since no search is started in CI. Tune again with --qdq-retune"
    )
    return True, latency


def _placement_of(prepared: Prepared, digest: str, known: FinishedSearch | None) -> FinishedSearch:
    """The placement of a known trial whose digest begins with ``digest``, rebuilt from its labels."""
    placements: dict[str, Placement] = {}
    if known is not None:  # a confirmed winner may be no trial of the search
        built = [trial.placement for trial in known.result.trials if trial.ok]
        placements = {each.digest: each for each in (*built, known.result.winner)}
    matches = [placement for name, placement in placements.items() if name.startswith(digest)]
    if known is None or len(matches) != 1:
        case = prepared.case
        raise StateError(
            f"several trials of {case.name} have a scheme that begins with '{digest}'"
            if matches
            else f"no trial of {case.name} on this device has scheme {digest}",
            where=case.spec or case.model,
            cure="run the case once without --qdq-scheme, and take a digest from its trials.jsonl",
        )
    (placement,) = matches
    if placement.digest == known.result.winner.digest:
        return known
    result = replace(
        known.result,
        winner=placement,
        unchanged=not placement.sites,
        reason=f"scheme {placement.digest} was asked for",
        provenance=replace(known.result.provenance, source="replayed"),
    )
    folder = prepared.output / placement.digest
    make_folder(folder)
    write_results(prepared, result, placement, folder)
    return FinishedSearch(result=result, folder=folder)


def _measure_again(
    prepared: Prepared, tuned: Path, measurements: tuple[tuple[int, int], ...] = ((2, 12), (4, 48))
) -> tuple[Outcome, LatencyEvidence | None, str]:
    """Measure a cached winner, twice if needed: the outcome, the last measurement, and the finding in words.

    It is ``inaccurate`` if it fails ``tune.accuracy``: a metric's code may have changed. A slow period of a noisy
    machine must not start a search that takes minutes. So a winner is ``slower`` only if two measurements from fresh
    builds prove that it gains less than ``min_gain``. It is ``faster`` if one of them proves that it gains more, and
    ``broken`` if it cannot be built and run any more. ``measurements`` are their builds and rounds: more take longer,
    and leave fewer winners undecided.
    """
    if (rules := prepared.case.tune.accuracy) is not None:
        scores, name = prepared.scores, rules.metric
        least = rules.least(scores.of_reference(name, rules.output).value)
        if (value := scores.of_file(tuned, name, rules.output).value) < least:
            required = f"less than the {metric_text(name, least)} that tune.accuracy requires"
            finding = f"the cached winner has {rules.key} {metric_text(name, value)} now, {required}"
            return "inaccurate", None, finding
    below, min_gain = [], prepared.case.tune.min_gain
    for builds, rounds in measurements:
        latency = time_tuned(prepared, tuned, builds, rounds)
        if "tuned" not in latency.samples:
            finding = f"the cached winner could not be built and run again: {latency.failures['tuned']}"
            return "broken", latency, finding
        tested = latency.tested["tuned"]
        if tested.proves(min_gain):
            return "faster", latency, ""
        below.append(tested.excludes(min_gain))
    speedup, asked = tested.mean.inverse, f"the {100 * min_gain:g} % of tune.min_gain"
    figures = f"{ratio_text(speedup.median)}x (95 %: {interval_text(speedup)})"
    if all(below):
        lost = "is slower than the reference" if speedup.high < 1 else f"gains less than {asked}"
        finding = f"the cached winner {lost} in two measurements: {figures}"
        return "slower", latency, finding
    by = f" by {asked}" if min_gain else ""
    finding = f"inconclusive: the cached winner is neither proved faster nor proved slower{by}: {figures}"
    return "inconclusive", latency, finding
