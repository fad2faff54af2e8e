"""Which candidates meet the accuracy constraints. Knows no data and no metric.

Two measurements: the SQNR on a few samples, cheap enough for every candidate, and those on all data (the task metric,
the SQNR), which are taken of the candidates that have won their races or are about to be selected. Scored candidates
calibrate the error limit above which a race is not worth its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qdqspec.backends.base import Engine
from qdqspec.parity.noise_bar import NoiseBar
from qdqspec.types import Placement, Trial


@dataclass(slots=True)
class Admission:
    """Measures the SQNR of each candidate; computes the task metric only for race winners.

    ``score`` is called once for each placement; without one, and without ``min_sqnr_db``, every candidate is admitted.
    The model without any pairs always is. ``all_data`` measures the SQNR on all data, where ``sqnr_db`` does not
    already take all of it; with ``confirms_sqnr`` it is measured of what may be selected.
    """

    sqnr_db: Callable[[Engine], float]
    min_sqnr_db: float | None = None
    score: Callable[[Engine], float] | None = None
    least: float | None = None  # the smallest score that is good enough
    all_data: Callable[[Engine], float] | None = None
    confirms_sqnr: bool = False  # whether the SQNR on all data matters for what is selected
    bar: NoiseBar = field(default_factory=NoiseBar)
    scores: dict[str, float] = field(default_factory=dict)  # by digest of the placement
    confirmed_db: dict[str, float] = field(default_factory=dict)  # the SQNR on all data, by digest

    def measured(self, trial: Trial, engine: Engine) -> Trial:
        """The trial with its SQNR."""
        return self._noted(replace(trial, sqnr_db=self.sqnr_db(engine)))

    def is_too_noisy(self, trial: Trial) -> bool:
        """Whether it cannot win, or its error is so large that its score need not be taken."""
        if trial.sqnr_db is None:
            return False
        below = self.min_sqnr_db is not None and trial.sqnr_db < self.min_sqnr_db
        return below or self.bar.is_hopeless(trial.sqnr_db)

    def scored(self, trial: Trial, engine: Engine) -> Trial:
        """A race winner with its score; it does not win where that is too low."""
        if self.score is None or self.least is None:
            return trial
        digest = trial.placement.digest
        if digest not in self.scores:
            self.scores[digest] = self.score(engine)
        trial = replace(trial, accuracy=self.scores[digest])
        self.bar.learn(trial, self.least)
        return replace(trial, incumbent=trial.incumbent and self._keeps_score(trial.placement))

    def recall(self, trial: Trial) -> None:
        """Take in what an earlier run has found."""
        self._noted(trial)
        if trial.accuracy is not None and self.least is not None:
            self.scores[trial.placement.digest] = trial.accuracy
            self.bar.learn(trial, self.least)

    def is_known(self, placement: Placement) -> bool:
        """Whether all is measured that decides about a placement."""
        digest = placement.digest
        return (self.score is None or digest in self.scores) and (
            not self.confirms_sqnr or digest in self.confirmed_db
        )

    def confirm(self, placement: Placement, engine: Engine) -> None:
        """Measure on all data what is not known of a placement: its score, and its SQNR where that matters."""
        digest = placement.digest
        if self.score is not None and digest not in self.scores:
            self.scores[digest] = self.score(engine)
        if self.confirms_sqnr and digest not in self.confirmed_db:
            self.confirmed_db[digest] = (self.all_data or self.sqnr_db)(engine)

    def admits(self, placement: Placement) -> bool:
        """Whether a placement that was confirmed is accurate enough."""
        least, found = self.min_sqnr_db, self.confirmed_db.get(placement.digest)
        keeps_sqnr = least is None or found is None or found >= least
        return not placement.sites or (self._keeps_score(placement) and keeps_sqnr)

    def _keeps_score(self, placement: Placement) -> bool:
        return self.least is None or not placement.sites or self.scores[placement.digest] >= self.least

    def _noted(self, trial: Trial) -> Trial:
        """Remember the SQNR of a trial where the few samples are all data."""
        if self.all_data is None and trial.sqnr_db is not None and trial.ok:
            self.confirmed_db[trial.placement.digest] = trial.sqnr_db
        return trial
