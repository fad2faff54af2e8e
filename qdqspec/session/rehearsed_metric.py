"""The task metric of placements, rehearsed on evaluation data before they are built."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from qdqspec.errors import DataError
from qdqspec.parity.metrics import Score
from qdqspec.rehearsal import Rehearsal, RehearsedEngine
from qdqspec.session.scores import Scores
from qdqspec.types import AccuracyRules, Placement, Trial
from qdqspec.units import count_text, metric_text

SECONDS = 60.0  # for all placements of a search without a time limit
SHARE = 0.2  # of the time limit
EXPECTED = 40  # placements
LEAST_FEEDS = 16  # of the evaluation data

_FLOAT = Placement(sites=frozenset())


@dataclass(slots=True)
class RehearsedMetric:
    """Expects the metric of placements: of the reference, plus the change in a rehearsal, plus an offset from builds.

    ``reference`` is the metric of the reference on all data, ``least`` the limit, ``seconds`` the search's time. All
    evaluation data is used if the time allows, else its first feeds; then one sample more may be lost.
    """

    scores: Scores
    rules: AccuracyRules
    reference: float
    least: float
    seconds: float | None = None
    _feeds: int = 0  # used for each placement
    _float: Score | None = None
    _known: dict[str, float] = field(default_factory=dict)  # change of the metric, by digest
    _offsets: list[float] = field(default_factory=list)

    def keeps(self, placement: Placement, rehearsal: Rehearsal) -> bool | None:
        """Whether a placement is expected to meet the limit; ``None`` if the metric cannot be computed."""
        expected = self.expected(placement, rehearsal)
        return None if expected is None else expected + self._tolerance >= self.least

    def expected(self, placement: Placement, rehearsal: Rehearsal) -> float | None:
        """The metric that a build of the placement is expected to have on all data."""
        try:
            if self._float is None:
                self._feeds = self._affordable(rehearsal)
                self._float = self._score(_FLOAT, rehearsal)
            if placement.digest not in self._known:
                self._known[placement.digest] = self._score(placement, rehearsal).value - self._float.value
        except DataError:
            return (
                None  # of the metric itself, for example on a part of the samples; it is computed for builds
            )
        return self.reference + self._known[placement.digest] + float(np.median(self._offsets or [0.0]))

    def learn(self, trial: Trial) -> None:
        """Add the measured metric of a rehearsed candidate to the estimate of the offset."""
        change = self._known.get(trial.placement.digest)
        if change is not None and trial.accuracy is not None:
            self._offsets.append(trial.accuracy - self.reference - change)

    def refused_text(self) -> str:
        """The number of rehearsed placements expected to miss the limit and their best value; empty for none."""
        offset = float(np.median(self._offsets or [0.0]))
        values = [self.reference + change + offset for change in self._known.values()]
        missed = [value for value in values if value + self._tolerance < self.least]
        if not missed:
            return ""
        return (
            f"expected below {self.rules.key} {metric_text(self.rules.metric, self.least)} and not built: "
            f"{count_text(len(missed), 'rehearsed placement')}, {metric_text(self.rules.metric, max(missed))} at most"
        )

    @property
    def _tolerance(self) -> float:
        """The value of one sample, if a part of the data is used and the metric counts samples."""
        if self._float is None or self._float.right is None or self._feeds >= self.scores.feeds:
            return 0.0
        return 1 / self._float.samples

    def _affordable(self, rehearsal: Rehearsal) -> int:
        """The number of feeds for each placement that the time allows."""
        started = time.monotonic()
        first = next(iter(rehearsal.feeds()), None)
        if first is None:
            raise DataError("there is no sample to compute the metric on")
        rehearsal.outputs(_FLOAT, first)
        seconds = SECONDS if self.seconds is None else SHARE * self.seconds
        most = seconds / EXPECTED / max(time.monotonic() - started, 1e-6)
        return int(min(max(most, LEAST_FEEDS), self.scores.feeds))

    def _score(self, placement: Placement, rehearsal: Rehearsal) -> Score:
        engine = RehearsedEngine(rehearsal, placement)
        return self.scores.of_engine(engine, self.rules.metric, self.rules.output, feeds=self._feeds)
