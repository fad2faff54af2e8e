"""Rehearsals of a case, and the accuracy oracle of its search.

A rehearsal computes the accuracy of placements on the reference runtime, whatever the backend of the case. The oracle
adds the effect of the backend, estimated from builds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import islice
from typing import TypeAlias, TypeVar

from qdqspec.accuracy.expected_metric import NO_PAIRS, UNLIMITED_SECONDS, RehearsedMetric
from qdqspec.arrays import Feed
from qdqspec.closing import Closing
from qdqspec.errors import BackendError, PlacementError
from qdqspec.measurement.admission import NEAR_DB
from qdqspec.parity.gate import MOST_DB, Evaluator, Offset
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.preparation.auxiliary_runs import reference_runtime
from qdqspec.preparation.prepare import Prepared
from qdqspec.preparation.resources import Resources
from qdqspec.rehearsal import (
    Rehearsal,
    RehearsalRefusedError,
    RehearsedEngine,
    Subject,
    find_sensitivities,
    sites_of,
)
from qdqspec.types import EXACT_DB, BlockError, LabelNoise, Placement, Rehearsed, Site, Trial
from qdqspec.units import count_text, seconds_text

# Cost of the sensitivity analysis, in runs of the rehearsal per switch, on all samples and on one: it runs half of the
# graph on average, optimized, and on all samples only the switches with a large error.
RUNS_A_SWITCH, RUNS_ON_ONE_SAMPLE = 1.5, 0.4
MOST_TOGETHER = 64  # neighbouring switches that are measured together, at most
LOST_DB = -100.0  # below it outputs have another shape or are not finite: the SQNR is -200 dB and the offset

SecondsLeft: TypeAlias = Callable[[], float | None]  # ``None`` without a limit
_Result = TypeVar("_Result")


class Rehearser(Closing):
    """Rehearses placements of a case. The graph, with all pairs of the case's space, is built on first use.

    A placement with other pairs, such as one read from a scheme, rebuilds it with these added. The data is ``given``
    with its name, else the calibration data.
    """

    def __init__(
        self, prepared: Prepared, resources: Resources, given: tuple[Iterable[Feed], str] | None = None
    ) -> None:
        self._prepared = prepared
        self._resources = resources
        self._given = given
        self._sites: tuple[Site, ...] = ()
        self._rehearsal: Rehearsal | None = None
        self._opened = ExitStack()

    @property
    def rehearsal(self) -> Rehearsal:
        """The rehearsal of the space. Raises `RehearsalRefusedError` if the model cannot be rehearsed."""
        if self._rehearsal is None:
            prepared, resources = self._prepared, self._resources
            data = "random" if prepared.calibration is None else "calibration"
            feeds, data = (lambda: given[0], given[1]) if (given := self._given) else (prepared.feeds, data)
            subject = Subject(
                model=prepared.model,
                sites=self._sites or sites_of(prepared.space),
                numbers=prepared.numbers,
                feeds=feeds,
                data=data,
                rounds_biases=prepared.capabilities.rounds_biases,
            )
            runtime = reference_runtime(self._opened, resources.options, resources.backend)
            self._rehearsal = self._opened.enter_context(Rehearsal(subject, runtime))
        return self._rehearsal

    def error(self, placement: Placement) -> Rehearsed:
        """The error of a placement on the first samples.

        Raises `RehearsalRefusedError` if the model cannot be rehearsed.
        """
        return self.including(placement).error(placement)

    def including(self, placement: Placement) -> Rehearsal:
        """The rehearsal, rebuilt with the pairs of a placement if it lacks some."""
        try:
            self.rehearsal.switches.setting(placement)
        except PlacementError:
            self._sites = (*self.rehearsal.subject.sites, *placement.ordered)
            self.close()
        return self.rehearsal

    def close(self) -> None:
        """Stop the process of the rehearsal. Closing twice is harmless; the next use opens it again."""
        self._opened.close()
        self._rehearsal = None


class RehearsalOracle:
    """Predicts the SQNR that a search will measure: rehearsed on the first samples, plus two offsets.

    ``built`` is the offset of builds, the effect of the backend; ``difference`` is that of all data. A placement nearer
    to the limit ``least_db`` than the largest known difference is rehearsed on all data, or on as much of it as shows
    that it is below the limit. If the model cannot be rehearsed, every answer is ``None`` and ``note`` receives the
    reason.

    ``left`` gives the seconds that the search has left to choose and build candidates. Nothing new is rehearsed once
    they are over. ``noise_share`` of them may go to the sensitivity analysis, which else measures neighbouring pairs
    together, so that compositions miss the limit more often; with a quarter of that, and at most ``noise_seconds``, it
    uses all samples. ``placement_share`` may go to one placement on all data: with less time, less data is used.
    ``all_data_share`` is for all such placements, so that time for builds remains.
    """

    def __init__(
        self,
        rehearser: Rehearser,
        space: SchemeSpace,
        note: Callable[[str], None],
        left: SecondsLeft = lambda: None,
        metric: RehearsedMetric | None = None,
        least_db: float | None = None,
        difference: Offset | None = None,
        *,
        noise_share: float = 0.5,
        noise_seconds: float = 30.0,
        placement_share: float = 0.1,
        all_data_share: float = 0.7,
    ) -> None:
        self.difference = difference or Offset()
        self.built = Offset(prior=True)
        self._rehearser, self._space, self._note = rehearser, space, note
        self._left, self._metric, self._least_db = left, metric, least_db
        self._noise_share, self._noise_seconds = noise_share, noise_seconds
        self._placement_share, self._all_data_share = placement_share, all_data_share
        self._evaluator: Evaluator | None = None
        self._all_data_seconds = 0.0
        self._noise: LabelNoise | None = None
        self._known: dict[Placement, float | None] = {}  # rehearsed SQNR
        self._partial: set[Placement] = set()  # those below the limit by some of the first samples
        self._refused = False
        self._missing = ""  # why the sensitivity analysis was not made

    def noise(self) -> LabelNoise | None:
        """Noise power over signal power of each (unit, label) alone; ``None`` if that cannot be measured."""
        if self._seconds_left > 0:
            self._measure_noise(self._seconds_left, self._note)
        return self._noise

    def block_errors(self, seconds: float) -> tuple[tuple[BlockError, ...], str]:
        """The error of each unit alone, largest first, and why there is none.

        It is measured now if the search did not need it and ``seconds`` allow.
        """
        if self._noise is None and not self._missing and seconds <= 0:
            return (), "the search's time was over"
        self._measure_noise(seconds, lambda _: None)
        return self.errors, self._missing or ("" if self.errors else "no block alone changes the outputs")

    @property
    def errors(self) -> tuple[BlockError, ...]:
        """The error of each unit alone that was measured, largest first."""
        found = (
            BlockError(block=unit, label=label, sqnr_db=min(-10 * math.log10(noise), EXACT_DB))
            for (unit, label), noise in (self._noise or {}).items()
            if noise > 0 and math.isfinite(noise)
        )
        return tuple(sorted(found, key=lambda error: (error.sqnr_db, error.block, error.label)))

    def predicted_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a build on all data."""
        rehearsed = self.rehearsed_db(placement)
        return None if rehearsed is None else self._expected(placement, rehearsed)

    def rehearsed_db(self, placement: Placement) -> float | None:
        """The SQNR of a placement at the worst output, rehearsed once; ``None`` if unknown and the time is over."""
        if not placement.sites:
            return None if self._refused else MOST_DB
        if placement not in self._known:
            if self._seconds_left <= 0:
                return None
            self._known[placement] = self._tried(lambda: self._rehearsed(placement))
        return None if self._refused else self._known[placement]

    def keeps_metric(self, placement: Placement) -> bool | None:
        """Whether the task metric of a placement is expected to meet its limit; ``None`` if unknown."""
        metric = self._metric
        if metric is None or not placement.sites or self._seconds_left <= 0:
            return None
        predicted_db = self.predicted_db(placement)
        return self._tried(
            lambda: metric.keeps(placement, self._rehearser.including(placement), predicted_db)
        )

    @property
    def doubt_db(self) -> float:
        """The standard deviation of the SQNR of builds that their offset does not explain."""
        return self.built.doubt_db

    def learn(self, trial: Trial) -> None:
        """Add the measured SQNR of a rehearsed candidate to the estimate."""
        if self._metric is not None:
            self._metric.learn(trial)
        known = self._known.get(trial.placement)
        if known is None or trial.placement in self._partial:
            return
        if trial.ok and trial.sqnr_db is not None and not trial.subgraph:
            self.built.learn(known, trial.sqnr_db, trial.placement)

    def text(self, placement: Placement) -> str:
        """Rehearsed and measured SQNR of a placement for the reason of a choice; empty unless both are known."""
        if not self.built.is_of(placement):
            return ""
        rehearsed, measured = self.built.known[placement]
        offset = self.built.at(rehearsed)
        return f"rehearsed {rehearsed:.1f} dB, measured {measured:.1f} dB on the same samples, offset {offset:+.1f} dB"

    def refused_text(self, least_db: float | None) -> str:
        """The number of rehearsed placements expected below the limits and not built; empty for none."""
        expected = [
            self._expected(placement, db)
            for placement, db in self._known.items()
            if db is not None and not self.built.is_of(placement)
        ]
        below = [] if least_db is None else [sqnr_db for sqnr_db in expected if sqnr_db < least_db]
        texts = [] if self._metric is None else [self._metric.refused_text()]
        if below:
            most = f"{max(below):.1f} dB at most"
            if max(below) <= LOST_DB:
                most = "all with outputs of another shape or with values that are not finite"
            count = count_text(len(below), "rehearsed placement")
            texts.insert(0, f"expected below {least_db:g} dB and not built: {count}, {most}")
        return "; ".join(filter(None, texts))

    @property
    def _seconds_left(self) -> float:
        left = self._left()
        return UNLIMITED_SECONDS if left is None else left

    def _tried(self, rehearse: Callable[[], _Result]) -> _Result | None:
        """The result of a rehearsal; ``None`` if the model, or this placement, cannot be rehearsed."""
        try:
            return None if self._refused else rehearse()
        except RehearsalRefusedError as error:
            self._refused, self._missing = True, error.what
            self._note(f"{error.what}: the search measures the accuracy of placements by building them")
        except (BackendError, PlacementError):
            pass  # the reference runtime lacks the formats of this placement
        return None

    def _expected(self, placement: Placement, rehearsed_db: float) -> float:
        """The SQNR of a build on all data, by that of its rehearsal on the first samples."""
        few_db = rehearsed_db + self.built.at(rehearsed_db)
        return few_db + self.difference.at(few_db, placement)

    def _measure_noise(self, seconds: float, note: Callable[[str], None]) -> None:
        """Make the sensitivity analysis, if that was not tried before."""
        is_new = self._noise is None and not self._missing
        if is_new:
            self._noise = self._tried(lambda: self._sensitivities(seconds))
        if is_new and self._missing and not self._refused:
            note(self._missing)

    def _sensitivities(self, seconds: float) -> LabelNoise | None:
        everything = self._space.resolve(self._space.everything())
        self.rehearsed_db(everything)  # shows the time of a run
        rehearsal = self._rehearser.including(everything)
        switch_seconds = rehearsal.run_seconds * len(rehearsal.switches)
        together = math.ceil(RUNS_ON_ONE_SAMPLE * switch_seconds / (self._noise_share * seconds)) or 1
        if together > MOST_TOGETHER:
            took = seconds_text(RUNS_ON_ONE_SAMPLE * switch_seconds)
            self._missing = (
                f"measuring each of {len(rehearsal.switches)} Q/DQ pairs alone would take about {took}, too much of "
                f"{seconds_text(seconds)}, and was skipped: raise the time limit"
            )
            return None
        is_cheap = RUNS_A_SWITCH * switch_seconds <= min(self._noise_share * seconds / 2, self._noise_seconds)
        samples = rehearsal.subject.samples if is_cheap else 1
        try:
            found = find_sensitivities(rehearsal, samples=samples, together=together)
        except BackendError as error:
            self._missing = f"the error of each Q/DQ pair alone could not be measured: {error.what}"
            return None
        return found.by_label(self._space)

    def _rehearsed(self, placement: Placement) -> float:
        """The SQNR of a placement on the first samples; one near the limit is rehearsed on all data too."""
        rehearsal = self._rehearser.including(placement)
        evaluator = self._evaluator = self._evaluator or self._opened_evaluator(rehearsal)
        engine = rehearsal.engine(placement)
        if self._least_db is None:
            return evaluator.first(engine)[0]
        # the difference known may be that of placements with another SQNR
        limits = self._least_db, self._least_db - self.difference.at(self._least_db)
        low_db, high_db = sorted(db - self.built.at(db) for db in limits)
        near_db = min(self.difference.most_db, NEAR_DB)
        found_db, is_whole = evaluator.first(engine, low_db - near_db)
        if not is_whole:
            self._partial.add(placement)
        elif low_db - near_db <= found_db <= high_db + near_db:
            self._rehearse_on_all_data(evaluator, engine, found_db)
        return found_db

    def _rehearse_on_all_data(self, evaluator: Evaluator, engine: RehearsedEngine, few_db: float) -> None:
        """Rehearse a placement on all data if there is time for it, and learn its difference."""
        started, spent, left = time.monotonic(), self._all_data_seconds, self._seconds_left
        if evaluator.samples <= 2 * evaluator.few or spent > self._all_data_share * (left + spent):
            return
        assert self._least_db is not None
        offset = self.built.at(few_db)
        found_db, _ = evaluator.near(engine, self._least_db - offset)
        self.difference.learn(few_db + offset, found_db + offset, engine.placement)
        self._all_data_seconds += time.monotonic() - started

    def _opened_evaluator(self, rehearsal: Rehearsal) -> Evaluator:
        """The evaluator of rehearsals, on as much of the data as a placement may be rehearsed on."""
        subject = rehearsal.subject
        for feed in islice(rehearsal.feeds(), 1):
            rehearsal.outputs(NO_PAIRS, feed)  # shows the time of a run
        most = int(self._placement_share * self._seconds_left / max(rehearsal.run_seconds, 1e-6))
        feeds = subject.feeds()
        samples = sum(1 for _ in islice(feeds, max(most, subject.samples)))
        return Evaluator(
            feeds,
            lambda: self._rehearser.rehearsal.engine(NO_PAIRS),
            samples,
            few=subject.samples,
            errors=2.0,
        )
