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
        digest, own = (
            trial.placement.digest,
            trial.sqnr_db if trial.all_data_db is None else trial.all_data_db,
        )
        if self.admission is None:
            return own
        few_db = self.admission.few_db.get(digest) if own is None else own
        return self.admission.confirmed_db.get(digest, few_db)

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
        """The gaps by which candidates faster than the reference missed the constraints; empty if none did.

        Those that miss the limit of the SQNR are named apart from those that miss the limit of the task metric.
        """
        lost = {
            trial.placement.digest: trial
            for trial in trials
            if trial.ok and not trial.subgraph and (trial.ratio or 1.0) < 1 and not self.reaches(trial)
        }
        noisy = [
            t for t in lost.values() if not reaches(replace(t, sqnr_db=self.sqnr_db(t)), self.min_sqnr_db)
        ]
        scored = [trial for trial in lost.values() if trial not in noisy]
        return "; ".join(self._missed(each) for each in (scored, noisy) if each)

    def _missed(self, lost: Sequence[Trial]) -> str:
        """The limit that these faster candidates miss, and how the most accurate and the fastest of them miss it."""
        best = max(lost, key=lambda t: self._value(t) or -math.inf)
        fastest = min(lost, key=lambda t: t.ratio or 1.0)
        gap = self.gap(best)
        also = "" if fastest is best else f", the fastest {self._found(fastest)}"
        count = count_text(len(lost), "faster candidate")
        which = "it has" if len(lost) == 1 else "the most accurate of them has"
        verb = "misses" if len(lost) == 1 else "miss"
        least = f" by {'at least ' if len(lost) > 1 else ''}{gap}" if gap else ""
        return f"{count} {verb} {self.limit_text(best)}{least}: {which} {self._found(best)}{also}"

    def _found(self, trial: Trial) -> str:
        """The value that a limit judges, with the time that it costs."""
        value = self._value(trial)
        text = "an unknown SQNR" if value is None else self._unit(trial, value)
        return f"{text} in {ratio_text(trial.ratio or 1.0)} of the reference's time"

    def _judged_by_metric(self, trial: Trial) -> bool:
        """Whether the limit of the task metric decides on a trial: it meets that of the SQNR, and has a value."""
        known = replace(trial, sqnr_db=self.sqnr_db(trial))
        return self.rules is not None and trial.accuracy is not None and reaches(known, self.min_sqnr_db)

    def _value(self, trial: Trial) -> float | None:
        return trial.accuracy if self._judged_by_metric(trial) else self.sqnr_db(trial)

    def _unit(self, trial: Trial, value: float) -> str:
        if self.rules is not None and self._judged_by_metric(trial):
            return f"{self.rules.key} {metric_text(self.rules.metric, value)}"
        return f"{value:.1f} dB"

    def gap(self, trial: Trial) -> str:
        """The distance of a trial to the limit that it misses: ``1.9 dB``; empty if that is unknown."""
        by_metric, value = self._judged_by_metric(trial), self._value(trial)
        least = self.min_accuracy if by_metric else self.min_sqnr_db
        if value is None or least is None:
            return ""
        if by_metric and self.rules is not None:
            return metric_text(self.rules.metric, least - value)
        return f"{least - value:.1f} dB"

    def limit_text(self, trial: Trial) -> str:
        """The limit that decides on a trial, with its value: ``the SQNR limit of 20 dB (the default)``."""
        if self.rules is not None and self._judged_by_metric(trial) and self.min_accuracy is not None:
            least = metric_text(self.rules.metric, self.min_accuracy)
            return f"the limit of {self.rules.key} of {least}"
        origin = " (the default)" if self.limits.source == "default" else ""
        return f"the SQNR limit of {self.min_sqnr_db:g} dB{origin}"

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
