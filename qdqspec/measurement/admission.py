"""Accuracy constraints on candidates, independent of data and metric.

Two measurements: the SQNR on a few samples, cheap enough for every candidate, and those on all data (the task
metric, the SQNR), for candidates that have won their races or may be selected. Scored candidates calibrate the
error limit above which a candidate is not raced. The difference between the two SQNRs, measured on the first
candidate near the limit and on every race winner, is added to the SQNR on the few samples; where it is large,
every candidate near the limit is measured on all data, unless it was rehearsed on all data. Both are run on all
data, or on as much of it as shows that they are below the limit. Placements that may be selected are run on all
data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qdqspec.parity.gate import Evaluator, NoiseBar, Offset, Runs
from qdqspec.types import Placement, Trial

NEAR_DB = 6.0  # from the limit, within which candidates are measured on all data before a race


@dataclass(slots=True)
class Admission:
    """Measures the SQNR of each candidate; computes the task metric only for race winners.

    ``score`` is called once for each placement; without it and ``min_sqnr_db``, every candidate is admitted. The model
    without pairs always is. ``all_data`` measures the SQNR on all data, if ``sqnr_db`` uses only a part of it; with
    ``confirms_sqnr`` it is measured for placements that may be selected.
    """

    sqnr_db: Callable[[Runs], float]
    min_sqnr_db: float | None = None
    score: Callable[[Runs], float] | None = None
    least: float | None = None  # the smallest acceptable score
    all_data: Evaluator | None = None
    confirms_sqnr: bool = False  # whether the selected placement needs the SQNR on all data
    bar: NoiseBar = field(default_factory=NoiseBar)
    scores: dict[str, float] = field(default_factory=dict)  # by digest of the placement
    confirmed_db: dict[str, float] = field(default_factory=dict)  # SQNR on all data by digest
    few_db: dict[str, float] = field(default_factory=dict)  # SQNR on the few samples by digest
    difference: Offset = field(default_factory=Offset)

    def measured(self, trial: Trial, engine: Runs) -> Trial:
        """The trial with its SQNR."""
        trial = self._noted(replace(trial, sqnr_db=self.sqnr_db(engine)))
        least, known = self.min_sqnr_db, trial.sqnr_db
        is_near = least is not None and known is not None and abs(known - least) <= NEAR_DB
        if is_near and not self.difference.is_small and not self.difference.is_of(trial.placement):
            trial = self._on_all_data(trial, engine)
        return trial

    def is_too_noisy(self, trial: Trial) -> bool:
        """Whether it cannot win, or its error is so large that its score need not be computed."""
        if trial.sqnr_db is None:
            return False
        found = trial.all_data_db
        if found is None:
            found = trial.sqnr_db + self.difference.at(trial.sqnr_db, trial.placement)
        below = self.min_sqnr_db is not None and found < self.min_sqnr_db
        return below or self.bar.is_far_below(trial.sqnr_db)

    def scored(self, trial: Trial, engine: Runs) -> Trial:
        """A race winner with its SQNR on all data and its score; it does not win if one is too low."""
        trial = self._on_all_data(trial, engine)
        if trial.all_data_db is not None and self.min_sqnr_db is not None:
            trial = replace(trial, incumbent=trial.incumbent and trial.all_data_db >= self.min_sqnr_db)
        if self.score is None or self.least is None:
            return trial
        digest = trial.placement.digest
        if digest not in self.scores:
            self.scores[digest] = self.score(engine)
        trial = replace(trial, accuracy=self.scores[digest])
        self.bar.learn(trial, self.least)
        return replace(trial, incumbent=trial.incumbent and self._keeps_score(trial.placement))

    def recall(self, trial: Trial) -> None:
        """Add the result of a trial of an earlier run."""
        self._noted(trial)
        self._learn_difference(trial)
        if trial.accuracy is not None and self.least is not None:
            self.scores[trial.placement.digest] = trial.accuracy
            self.bar.learn(trial, self.least)

    def is_known(self, placement: Placement) -> bool:
        """Whether everything that the constraints need of a placement is measured."""
        digest = placement.digest
        return (self.score is None or digest in self.scores) and (
            not self.confirms_sqnr or digest in self.confirmed_db
        )

    def confirm(self, placement: Placement, engine: Runs) -> None:
        """Measure the unknown figures of a placement on all data: its score, and its SQNR if required."""
        digest = placement.digest
        if self.score is not None and digest not in self.scores:
            self.scores[digest] = self.score(engine)
        if self.confirms_sqnr and digest not in self.confirmed_db:
            self.confirmed_db[digest] = (self.all_data or self.sqnr_db)(engine)

    def remove(self, placement: Placement) -> None:
        """Drop what is known of a placement, whose numbers change."""
        for known in (self.scores, self.confirmed_db, self.few_db):
            known.pop(placement.digest, None)

    def is_below(self, placement: Placement, engine: Runs) -> bool:
        """Whether a placement is below the SQNR limit on the few samples, or known to be on all data.

        One that was no candidate of the search is measured here on the few samples, before all data is read.
        """
        least, digest = self.min_sqnr_db, placement.digest
        if least is None or self.all_data is None or not self.confirms_sqnr:
            return False
        if digest in self.confirmed_db:
            return self.confirmed_db[digest] < least
        if digest not in self.few_db:
            self.few_db[digest] = self.sqnr_db(engine)
        few_db = self.few_db[digest]
        return few_db + self.difference.at(few_db, placement) < least

    def admits(self, placement: Placement) -> bool:
        """Whether a confirmed placement meets the constraints."""
        least, found = self.min_sqnr_db, self.confirmed_db.get(placement.digest)
        keeps_sqnr = least is None or found is None or found >= least
        return not placement.sites or (self._keeps_score(placement) and keeps_sqnr)

    def _keeps_score(self, placement: Placement) -> bool:
        return self.least is None or not placement.sites or self.scores[placement.digest] >= self.least

    def _on_all_data(self, trial: Trial, engine: Runs) -> Trial:
        """The trial with its SQNR on as much data as decides, if the limit needs it and few samples are not all."""
        least, all_data = self.min_sqnr_db, self.all_data
        if not self.confirms_sqnr or least is None or all_data is None:
            return trial
        if not trial.placement.sites or trial.all_data_db is not None:
            return trial
        known = self.confirmed_db.get(trial.placement.digest)
        found, whole = all_data.near(engine, least) if known is None else (known, True)
        trial = replace(trial, all_data_db=found, is_part=not whole)
        self._learn_difference(trial)
        return trial

    def _learn_difference(self, trial: Trial) -> None:
        if trial.all_data_db is not None and trial.sqnr_db is not None and not trial.is_part:
            self.confirmed_db[trial.placement.digest] = trial.all_data_db
            self.difference.learn(trial.sqnr_db, trial.all_data_db, trial.placement)

    def _noted(self, trial: Trial) -> Trial:
        """Store the SQNR of a trial, as that on all data too if the few samples are all data."""
        if trial.sqnr_db is not None and trial.ok:
            self.few_db[trial.placement.digest] = trial.sqnr_db
        if self.all_data is None and trial.sqnr_db is not None and trial.ok:
            self.confirmed_db[trial.placement.digest] = trial.sqnr_db
        return trial
