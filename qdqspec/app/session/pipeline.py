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
cache if that passes its recheck, from a digest, or from a search now: `tune`. The search is a `Tuning`, or a `Covering`
without times: both are opened by the steps before the first build, run, and end with what they have tuned. Each step is
done once for a case; docs/architecture.md names the modules of each step. `study` runs a search step by step;
`evidence.timing` and `app.upgrade` compare finished searches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from qdqspec._core.store import Store
from qdqspec._core.units import count_text, interval_text, metric_text, ratio_text
from qdqspec.app.evidence.timing import time_tuned
from qdqspec.app.preparation.files import (
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
from qdqspec.app.session.covering import Covering, covers
from qdqspec.app.session.tuning import Tuning
from qdqspec.errors import BackendError, StateError
from qdqspec.graph import require_path
from qdqspec.timing import CONFIRM_BUILDS, CONFIRM_ROUNDS
from qdqspec.types import (
    LatencyEvidence,
    Placement,
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
        with (Covering if covers(prepared) else Tuning)(prepared, journal) as search:
            tuned = search.run()
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
