"""The accuracy limits of a case: a smallest SQNR, a task metric, or both, on evaluation data, else calibration data."""

from __future__ import annotations

import math

from qdqspec._core.units import metric_text
from qdqspec.accuracy.gate import Evaluator, Runs
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.errors import BackendError, DataError
from qdqspec.search.limits import Limits, MetricLimit
from qdqspec.types import AccuracyRules


def limits_of(prepared: Prepared, *, all_data_share: float = 0.05) -> Limits:
    """The limits of a case's search; builds and runs the reference if there are any.

    ``all_data_share`` of the time of a search may go to one candidate on all data: with less, less data decides.
    """
    asked = prepared.case.tune
    measures_db = asked.objective == "pareto" or asked.limits.min_sqnr_db is not None
    if not measures_db and asked.accuracy is None:
        return Limits(asked=asked.limits)
    feeds, data = prepared.comparison_data()
    seconds = math.inf if asked.minutes is None else all_data_share * 60 * asked.minutes
    evaluator = Evaluator(feeds, prepared.build_expected, len(feeds), seconds=seconds)
    return Limits(
        asked=asked.limits,
        metric=None if asked.accuracy is None else _metric_limit(prepared, asked.accuracy),
        first_samples=lambda engine: evaluator.first(engine)[0],
        all_data=evaluator if evaluator.samples > evaluator.few else None,
        data=data,
        confirms_sqnr=measures_db,
    )


def _metric_limit(prepared: Prepared, rules: AccuracyRules) -> MetricLimit:
    """The limit of a task metric, derived from the reference's value."""
    scores = prepared.scores
    reference = scores.of_reference(rules.metric, rules.output)

    def score(engine: Runs) -> float:
        """The metric of a candidate; an error of the metric is a failure of the candidate."""
        try:
            value = scores.of_engine(engine, rules.metric, rules.output).value
        except DataError as error:
            raise BackendError(error.what, where=error.where) from error
        if not math.isfinite(value):
            raise BackendError(f"metric '{rules.metric}' gave {value} for this candidate")
        return value

    _warn(prepared, rules, reference.value, steps=reference.right is not None)
    return MetricLimit(
        least=rules.least(reference.value),
        rules=rules,
        reference=reference.value,
        samples=scores.samples,
        score=score,
    )


def _warn(prepared: Prepared, rules: AccuracyRules, reference: float, *, steps: bool) -> None:
    """Warn of limits that can hardly be met."""
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
