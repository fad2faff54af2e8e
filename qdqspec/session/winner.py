"""The winner of a case: from the cache if it passes its recheck, selected by digest, or searched now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from qdqspec.errors import BackendError, QdqspecError, StateError
from qdqspec.graph.model import require_path
from qdqspec.measurement.store import Store
from qdqspec.placement.edit.equalize import Equalization
from qdqspec.placement.scheme.scheme_file import SchemeFile, read_scheme
from qdqspec.preparation.cached import CORRECTIONS, SCHEME, FinishedSearch, other_winner, recall
from qdqspec.preparation.case import CaseSetup
from qdqspec.preparation.files import make_folder, take_results, write_results
from qdqspec.preparation.timing import BUILDS, ROUNDS, Measure
from qdqspec.session.pipeline import tune
from qdqspec.types import LatencyEvidence, PlacedPair, Placement
from qdqspec.units import interval_text, metric_text, ratio_text

FIRST_BUILDS, FIRST_ROUNDS = 2, 12
SECOND_BUILDS, SECOND_ROUNDS = 4, 48

RecheckOutcome = Literal["faster", "inconclusive", "slower", "broken"]


class Finder:
    """Finds the winner of a case once. ``measured`` is its last measurement: of a search, a recheck, or `latency`.

    ``found`` is the finished search, or ``None`` before `find`. ``validate`` raises if inputs of the checks
    cannot be used; it is called before a search begins.
    """

    def __init__(self, setup: CaseSetup, store: Store, validate: Callable[[], None] = lambda: None) -> None:
        self.setup = setup
        self.store = store
        self.measured: LatencyEvidence | None = None
        self.found: FinishedSearch | None = None
        self._validate = validate
        self._failure: QdqspecError | None = None

    def find(self) -> FinishedSearch:
        """The finished search: from the cache if its winner passes the recheck, else run now; once in a session.

        A failure is not retried in this session: every check of the case raises the same error.
        """
        if self._failure is not None:
            raise self._failure
        try:
            if self.found is None:
                with self.setup.alone():
                    self.found = self._found()
            return self.found
        except StateError:
            raise  # another run in the folder may have ended by the next attempt
        except QdqspecError as error:
            self._failure = error
            raise

    @cached_property
    def tuned_path(self) -> Path:
        """The file of the selected model: the tuned model, or the user's own if unchanged."""
        return self.find().model or require_path(self.setup.given)

    @cached_property
    def _scheme(self) -> SchemeFile | None:
        kept = self.find()
        return None if kept.result.unchanged else read_scheme(kept.folder / SCHEME)

    @property
    def pairs(self) -> tuple[PlacedPair, ...]:
        """The selected Q/DQ pairs with their numbers."""
        return () if self._scheme is None else self._scheme.pairs

    @property
    def factors(self) -> tuple[Equalization, ...]:
        """The factors of channels in the selected model."""
        return () if self._scheme is None else self._scheme.equalized

    @property
    def latency(self) -> LatencyEvidence | None:
        """Reference and selected model timed against each other: by the search or the recheck, else now.

        ``None`` for a search for coverage, unless mode ``measure`` times it on a backend with a clock.
        """
        untimed = self.find().result.coverage is not None
        has_clock = self.setup.prepared.capabilities.has_clock
        if untimed and not (has_clock and self.setup.settings.mode == "measure"):
            return None
        if self.measured is None:
            self.measured = self.measure()
        return self.measured

    def measure(self, builds: int = BUILDS, rounds: int = ROUNDS) -> LatencyEvidence:
        """Time the reference and the selected model, interleaved, from fresh builds.

        Raises `BackendError` if the tuned model does not run any more.
        """
        kept = self.find()
        if kept.model is None:
            return self._timed(kept, builds=FIRST_BUILDS, rounds=FIRST_ROUNDS)
        measured = self._timed(kept, builds, rounds)
        if "tuned" not in measured.samples:
            raise BackendError(
                f"the tuned model could not be built and run again: {measured.failures['tuned']}",
                where=kept.model,
                cure="tune it anew with --qdq-mode=run",
            )
        return measured

    def _found(self) -> FinishedSearch:
        settings = self.setup.settings
        self.setup.resources.report_step("reading the model and its data")
        known = None if settings.no_cache else recall(self.store, self.setup.key)
        if known is not None:  # for other placements of this search, as another scheme
            header = self.setup.journal_header
            self.setup.prepared.keep_corrections(known.folder / CORRECTIONS, header, read_only=True)
        if settings.scheme is not None:
            return self._chosen(settings.scheme, known)
        if settings.mode in ("measure", "verify"):
            if known is None:
                case = self.setup.case
                other = other_winner(self.store, self.setup.about)
                raise StateError(
                    f"no winner is known for {case.name} on this device, and mode '{settings.mode}' does not search"
                    f"{other and f'; {other}'}",
                    where=case.spec or case.model,
                    cure="run it once with --qdq-mode=run",
                )
            return known
        if known is not None and not settings.retune and self._is_kept(known):
            take_results(known, self.setup.given, self.setup.output)
            return known
        if known is not None:  # now rather than later: another process may store its own result meanwhile
            self.store.discard(self.setup.key)
        found, self.measured = tune(self.setup, self.store, self._validate)
        return found

    def _is_kept(self, known: FinishedSearch) -> bool:
        """Whether a cached winner is reused. If not, a new search follows, which CI must request explicitly."""
        if known.model is None or known.result.coverage is not None:
            return True
        self.setup.resources.report_step("timing the cached winner again")
        if lacking := self._inaccuracy(known.model):
            return self._is_kept_in_ci(known, lacking, is_usable=False)
        found = recheck(partial(self._timed, known), self.setup.case.tune.min_gain)
        self.measured = found.latency
        if found.outcome == "inconclusive":
            self._note(f"{found.finding}; it is kept. Measure again later, or tune again with --qdq-retune")
        if found.outcome in ("faster", "inconclusive"):
            return True
        return self._is_kept_in_ci(known, found.finding, is_usable=found.outcome == "slower")

    def _is_kept_in_ci(self, known: FinishedSearch, finding: str, *, is_usable: bool) -> bool:
        """Whether a cached winner that is not proved faster is reused: in CI a search runs only on request."""
        if not self.setup.settings.in_ci:
            self._note(f"{finding}; it was tuned again")
            # before the search, which takes minutes
            self.setup.resources.report_wait(f"{finding}: tuning again")
            return False
        if not is_usable:
            raise StateError(
                f"{finding}; no search is started in CI",
                where=known.model,
                cure="tune again with --qdq-retune",
            )
        self._note(f"{finding}; it is kept, since no search is started in CI. Tune again with --qdq-retune")
        return True

    def _note(self, text: str) -> None:
        self.setup.prepared.warnings.append(text)

    def _inaccuracy(self, model: Path) -> str:
        """The reason why a cached winner fails ``tune.accuracy``, or "". A metric's code may have changed."""
        rules, scores = self.setup.case.tune.accuracy, self.setup.prepared.scores
        if rules is None:
            return ""
        value = scores.of_file(model, rules.metric, rules.output).value
        least = rules.least(scores.of_reference(rules.metric, rules.output).value)
        if value >= least:
            return ""
        return (
            f"the cached winner has {rules.key} {metric_text(rules.metric, value)} now, less than the "
            f"{metric_text(rules.metric, least)} that tune.accuracy requires"
        )

    def _chosen(self, digest: str, known: FinishedSearch | None) -> FinishedSearch:
        """The placement of a known trial whose digest begins with ``digest``, rebuilt from its labels."""
        case, trials = self.setup.case, known.result.trials if known else ()
        found = {t.placement.digest: t.placement for t in trials if t.ok}
        if known is not None:
            # a confirmed winner may be no trial of the search
            found[known.result.winner.digest] = known.result.winner
        meant = [placement for name, placement in found.items() if name.startswith(digest)]
        if known is None or len(meant) != 1:
            raise StateError(
                f"several trials of {case.name} have a scheme that begins with '{digest}'"
                if meant
                else f"no trial of {case.name} on this device has scheme {digest}",
                where=case.spec or case.model,
                cure="run the case once without --qdq-scheme, and take a digest from its trials.jsonl",
            )
        if meant[0].digest == known.result.winner.digest:
            return known
        return self._rebuilt(known, meant[0])

    def _rebuilt(self, known: FinishedSearch, placement: Placement) -> FinishedSearch:
        result = replace(
            known.result,
            winner=placement,
            unchanged=not placement.sites,
            reason=f"scheme {placement.digest} was asked for",
            provenance=replace(known.result.provenance, source="replayed"),
        )
        folder = self.setup.output / placement.digest
        make_folder(folder)
        write_results(self.setup.prepared, result, placement, folder, self.setup.target)
        return FinishedSearch(result=result, folder=folder, raw_winner=placement)

    def _timed(self, kept: FinishedSearch, builds: int = BUILDS, rounds: int = ROUNDS) -> LatencyEvidence:
        """Time the reference and the selected model, interleaved, from fresh builds."""
        return self.setup.timed(kept.model or require_path(self.setup.given), builds, rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """The outcome of one or two measurements of a cached winner; ``latency`` is the last of them.

    A slow period of a noisy machine must not start a search that takes minutes. So a winner is rejected only if two
    measurements from fresh builds prove that it gains less than ``tune.min_gain``.

    ``faster``: one measurement proves that it gains more than ``min_gain``. ``slower``: both prove that it gains less.
    ``broken``: it cannot be built and run any more. ``inconclusive``: everything else.
    """

    outcome: RecheckOutcome
    latency: LatencyEvidence
    min_gain: float = 0.0

    @property
    def finding(self) -> str:
        """The outcome as text, for a warning."""
        if self.outcome == "broken":
            return f"the cached winner could not be built and run again: {self.latency.failures['tuned']}"
        speedup = self.latency.tested["tuned"].mean.inverse
        figures = f"{ratio_text(speedup.median)}x (95 %: {interval_text(speedup)})"
        asked = f"the {100 * self.min_gain:g} % of tune.min_gain"
        if self.outcome == "slower":
            lost = "is slower than the reference" if speedup.high < 1 else f"gains less than {asked}"
            return f"the cached winner {lost} in two measurements: {figures}"
        by = f" by {asked}" if self.min_gain else ""
        return f"inconclusive: the cached winner is neither proved faster nor proved slower{by}: {figures}"


def recheck(measure: Measure, min_gain: float = 0.0) -> Recheck:
    """Measure a cached winner; if the gain is not proved, repeat once with more builds and rounds."""
    below = []
    for builds, rounds in ((FIRST_BUILDS, FIRST_ROUNDS), (SECOND_BUILDS, SECOND_ROUNDS)):
        latency = measure(builds, rounds)
        if "tuned" not in latency.samples:
            return Recheck(outcome="broken", latency=latency)
        tested = latency.tested["tuned"]
        if tested.proves(min_gain):
            return Recheck(outcome="faster", latency=latency, min_gain=min_gain)
        below.append(tested.excludes(min_gain))
    return Recheck(outcome="slower" if all(below) else "inconclusive", latency=latency, min_gain=min_gain)
