"""What SQNR it takes to keep a task metric, learnt from candidates that were scored by it. Pure; may import floor 0."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqspec.types import Trial

HOPELESS_DB = 3.0  # below one whose score was too low: twice its noise
STEP_DB = 5.0  # how much more than that is aimed at while nothing is known to do


@dataclass(slots=True)
class NoiseBar:
    """How little noise keeps a score, as far as scored candidates tell.

    Noise and score go together only loosely: this says what to try and what not to race, never what wins.
    """

    kept: list[float] = field(default_factory=list)  # SQNR in dB of those whose score was high enough
    lost: list[float] = field(default_factory=list)  # and of those whose score was not

    def learn(self, trial: Trial, least: float) -> None:
        """Take in a scored candidate; one without a score, an SQNR or any pairs tells nothing."""
        if trial.accuracy is not None and trial.sqnr_db is not None and trial.placement.sites:
            (self.kept if trial.accuracy >= least else self.lost).append(trial.sqnr_db)

    @property
    def lost_db(self) -> float:
        """The SQNR of the cleanest one refused that is noisier than all that were not; minus infinity for none."""
        noisiest_kept = min(self.kept, default=float("inf"))
        return max((db for db in self.lost if db < noisiest_kept), default=-float("inf"))

    def is_hopeless(self, sqnr_db: float) -> bool:
        """Whether a candidate is so much noisier than one refused that it is not worth a race."""
        return sqnr_db <= self.lost_db - HOPELESS_DB

    @property
    def aim_db(self) -> float | None:
        """The SQNR worth trying next: between what was refused and what was not; ``None`` while none was refused."""
        if not self.lost:
            return None
        if self.lost_db == -float("inf"):
            return min(self.kept)
        quietest = self.lost_db + STEP_DB
        return min(quietest, (self.lost_db + min(self.kept)) / 2) if self.kept else quietest
