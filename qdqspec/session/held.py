"""What accuracy a search is held to: a smallest SQNR, a task metric, or both. Part of the session.

The SQNR on a few calibration samples is told of every candidate; the metric is taken on all evaluation data, of the
reference once and of each candidate that has won its races.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.errors import BackendError, DataError
from qdqspec.measure.admission import Admission
from qdqspec.parity.gate import OutputGate
from qdqspec.search.select import reaches
from qdqspec.session.prepare import Prepared, require_path
from qdqspec.types import AccuracyBound, AccuracyRules, Placement, Trial
from qdqspec.units import count_text, metric_text, ratio_text

NO_PLACEMENT = Placement(sites=frozenset())


@dataclass(frozen=True, slots=True)
class Held:
    """A case's constraints with the reference scored, and who they admit. Nobody is heard where none is asked for."""

    min_sqnr_db: float | None
    rules: AccuracyRules | None
    samples: int
    admission: Admission | None

    @property
    def min_accuracy(self) -> float | None:
        """The smallest value of the metric that can win."""
        return None if self.rules is None or self.admission is None else self.admission.least

    def reaches(self, trial: Trial) -> bool:
        """Whether a trial is accurate enough, as far as is known."""
        return reaches(trial, self.min_sqnr_db, self.min_accuracy)

    def score(self, placement: Placement) -> float | None:
        """A placement's value of the metric, where that is known."""
        return None if self.admission is None else self.admission.scores.get(placement.digest)

    def bound(self, shipped: Placement) -> AccuracyBound | None:
        """What the metric came to, once it is known what is shipped."""
        if self.rules is None or self.admission is None or self.admission.least is None:
            return None
        scores = self.admission.scores
        reference = scores[NO_PLACEMENT.digest]
        others = [score for digest, score in scores.items() if digest != NO_PLACEMENT.digest]
        return AccuracyBound(
            metric=self.rules.key,
            least=self.admission.least,
            reference=reference,
            shipped=scores.get(shipped.digest, reference),
            best=max(others, default=None),
            scored=len(others),
            samples=self.samples,
        )

    def in_the_way(self, trials: Sequence[Trial]) -> str:
        """What candidates that were faster than the reference lacked; empty where accuracy stood in nobody's way."""
        fast = [t for t in trials if t.ok and not t.subgraph and t.ratio is not None and t.ratio < 1]
        lost = [trial for trial in fast if not self.reaches(trial)]
        if not lost:
            return ""
        scored = [trial for trial in lost if trial.accuracy is not None]
        best = max(scored or lost, key=lambda t: (t.accuracy or 0.0, t.sqnr_db or 0.0))
        reached = f"the best of them reached {self._said(best, best.accuracy, best.sqnr_db)}"
        wanted = self._said(best, self.min_accuracy, self.min_sqnr_db)
        return (
            f"{count_text(len(lost), 'faster candidate')} did not keep {wanted}; {reached}, "
            f"in {ratio_text(best.ratio or 1.0)} of the reference's time"
        )

    def _said(self, trial: Trial, accuracy: float | None, sqnr_db: float | None) -> str:
        if self.rules is not None and trial.accuracy is not None and accuracy is not None:
            return f"{self.rules.key} {metric_text(self.rules.metric, accuracy)}"
        return "an SQNR" if sqnr_db is None else f"{sqnr_db:.1f} dB"


def held_of(prepared: Prepared, backend: Backend, options: BuildOptions) -> Held:
    """What a case's search is held to; builds and runs the reference where anything is."""
    asked = prepared.case.tune
    if asked.objective != "pareto" and asked.min_sqnr_db is None and asked.accuracy is None:
        return Held(None, None, 0, None)
    with closing(backend.build(require_path(prepared.given), options)) as reference:
        admission = Admission(OutputGate(reference, prepared.feeds()), asked.min_sqnr_db)
    if asked.accuracy is not None:
        _hold(admission, prepared, asked.accuracy)
    return Held(asked.min_sqnr_db, asked.accuracy, prepared.scores.samples, admission)


def _hold(admission: Admission, prepared: Prepared, rules: AccuracyRules) -> None:
    """Have would-be winners scored, and the least that they must reach known from the reference's score."""
    scores = prepared.scores
    reference = scores.of_reference(rules.metric, rules.output)
    admission.least = rules.least(reference.value)
    admission.scores[NO_PLACEMENT.digest] = reference.value

    def score(engine: Engine) -> float:
        """A metric that judged the reference and fails on a candidate is the candidate's failure."""
        try:
            value = scores.of_engine(engine, rules.metric, rules.output).value
        except DataError as error:
            raise BackendError(error.what, where=error.where) from error
        if not math.isfinite(value):
            raise BackendError(f"metric '{rules.metric}' gave {value} for this candidate")
        return value

    admission.score = score
    _warn(prepared, rules, reference.value, steps=reference.right is not None)


def _warn(prepared: Prepared, rules: AccuracyRules, reference: float, *, steps: bool) -> None:
    """Say what of the constraint can hardly be kept."""
    samples, name = prepared.scores.samples, rules.metric
    if rules.min is not None and reference < rules.min:
        own, least = metric_text(name, reference), metric_text(name, rules.min)
        prepared.warnings.append(
            f"tune.accuracy: the reference itself has {name} {own}, below the {least} asked"
        )
    if steps and rules.max_drop is not None and rules.max_drop < 1 / samples:
        worth, most = f"{100 / samples:.2g} %", metric_text(name, rules.max_drop)
        prepared.warnings.append(
            f"tune.accuracy: one sample of {samples} is {worth}, so that a drop of {most} lets none be lost"
        )
