"""The pipeline of a case, from its model to the verdict of a check.

    case > model > regions > units > space of placements > limits > corrections > strategy
                                                                                    |  ^
                                                                          placement v  | trial
                                                               rehearse > insert Q/DQ > build > race
                                                                                    |
                               finalists: built anew and timed with the reference > winner
                                                                                    |
                       latency, parity, accuracy, size, survival, lint > evidence > check > verdict

`judge` is the whole pipeline, `tune` its part up to the winner, and `open_tuning` the part of that up to the first
build. Each step is done once for a case; docs/architecture.md names the modules of each step. `study` runs a search
step by step; `evidence.compared_runtimes` and `app.upgrade` compare finished searches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from qdqspec._core.registry import resolve
from qdqspec._core.units import count_text, seconds_text
from qdqspec.app.preparation.build_logs import open_journal
from qdqspec.app.preparation.cached import (
    CORRECTIONS,
    JOURNAL,
    MODEL,
    PATTERNS,
    RAW_MODEL,
    REFERENCE,
    FinishedSearch,
    keep,
)
from qdqspec.app.preparation.files import refuse_own, write_patterns, write_results
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session.covering import cover_case, covers
from qdqspec.app.session.outcome import tune_case
from qdqspec.checks.base import Check, needs_of
from qdqspec.checks.verdicts import timed_out
from qdqspec.timing.store import Store
from qdqspec.types import CheckSpec, LatencyEvidence, Verdict

if TYPE_CHECKING:
    from qdqspec.app.evidence.evidence import CaseWork


def judge(work: CaseWork, check: CheckSpec) -> Verdict:
    """The verdict of a check; inconclusive if the time limit of the run left it undecided."""
    kind = cast("Check", resolve("check", check.kind))
    limit = seconds_text(work.resources.settings.time_limit or 0.0)
    if work.resources.seconds_left() == 0 and work.found is None:
        return timed_out(limit)
    work.require(check)  # prepare and probe: its data, labels and metric can be used
    winner = work.find()  # search and confirm: `tune`, or a cached winner that passes its recheck
    work.gather(check)  # winner against reference
    verdict = kind.judge(check.params, work.evidence(needs_of(check) | {"parity"}))
    if verdict.outcome == "fail" and winner.is_cut_short:
        return timed_out(limit, verdict)
    return verdict


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
        prepared.keep_corrections(output / CORRECTIONS, prepared.journal_header)
        tuned = (cover_case if covers(prepared) else tune_case)(prepared, journal)
        write_results(prepared, tuned.result, tuned.raw_winner, output)
        if tuned.latency is not None:
            write_patterns(prepared, tuned.result, tuned.intervals, output / PATTERNS)
        found = FinishedSearch(
            result=tuned.result,
            folder=output,
            raw_winner=tuned.raw_winner,
            is_cut_short=resources.seconds_left() == 0,  # by the time limit of the run: not cached
        )
        if not (prepared.settings.no_cache or found.is_cut_short):
            found = keep(store, found, prepared)
        # Last, because they mark the journal as finished: a result that could not be written is not searched again.
        for role, trial in tuned.confirmed:
            journal.append(trial, role=role)
    return found, tuned.latency
