"""Predicts the accuracy of placements in a search: that of a rehearsal, plus what the backend was seen to add."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from qdqspec._core.arrays import Feed
from qdqspec._core.files import Closing
from qdqspec._core.units import count_text, metric_text, seconds_text
from qdqspec.accuracy.evaluator import Evaluator, Offset
from qdqspec.accuracy.metrics import Score, Scores
from qdqspec.accuracy.rehearsal import Rehearsal, RehearsalRefusedError, find_sensitivities, label_noise
from qdqspec.errors import BackendError, DataError, PlacementError
from qdqspec.qdq import SchemeSpace, sites_of
from qdqspec.types import EXACT_DB, NO_PAIRS, AccuracyRules, BlockError, LabelNoise, Placement, Site, Trial

LOST_DB = -100.0  # below it outputs have another shape or are not finite: the SQNR is -200 dB and the offset
_Result = TypeVar("_Result")


class Rehearser(Closing):
    """The rehearsal of a search on ``feeds``, with all pairs of a space, built on first use.

    It is built again for a placement with other pairs. ``build`` makes the rehearsal of sites; what it opens besides is
    closed by the stack that it is given.
    """

    def __init__(
        self,
        space: SchemeSpace,
        feeds: Iterable[Feed],
        build: Callable[[Sequence[Site], ExitStack], Rehearsal],
    ) -> None:
        self.space, self.feeds, self._build = space, feeds, build
        self._others: tuple[Site, ...] = ()  # of placements outside of the space
        self._rehearsal: Rehearsal | None = None
        self._opened = ExitStack()

    @property
    def rehearsal(self) -> Rehearsal:
        """The rehearsal of the space. Raises `RehearsalRefusedError` if the model cannot be rehearsed."""
        if self._rehearsal is None:
            rehearsal = self._build((*sites_of(self.space), *self._others), self._opened)
            self._rehearsal = self._opened.enter_context(rehearsal)
        return self._rehearsal

    def including(self, placement: Placement) -> Rehearsal:
        """The rehearsal, rebuilt with the pairs of a placement if it lacks some. Raises like `rehearsal`."""
        try:
            self.rehearsal.switches.setting(placement)
        except PlacementError:
            self._others += placement.ordered
            self.close()
        return self.rehearsal

    def close(self) -> None:
        """Stop the process of the rehearsal. Closing twice is harmless; the next use opens it again."""
        self._opened.close()
        self._rehearsal = None


@dataclass(slots=True)
class RehearsedMetric:
    """Expects the metric of placements: the ``reference``'s, plus the change in a rehearsal, plus an offset of builds.

    The offset is the median over builds whose SQNR is not lower than the placement's: the loss of a build beyond its
    rehearsal does not apply to placements with less noise. Each placement may take ``share`` of the time that the
    search has left: all evaluation data is used if that is enough, else its first feeds, at least ``least_feeds``; then
    a metric that counts samples may lose one more.
    """

    scores: Scores
    rules: AccuracyRules
    reference: float
    share: float = 0.005
    least_feeds: int = 16
    _feeds: int = 0  # used for each placement
    _float: Score | None = None
    _known: dict[str, float] = field(default_factory=dict)  # change of the metric, by digest
    _sqnr_db: dict[str, float | None] = field(default_factory=dict)  # expected, by digest
    _built: dict[str, tuple[float | None, float]] = field(default_factory=dict)  # SQNR and offset, by digest

    def keeps(
        self, placement: Placement, rehearsal: Rehearsal, sqnr_db: float | None, seconds: float
    ) -> bool | None:
        """Whether a placement with an expected SQNR meets the limit; ``None`` if the metric cannot be computed."""
        digest = placement.digest
        try:
            if self._float is None:
                first = next(iter(rehearsal.feeds()), None)
                if first is None:
                    raise DataError("there is no sample to compute the metric on")
                rehearsal.engine(NO_PAIRS).run(first)  # shows the time of a run
                most = self.share * seconds / max(rehearsal.run_seconds, 1e-6)
                self._feeds = int(min(max(most, self.least_feeds), self.scores.feeds))
                self._float = self._score(NO_PAIRS, rehearsal)
            if digest not in self._known:
                self._known[digest] = self._score(placement, rehearsal).value - self._float.value
        except DataError:  # of the metric itself, such as on a part of the samples; it is computed for builds
            return None
        self._sqnr_db[digest] = sqnr_db
        return self._expected(digest) + self._tolerance >= self._least

    def learn(self, trial: Trial) -> None:
        """Add the measured metric of a rehearsed candidate to the estimate of the offset."""
        change = self._known.get(trial.placement.digest)
        if change is not None and trial.accuracy is not None:
            sqnr_db = trial.sqnr_db if trial.all_data_db is None else trial.all_data_db
            self._built[trial.placement.digest] = sqnr_db, trial.accuracy - self.reference - change

    def refused_text(self) -> str:
        """The number of rehearsed placements expected to miss the limit and their best value; empty for none."""
        values = [self._expected(digest) for digest in self._known if digest not in self._built]
        missed = [value for value in values if value + self._tolerance < self._least]
        if not missed:
            return ""
        rules, count = self.rules, count_text(len(missed), "rehearsed placement")
        least, most = metric_text(rules.metric, self._least), metric_text(rules.metric, max(missed))
        return f"expected below {rules.key} {least} and not built: {count}, {most} at most"

    def _expected(self, digest: str) -> float:
        own = self._sqnr_db.get(digest)
        offsets = [offset for db, offset in self._built.values() if own is None or db is None or db >= own]
        return self.reference + self._known[digest] + float(np.median(offsets or [0.0]))

    @property
    def _least(self) -> float:
        return self.rules.least(self.reference)

    @property
    def _tolerance(self) -> float:
        """The value of one sample, if a part of the data is used and the metric counts samples."""
        if self._float is None or self._float.right is None or self._feeds >= self.scores.feeds:
            return 0.0
        return 1.0 / self._float.samples

    def _score(self, placement: Placement, rehearsal: Rehearsal) -> Score:
        engine, rules = rehearsal.engine(placement), self.rules
        return self.scores.of_engine(engine, rules.metric, rules.output, feeds=self._feeds)


@dataclass(slots=True, eq=False)
class RehearsalOracle:
    """Predicts the SQNR that a search will measure: rehearsed on the first samples, plus two offsets.

    ``built`` is the offset of builds, the effect of the backend. ``difference`` is that of all data, which the limits
    of the search learn from builds. If the model cannot be rehearsed, every answer is ``None`` and ``note`` receives
    the reason.

    ``left`` gives the seconds that the search has left to choose and build candidates; ``unlimited_seconds`` count as
    left of a search without a limit. Nothing new is rehearsed once they are over. The sensitivity analysis may take
    ``noise_share`` of them. If single pairs take longer, up to ``most_together`` neighbouring pairs are measured
    together; compositions then miss the limit more often. If half of that share, and ``noise_seconds``, is enough for
    all samples, all are used.
    """

    rehearser: Rehearser
    note: Callable[[str], None]
    left: Callable[[], float | None] = lambda: None
    metric: RehearsedMetric | None = None
    least_db: float | None = None
    difference: Offset = field(default_factory=Offset)
    unlimited_seconds: float = 300.0
    noise_share: float = 0.5
    noise_seconds: float = 30.0
    most_together: int = 64
    built: Offset = field(default_factory=lambda: Offset(prior=True))
    _evaluator: Evaluator | None = None
    _noise: LabelNoise | None = None
    _known: dict[Placement, float | None] = field(default_factory=dict)  # rehearsed SQNR
    _refused: bool = False
    _missing: str = ""  # why the sensitivity analysis was not made

    def noise(self) -> LabelNoise | None:
        """Noise power over signal power of each (unit, label) alone; ``None`` if that cannot be measured."""
        if self._seconds_left > 0:
            self._measure_noise(self._seconds_left, self.note)
        return self._noise

    def block_errors(self, seconds: float) -> tuple[tuple[BlockError, ...], str]:
        """The error of each unit alone, largest first, measured now if ``seconds`` allow, and why there is none."""
        if self._noise is None and not self._missing and seconds <= 0:
            return (), "the search's time was over"
        self._measure_noise(seconds, lambda _: None)
        errors = self.errors
        return errors, self._missing or ("" if errors else "no block alone changes the outputs")

    @property
    def errors(self) -> tuple[BlockError, ...]:
        """The error of each unit alone that was measured, largest first."""
        errors = (
            BlockError(block=unit, label=label, sqnr_db=min(-10 * math.log10(noise), EXACT_DB))
            for (unit, label), noise in (self._noise or {}).items()
            if noise > 0 and math.isfinite(noise)
        )
        return tuple(sorted(errors, key=lambda error: (error.sqnr_db, error.block, error.label)))

    def predicted_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a build on all data."""
        rehearsed = self.rehearsed_db(placement)
        return None if rehearsed is None else self._expected(placement, rehearsed)

    def rehearsed_db(self, placement: Placement) -> float | None:
        """The SQNR of a placement at the worst output, rehearsed once; ``None`` if unknown and the time is over.

        A model that is a candidate as it was given has numbers of its own, which no rehearsal has.
        """
        if placement.given:
            return None
        if not placement.sites:
            return None if self._refused else EXACT_DB
        if placement not in self._known:
            if self._seconds_left <= 0:
                return None
            self._known[placement] = self._tried(lambda: self._rehearsed(placement))
        return None if self._refused else self._known[placement]

    def keeps_metric(self, placement: Placement) -> bool | None:
        """Whether the task metric of a placement is expected to meet its limit; ``None`` if unknown."""
        metric, seconds = self.metric, self._seconds_left
        if metric is None or placement.given or not placement.sites or seconds <= 0:
            return None
        predicted_db = self.predicted_db(placement)
        return self._tried(
            lambda: metric.keeps(placement, self.rehearser.including(placement), predicted_db, seconds)
        )

    @property
    def doubt_db(self) -> float:
        """The standard deviation of the SQNR of builds that their offset does not explain."""
        return self.built.doubt_db

    def learn(self, trial: Trial) -> None:
        """Add the measured SQNR of a rehearsed candidate to the estimate."""
        if self.metric is not None:
            self.metric.learn(trial)
        known = self._known.get(trial.placement)
        if known is not None and trial.ok and trial.sqnr_db is not None and not trial.subgraph:
            self.built.learn(known, trial.sqnr_db, trial.placement)

    @property
    def refused_text(self) -> str:
        """The number of rehearsed placements expected below the limits and not built; empty for none."""
        expected = [
            self._expected(placement, db)
            for placement, db in self._known.items()
            if db is not None and placement not in self.built.known
        ]
        least_db = self.least_db
        below = [] if least_db is None else [sqnr_db for sqnr_db in expected if sqnr_db < least_db]
        texts = [] if self.metric is None else [self.metric.refused_text()]
        if below:
            most = f"{max(below):.1f} dB at most"
            if max(below) <= LOST_DB:
                most = "all with outputs of another shape or with values that are not finite"
            count = count_text(len(below), "rehearsed placement")
            texts.insert(0, f"expected below {least_db:g} dB and not built: {count}, {most}")
        return "; ".join(filter(None, texts))

    @property
    def _seconds_left(self) -> float:
        left = self.left()
        return self.unlimited_seconds if left is None else left

    def _tried(self, rehearse: Callable[[], _Result]) -> _Result | None:
        """The result of a rehearsal; ``None`` if the model, or this placement, cannot be rehearsed."""
        try:
            return None if self._refused else rehearse()
        except RehearsalRefusedError as error:
            self._refused, self._missing = True, error.what
            self.note(f"{error.what}: the search measures the accuracy of placements by building them")
        except (BackendError, PlacementError):
            pass  # the reference runtime lacks the formats of this placement
        return None

    def _expected(self, placement: Placement, rehearsed_db: float) -> float:
        """The SQNR of a build on all data, by that of its rehearsal on the first samples."""
        few_db = rehearsed_db + self.built.at(rehearsed_db)
        return few_db + self.difference.at(few_db, placement)

    def _measure_noise(
        self,
        seconds: float,
        note: Callable[[str], None],
        runs_a_switch: float = 1.5,
        runs_on_one_sample: float = 0.4,
    ) -> None:
        """Make the sensitivity analysis, if that was not tried before.

        It runs half of the graph on average, optimized: so many runs of a rehearsal a switch, on all samples only of
        the switches with a large error. Higher estimates use one sample, or skip the analysis, sooner.
        """
        is_tried = self._noise is not None or bool(self._missing)
        if is_tried:
            return

        def analysis() -> LabelNoise | None:
            space = self.rehearser.space
            everything = space.resolve(space.everything())
            self.rehearsed_db(everything)  # shows the time of a run
            rehearsal = self.rehearser.including(everything)
            switch_seconds = rehearsal.run_seconds * len(rehearsal.switches)
            together = math.ceil(runs_on_one_sample * switch_seconds / (self.noise_share * seconds)) or 1
            if together > self.most_together:
                took = seconds_text(runs_on_one_sample * switch_seconds)
                self._missing = (
                    f"measuring each of {len(rehearsal.switches)} Q/DQ pairs alone would take about {took}, too much "
                    f"of {seconds_text(seconds)}, and was skipped: raise the time limit"
                )
                return None
            is_cheap = runs_a_switch * switch_seconds <= min(
                self.noise_share * seconds / 2, self.noise_seconds
            )
            samples = rehearsal.samples if is_cheap else 1
            try:
                noise = find_sensitivities(rehearsal, samples=samples, together=together)
                return label_noise(rehearsal, noise, space)
            except BackendError as error:
                self._missing = f"the error of each Q/DQ pair alone could not be measured: {error.what}"
                return None

        self._noise = self._tried(analysis)
        if self._missing and not self._refused:
            note(self._missing)

    def _rehearsed(self, placement: Placement) -> float:
        """The SQNR of a placement on the first samples."""
        rehearsal = self.rehearser.including(placement)
        if self._evaluator is None:
            self._evaluator = Evaluator(
                self.rehearser.feeds, lambda: self.rehearser.rehearsal.engine(NO_PAIRS)
            )
        return self._evaluator.first(rehearsal.engine(placement))
