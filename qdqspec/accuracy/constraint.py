"""The accuracy constraints of a search: a smallest SQNR, a task metric, or both.

They are evaluated on evaluation data, else on calibration data. The SQNR of every candidate is measured on its first
samples. All data is used for the metric of each candidate that won its races, and for the SQNR of those that may be
selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from qdqspec.errors import BackendError, DataError
from qdqspec.measurement.admission import Admission
from qdqspec.parity.gate import SAMPLES, Evaluator, Runs
from qdqspec.preparation.prepare import Prepared
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
        digest = trial.placement.digest
        own = trial.sqnr_db if trial.all_data_db is None else trial.all_data_db
        if self.admission is None:
            return own
        few_db = self.admission.few_db.get(digest) if own is None else own
        return self.admission.confirmed_db.get(digest, few_db)

    def reaches(self, trial: Trial) -> bool:
        """Whether a trial meets the constraints by the measurements so far."""
        return reaches(replace(trial, sqnr_db=self.sqnr_db(trial)), self.min_sqnr_db, self.min_accuracy)

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

    def gap(self, trial: Trial) -> str:
        """The distance of a trial to the limit that it misses: ``1.9 dB``; empty if that is unknown."""
        return self._judged(trial).gap

    def limit_text(self, trial: Trial) -> str:
        """The limit that decides on a trial, with its value: ``the SQNR limit of 20 dB (the default)``."""
        return self._judged(trial).limit

    def shortfall(self, trials: Sequence[Trial]) -> str:
        """The gaps by which candidates faster than the reference missed the constraints; empty if none did.

        Those that miss the limit of the SQNR are named apart from those that miss the limit of the task metric.
        """
        lost = {
            trial.placement.digest: trial
            for trial in trials
            if trial.ok and not trial.subgraph and (trial.ratio or 1.0) < 1 and not self.reaches(trial)
        }
        by_limit: dict[str, list[Trial]] = {}
        for trial in sorted(lost.values(), key=lambda trial: not self._judged(trial).name):
            by_limit.setdefault(self.limit_text(trial), []).append(trial)
        return "; ".join(self._missed(limit, each) for limit, each in by_limit.items())

    def _missed(self, limit: str, lost: Sequence[Trial]) -> str:
        """The gaps by which the most accurate and the fastest of these candidates miss a limit."""
        best = max(lost, key=lambda trial: self._judged(trial).rank)
        fastest = min(lost, key=lambda trial: trial.ratio or 1.0)
        gap, is_one = self.gap(best), len(lost) == 1
        verb, least, which = (
            ("misses", "", "it has") if is_one else ("miss", "at least ", "the most accurate of them has")
        )
        by = f" by {least}{gap}" if gap else ""
        also = "" if fastest is best else f", the fastest {self._found(fastest)}"
        return f"{count_text(len(lost), 'faster candidate')} {verb} {limit}{by}: {which} {self._found(best)}{also}"

    def _found(self, trial: Trial) -> str:
        """The value that a limit judges, with the time that it costs."""
        return f"{self._judged(trial).found} in {ratio_text(trial.ratio or 1.0)} of the reference's time"

    def _judged(self, trial: Trial) -> _Judged:
        """The limit that decides on a trial: that of the metric, if it meets that of the SQNR and has a value of it."""
        least_db, found_db = self.min_sqnr_db, self.sqnr_db(trial)
        keeps_sqnr = reaches(replace(trial, sqnr_db=found_db), least_db)
        if self.rules is not None and trial.accuracy is not None and keeps_sqnr:
            text, name = partial(metric_text, self.rules.metric), self.rules.key
            limit = "" if self.min_accuracy is None else f"the limit of {name} of {text(self.min_accuracy)}"
            return _Judged(limit, self.min_accuracy, trial.accuracy, text, f"{name} ")
        origin = " (the default)" if self.limits.source == "default" else ""
        limit = "" if least_db is None else f"the SQNR limit of {least_db:g} dB{origin}"
        return _Judged(limit, least_db, found_db, lambda db: f"{db:.1f} dB")

    def refused(self, trials: Sequence[Trial]) -> str:
        """Candidates that met the SQNR limit on the samples of the search but not on all data; empty for none."""
        least = self.min_sqnr_db
        if least is None or self.admission is None:
            return ""
        met = [trial for trial in trials if trial.sqnr_db is not None and trial.sqnr_db >= least]
        known = {trial.placement.digest: self.sqnr_db(trial) for trial in met}
        found = {digest: db for digest, db in known.items() if db is not None and db < least}
        if not found:
            return ""
        amount = "all" if self.admission.confirmed_db.keys() >= found.keys() else "more"
        return (
            f"{count_text(len(found), 'candidate')} reached {least:g} dB on the first {SAMPLES} samples and "
            f"{max(found.values()):.1f} dB at most on {amount} {self.data} data"
        )


@dataclass(frozen=True, slots=True)
class _Judged:
    """A limit in words with its value, the value of a trial that it judges, and how to write such values."""

    limit: str
    least: float | None
    value: float | None
    text: Callable[[float], str]
    name: str = ""  # of the metric, before its value

    @property
    def rank(self) -> float:
        """The value, for comparison with those of other trials."""
        return self.value or -math.inf

    @property
    def found(self) -> str:
        """The value in words."""
        return "an unknown SQNR" if self.value is None else f"{self.name}{self.text(self.value)}"

    @property
    def gap(self) -> str:
        """The distance of the value to the limit; empty if one is unknown."""
        return "" if self.value is None or self.least is None else self.text(self.least - self.value)


def constraint_of(prepared: Prepared) -> AccuracyConstraint:
    """The constraints of a case's search; builds and runs the reference if there are any."""
    asked, limits = prepared.case.tune, prepared.case.tune.limits
    measures_db = asked.objective == "pareto" or limits.min_sqnr_db is not None
    if not measures_db and asked.accuracy is None:
        return AccuracyConstraint(limits)
    feeds, data = prepared.comparison_data()
    seconds = math.inf if asked.minutes is None else ALL_DATA_SHARE * 60 * asked.minutes
    evaluator = Evaluator(feeds, prepared.build_expected, len(feeds), seconds=seconds)
    admission = Admission(lambda engine: evaluator.first(engine)[0], limits.min_sqnr_db)
    admission.confirms_sqnr = measures_db
    if evaluator.samples > evaluator.few:
        admission.all_data = evaluator
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
