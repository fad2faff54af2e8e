"""The accuracy constraints of a search: a smallest SQNR, a task metric, or both.

They are evaluated on evaluation data, else on calibration data. The SQNR of every candidate is measured on its first
samples. All data is used for the metric of each candidate that won its races, and for the SQNR of those that may be
selected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from qdqspec.errors import BackendError, DataError
from qdqspec.measurement.admission import Admission
from qdqspec.parity.gate import SAMPLES, AllData, HeldOutputs, NoiseBar, OutputGate, Runs
from qdqspec.preparation.prepare import Prepared
from qdqspec.programs import own_cores
from qdqspec.search.select import reaches
from qdqspec.types import AccuracyBound, AccuracyRules, Placement, SearchLimits, Trial
from qdqspec.units import count_text, metric_text, ratio_text

ALL_DATA_SHARE = 0.05  # of a search's time, for one candidate on all data
NO_PLACEMENT = Placement(sites=frozenset())


@dataclass(frozen=True, slots=True)
class AccuracyConstraint:
    """A case's constraints with the reference's score. Without ``admission`` nothing is measured and all is admitted.

    ``data`` names the data on which the SQNR is decided: "evaluation", "calibration" or "random".
    """

    limits: SearchLimits
    rules: AccuracyRules | None = None
    samples: int = 0
    admission: Admission | None = None
    data: str = ""

    @property
    def min_sqnr_db(self) -> float | None:
        """The smallest SQNR that can win."""
        return self.limits.min_sqnr_db

    @property
    def min_accuracy(self) -> float | None:
        """The smallest value of the metric that can win."""
        return None if self.rules is None or self.admission is None else self.admission.least

    def sqnr_db(self, trial: Trial) -> float | None:
        """The SQNR of a trial: on all data or a part of it if measured, else on a few samples."""
        known = {} if self.admission is None else self.admission.confirmed_db
        part = trial.sqnr_db if trial.all_data_db is None else trial.all_data_db
        return known.get(trial.placement.digest, part)

    def reaches(self, trial: Trial) -> bool:
        """Whether a trial meets the constraints by the measurements so far."""
        return reaches(replace(trial, sqnr_db=self.sqnr_db(trial)), self.min_sqnr_db, self.min_accuracy)

    def for_other_numbers(self) -> AccuracyConstraint:
        """The same constraints for candidates with other scales, of which nothing is measured yet."""
        if self.admission is None:
            return self
        scores = self.admission.scores
        known = {name: scores[name] for name in (NO_PLACEMENT.digest,) if name in scores}
        other = replace(self.admission, bar=NoiseBar(), scores=known, confirmed_db={}, few_db={})
        return replace(self, admission=other)

    def confirmed_db(self, placement: Placement) -> float | None:
        """A placement's SQNR on all data, if measured."""
        return None if self.admission is None else self.admission.confirmed_db.get(placement.digest)

    def score(self, placement: Placement) -> float | None:
        """A placement's value of the metric, if measured."""
        return None if self.admission is None else self.admission.scores.get(placement.digest)

    def bound(self, selected: Placement) -> AccuracyBound | None:
        """The values of the metric for the selected placement; ``None`` without a metric."""
        if self.rules is None or self.admission is None or self.admission.least is None:
            return None
        scores = self.admission.scores
        reference = scores[NO_PLACEMENT.digest]
        others = [score for digest, score in scores.items() if digest != NO_PLACEMENT.digest]
        return AccuracyBound(
            metric=self.rules.key,
            least=self.admission.least,
            reference=reference,
            shipped=scores.get(selected.digest, reference),
            best=max(others, default=None),
            scored=len(others),
            samples=self.samples,
        )

    def shortfall(self, trials: Sequence[Trial]) -> str:
        """The gaps by which candidates faster than the reference missed the constraints; empty if none did."""
        fast = [t for t in trials if t.ok and not t.subgraph and t.ratio is not None and t.ratio < 1]
        lost = [trial for trial in fast if not self.reaches(trial)]
        if not lost:
            return ""
        scored = [trial for trial in lost if trial.accuracy is not None]
        best = max(scored or lost, key=lambda t: (t.accuracy or 0.0, self.sqnr_db(t) or 0.0))
        wanted = self._text(best, self.min_accuracy, self.min_sqnr_db)
        reached = self._text(best, best.accuracy, self.sqnr_db(best))
        return (
            f"{count_text(len(lost), 'faster candidate')} did not meet {wanted}{self._origin(best)}; "
            f"the best of them reached {reached}, in {ratio_text(best.ratio or 1.0)} of the reference's time"
        )

    def refused(self, trials: Sequence[Trial]) -> str:
        """Candidates that met the SQNR limit on the samples of the search but not on all data; empty for none."""
        least = self.min_sqnr_db
        if least is None or self.admission is None:
            return ""
        found = {
            t.placement.digest: found_db
            for t in trials
            if t.sqnr_db is not None
            and t.sqnr_db >= least
            and (found_db := self.sqnr_db(t)) is not None
            and found_db < least
        }
        if not found:
            return ""
        known = self.admission.confirmed_db
        data = f"all {self.data}" if known.keys() >= found.keys() else f"more {self.data}"
        return (
            f"{count_text(len(found), 'candidate')} reached {least:g} dB on the first {SAMPLES} samples and "
            f"{max(found.values()):.1f} dB at most on {data} data"
        )

    def _text(self, trial: Trial, accuracy: float | None, sqnr_db: float | None) -> str:
        if self.rules is not None and trial.accuracy is not None and accuracy is not None:
            return f"{self.rules.key} {metric_text(self.rules.metric, accuracy)}"
        return "an SQNR" if sqnr_db is None else f"{sqnr_db:.1f} dB"

    def _origin(self, trial: Trial) -> str:
        by_metric = self.rules is not None and trial.accuracy is not None
        return " (the default limit)" if self.limits.source == "default" and not by_metric else ""


def constraint_of(prepared: Prepared) -> AccuracyConstraint:
    """The constraints of a case's search; builds and runs the reference if there are any."""
    asked, limits = prepared.case.tune, prepared.case.tune.limits
    measures_db = asked.objective == "pareto" or limits.min_sqnr_db is not None
    if not measures_db and asked.accuracy is None:
        return AccuracyConstraint(limits)
    feeds, data = prepared.comparison_data()
    with closing(prepared.build_expected()) as reference:
        gate = OutputGate(reference, feeds)
    admission = Admission(gate, limits.min_sqnr_db)
    admission.confirms_sqnr = measures_db
    if len(feeds) > SAMPLES:
        seconds = math.inf if asked.minutes is None else ALL_DATA_SHARE * 60 * asked.minutes
        at_once = own_cores() > prepared.options.threads
        held = HeldOutputs(gate.known)
        admission.all_data = AllData(
            feeds, prepared.build_expected, held, samples=len(feeds), seconds=seconds, at_once=at_once
        )
    if asked.accuracy is not None:
        _add_metric(admission, prepared, asked.accuracy)
    return AccuracyConstraint(limits, asked.accuracy, prepared.scores.samples, admission, data)


def _add_metric(admission: Admission, prepared: Prepared, rules: AccuracyRules) -> None:
    """Add a task metric to the admission: its function, and the limit derived from the reference's score."""
    scores = prepared.scores
    reference = scores.of_reference(rules.metric, rules.output)
    admission.least = rules.least(reference.value)
    admission.scores[NO_PLACEMENT.digest] = reference.value

    def score(engine: Runs) -> float:
        """The metric of a candidate; an error of the metric is a failure of the candidate."""
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
    """Warn of constraints that can hardly be met."""
    samples, name = prepared.scores.samples, rules.metric
    if rules.min is not None and reference < rules.min:
        own, least = metric_text(name, reference), metric_text(name, rules.min)
        prepared.warnings.append(
            f"tune.accuracy: the reference itself has {name} {own}, below the limit {least}"
        )
    if steps and rules.max_drop is not None and rules.max_drop < 1 / samples:
        worth, most = f"{100 / samples:.2g} %", metric_text(name, rules.max_drop)
        prepared.warnings.append(
            f"tune.accuracy: one sample of {samples} is {worth}, so that a drop of {most} allows no loss of a sample"
        )
