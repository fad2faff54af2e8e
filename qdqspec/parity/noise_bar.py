"""Estimates the minimum SQNR that satisfies the metric constraint. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqspec.types import Trial

# this far below a rejected candidate's SQNR, which is twice its noise, no candidate is raced
FAR_BELOW_DB = 3.0
STEP_DB = 5.0  # target above a rejected candidate's SQNR while no accepted one is known


@dataclass(slots=True)
class NoiseBar:
    """Estimates the minimum SQNR that satisfies a metric constraint, from scored candidates.

    SQNR and score are only loosely correlated: the estimate decides which candidates are tried and raced, never
    which one wins.
    """

    kept: list[float] = field(default_factory=list)  # SQNR in dB of candidates that satisfied the constraint
    lost: list[float] = field(default_factory=list)  # and of those that did not

    def learn(self, trial: Trial, least: float) -> None:
        """Add a scored candidate; one without a score, an SQNR or any pairs is ignored."""
        if trial.accuracy is not None and trial.sqnr_db is not None and trial.placement.sites:
            self.add(trial.sqnr_db, kept=trial.accuracy >= least)

    def add(self, sqnr_db: float, *, kept: bool) -> None:
        """Add a candidate's SQNR, and whether it satisfies the constraint."""
        (self.kept if kept else self.lost).append(sqnr_db)

    @property
    def rejected_db(self) -> float:
        """The highest SQNR of rejected candidates that is below that of all accepted ones; minus infinity for none."""
        noisiest_kept = min(self.kept, default=float("inf"))
        return max((db for db in self.lost if db < noisiest_kept), default=-float("inf"))

    def is_far_below(self, sqnr_db: float) -> bool:
        """Whether a candidate's SQNR is so far below a rejected one's that it is not worth a race."""
        return sqnr_db <= self.rejected_db - FAR_BELOW_DB

    @property
    def next_db(self) -> float | None:
        """The SQNR to try next: between that of rejected and accepted candidates; ``None`` while none was rejected."""
        if not self.lost:
            return None
        if self.rejected_db == -float("inf"):
            return min(self.kept)
        quietest = self.rejected_db + STEP_DB
        return min(quietest, (self.rejected_db + min(self.kept)) / 2) if self.kept else quietest
