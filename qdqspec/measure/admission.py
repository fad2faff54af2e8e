"""Which candidates are accurate enough to win. May import floors 0 to 2 and `qdqspec.parity`; knows no data or metric.

Two judges: the SQNR on a few samples, cheap enough for every candidate, and a score on all samples, which is
taken of those only that have won their races. Between them stands what the scored ones teach: how much noise is
surely too much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qdqspec.backends.base import Engine
from qdqspec.parity.noise_bar import NoiseBar
from qdqspec.types import Placement, Trial


@dataclass(slots=True)
class Admission:
    """Hears every candidate, and scores would-be winners.

    ``score`` is called once for each placement; without one, and without ``min_sqnr_db``, everyone is admitted. The
    model without any pairs always is: it is what there was before.
    """

    sqnr_db: Callable[[Engine], float]
    min_sqnr_db: float | None = None
    score: Callable[[Engine], float] | None = None
    least: float | None = None  # the smallest score that is good enough
    bar: NoiseBar = field(default_factory=NoiseBar)
    scores: dict[str, float] = field(default_factory=dict)  # by digest of the placement

    def heard(self, trial: Trial, engine: Engine) -> Trial:
        """The trial with its SQNR."""
        return replace(trial, sqnr_db=self.sqnr_db(engine))

    def is_too_noisy(self, trial: Trial) -> bool:
        """Whether it cannot win, or is so noisy that its score need not be taken."""
        if trial.sqnr_db is None:
            return False
        below = self.min_sqnr_db is not None and trial.sqnr_db < self.min_sqnr_db
        return below or self.bar.is_hopeless(trial.sqnr_db)

    def scored(self, trial: Trial, engine: Engine) -> Trial:
        """A would-be winner with its score, and no winner any more where that is too low."""
        if self.score is None or self.least is None:
            return trial
        digest = trial.placement.digest
        if digest not in self.scores:
            self.scores[digest] = self.score(engine)
        trial = replace(trial, accuracy=self.scores[digest])
        self.bar.learn(trial, self.least)
        return replace(trial, incumbent=trial.incumbent and self.admits(trial.placement))

    def recall(self, trial: Trial) -> None:
        """Take in what an earlier run has found."""
        if trial.accuracy is not None and self.least is not None:
            self.scores[trial.placement.digest] = trial.accuracy
            self.bar.learn(trial, self.least)

    def admits(self, placement: Placement) -> bool:
        """Whether a placement whose score is known is good enough."""
        return self.least is None or not placement.sites or self.scores[placement.digest] >= self.least
