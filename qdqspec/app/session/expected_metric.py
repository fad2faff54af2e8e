"""The task metric that a placement is expected to have, without a build."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qdqspec._core.units import count_text, metric_text
from qdqspec.accuracy.metrics import Score, Scores
from qdqspec.accuracy.rehearsal import Rehearsal
from qdqspec.errors import DataError
from qdqspec.types import AccuracyRules, Placement, Trial

NO_PAIRS = Placement(sites=frozenset())


@dataclass(slots=True)
class RehearsedMetric:
    """Expects the metric of placements: of the reference, plus the change in a rehearsal, plus an offset from builds.

    The offset is the median over builds whose SQNR is not lower than the placement's: the loss of a build beyond its
    rehearsal does not apply to placements with less noise. ``reference`` is the metric of the reference on all data,
    ``least`` the limit. Each placement may take ``share`` of the time that the search has left: all evaluation data is
    used if that is enough, else its first feeds, at least ``least_feeds``; then a metric that counts samples may lose
    one more.
    """

    scores: Scores
    rules: AccuracyRules
    reference: float
    least: float
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
        """Whether a placement with an expected SQNR meets the limit; ``None`` if the metric cannot be computed.

        ``seconds`` are left of the search.
        """
        digest = placement.digest
        try:
            if self._float is None:
                self._feeds = self._affordable(rehearsal, self.share * seconds)
                self._float = self._score(NO_PAIRS, rehearsal)
            if digest not in self._known:
                self._known[digest] = self._score(placement, rehearsal).value - self._float.value
        except DataError:  # of the metric itself, such as on a part of the samples; it is computed for builds
            return None
        self._sqnr_db[digest] = sqnr_db
        return self._expected(digest) + self._tolerance >= self.least

    def learn(self, trial: Trial) -> None:
        """Add the measured metric of a rehearsed candidate to the estimate of the offset."""
        change = self._known.get(trial.placement.digest)
        if change is not None and trial.accuracy is not None:
            sqnr_db = trial.sqnr_db if trial.all_data_db is None else trial.all_data_db
            self._built[trial.placement.digest] = sqnr_db, trial.accuracy - self.reference - change

    def refused_text(self) -> str:
        """The number of rehearsed placements expected to miss the limit and their best value; empty for none."""
        values = [self._expected(digest) for digest in self._known if digest not in self._built]
        missed = [value for value in values if value + self._tolerance < self.least]
        if not missed:
            return ""
        return (
            f"expected below {self.rules.key} {metric_text(self.rules.metric, self.least)} and not built: "
            f"{count_text(len(missed), 'rehearsed placement')}, {metric_text(self.rules.metric, max(missed))} at most"
        )

    def _expected(self, digest: str) -> float:
        own = self._sqnr_db.get(digest)
        offsets = [offset for db, offset in self._built.values() if own is None or db is None or db >= own]
        return self.reference + self._known[digest] + float(np.median(offsets or [0.0]))

    @property
    def _tolerance(self) -> float:
        """The value of one sample, if a part of the data is used and the metric counts samples."""
        if self._float is None or self._float.right is None or self._feeds >= self.scores.feeds:
            return 0.0
        return 1.0 / self._float.samples

    def _affordable(self, rehearsal: Rehearsal, seconds: float) -> int:
        """The number of feeds for each placement that the time allows."""
        first = next(iter(rehearsal.feeds()), None)
        if first is None:
            raise DataError("there is no sample to compute the metric on")
        rehearsal.engine(NO_PAIRS).run(first)  # shows the time of a run
        most = seconds / max(rehearsal.run_seconds, 1e-6)
        return int(min(max(most, self.least_feeds), self.scores.feeds))

    def _score(self, placement: Placement, rehearsal: Rehearsal) -> Score:
        engine = rehearsal.engine(placement)
        return self.scores.of_engine(engine, self.rules.metric, self.rules.output, feeds=self._feeds)
