"""The accuracy limits of a search: what is measured of placements, which are worth a race, and which may be selected.

A search has one `Limits`: the contest decides by it, and the strategy aims by it. The SQNR on the first samples is
measured for every candidate, that on all data and the task metric only for candidates that won their races or may be
selected. Scored candidates show the SQNR that the metric needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from qdqspec._core.arrays import Feed
from qdqspec._core.units import count_text, metric_text, ratio_text
from qdqspec.accuracy import Dataset, Evaluator, Offset, Runs, Scores
from qdqspec.errors import BackendError, DataError
from qdqspec.types import NO_PAIRS, AccuracyBound, AccuracyRules, Placement, SearchLimits, Trial, TuneRules


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLimit:
    """The smallest value ``least`` of a metric, and the ``reference``'s on all ``samples``; ``score`` measures it."""

    least: float
    rules: AccuracyRules = field(default_factory=AccuracyRules)
    reference: float = 1.0
    samples: int = 0
    score: Callable[[Runs], float] | None = None

    @classmethod
    def of(cls, rules: AccuracyRules, scores: Scores, note: Callable[[str], None]) -> MetricLimit:
        """The limit of a case; scores the reference, and notes if that is below the limit itself."""
        name, reference = rules.metric, scores.of_reference(rules.metric, rules.output).value

        def score(engine: Runs) -> float:
            """The metric of a candidate; an error of the metric is a failure of the candidate."""
            try:
                value = scores.of_engine(engine, name, rules.output).value
            except DataError as error:
                raise BackendError(error.what, where=error.where) from error
            if not math.isfinite(value):
                raise BackendError(f"metric '{name}' gave {value} for this candidate")
            return value

        if rules.min is not None and reference < rules.min:
            own, limit = metric_text(name, reference), metric_text(name, rules.min)
            note(f"tune.accuracy: the reference itself has {name} {own}, below the limit {limit}")
        least = rules.least(reference)
        return cls(least=least, rules=rules, reference=reference, samples=scores.samples, score=score)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is measured of a placement: the SQNR on the first samples and on all data, in dB, and the task metric.

    ``is_part`` is set if ``all_db`` is the SQNR on a part of the data that showed on which side of the limit it is.
    """

    few_db: float | None = None
    all_db: float | None = None
    is_part: bool = False
    score: float | None = None

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR on most data."""
        return self.few_db if self.all_db is None else self.all_db

    @property
    def whole_db(self) -> float | None:
        """The SQNR on all data."""
        return None if self.is_part else self.all_db


class Scored(NamedTuple):
    """The SQNRs of placements that met the metric's limit, and of those that missed it."""

    kept: list[float]
    lost: list[float]

    @property
    def missed_db(self) -> float:
        """The highest SQNR of those that missed the limit below that of all that met it; else minus infinity."""
        noisiest_kept = min(self.kept, default=math.inf)
        return max((db for db in self.lost if db < noisiest_kept), default=-math.inf)


@dataclass(frozen=True, slots=True)
class _Judged:
    """The limit that decides on a placement, the value that it judges, both in words, and the gap between them."""

    limit: str
    found: str
    value: float
    gap: str


@dataclass(slots=True, kw_only=True)
class Limits:
    """The limits of a case, and what is known of placements by trials, measurements and rehearsals.

    ``first_samples`` measures the SQNR of an engine on these; without it nothing is measured. ``all_data`` measures it
    on all data, if there is more. ``confirms_sqnr`` is set if a selected placement needs its SQNR on all data.

    Candidates within ``near_db`` of the SQNR limit may be measured on all data before a race: a smaller value reads
    less data, and races more candidates that cannot win. While no placement met the metric, the search aims ``step_db``
    above those that missed it: a smaller value has more builds that miss it.
    """

    asked: SearchLimits = field(default_factory=SearchLimits)
    metric: MetricLimit | None = None
    first_samples: Callable[[Runs], float] | None = None
    all_data: Evaluator | None = None
    confirms_sqnr: bool = True
    near_db: float = 6.0
    step_db: float = 5.0
    difference: Offset = field(default_factory=Offset)
    known: dict[str, Figures] = field(default_factory=dict)  # by digest of the placement
    # by digest: the expected SQNR, and whether the metric's limit is expected to be met
    rehearsed: dict[str, tuple[float, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.metric is not None:
            self.known.setdefault(NO_PAIRS.digest, Figures(score=self.metric.reference))

    @classmethod
    def of(
        cls,
        rules: TuneRules,
        scores: Scores,
        open_data: Callable[[], tuple[Dataset | list[Feed], str]],
        reference: Callable[[], Runs],
        note: Callable[[str], None],
        *,
        all_data_share: float = 0.05,
    ) -> Limits:
        """The limits of a search by the rules of its case; builds and runs the ``reference`` if there are any.

        ``open_data`` gives the data to compare outputs on. ``all_data_share`` of the time may go to one candidate on
        all data: a smaller share means that fewer samples decide.
        """
        measures_db = rules.objective == "pareto" or rules.limits.min_sqnr_db is not None
        if not measures_db and rules.accuracy is None:
            return cls(asked=rules.limits)
        metric = None if rules.accuracy is None else MetricLimit.of(rules.accuracy, scores, note)
        feeds, _ = open_data()
        seconds = math.inf if rules.minutes is None else all_data_share * 60 * rules.minutes
        evaluator = Evaluator(feeds, reference, len(feeds), seconds=seconds)
        return cls(
            asked=rules.limits,
            metric=metric,
            first_samples=evaluator.first,
            all_data=evaluator if evaluator.samples > evaluator.few else None,
            confirms_sqnr=measures_db,
        )

    @property
    def are_measured(self) -> bool:
        """Whether candidates are measured at all."""
        return self.first_samples is not None

    @property
    def min_sqnr_db(self) -> float | None:
        """The smallest SQNR that can win."""
        return self.asked.min_sqnr_db

    @property
    def min_accuracy(self) -> float | None:
        """The smallest value of the metric that can win."""
        return None if self.metric is None else self.metric.least

    def figures(self, placement: Placement) -> Figures:
        """What is measured of a placement."""
        return self.known.get(placement.digest, Figures())

    # ---- decisions ------------------------------------------------------------------------------

    def admits(self, placement: Placement) -> bool:
        """Whether a placement meets the limits by what is measured of it; the one without pairs always does."""
        return not placement.sites or (self.keeps_sqnr(placement) and self.keeps_metric(placement))

    def keeps_metric(self, placement: Placement) -> bool:
        """Whether a placement meets the limit of the metric, or its metric is not measured."""
        score = self.figures(placement).score
        return self.metric is None or score is None or score >= self.metric.least

    def keeps_sqnr(self, placement: Placement) -> bool:
        """Whether a placement meets the SQNR limit by what is measured of it."""
        least, found = self.min_sqnr_db, self.figures(placement).sqnr_db
        return least is None or (found is not None and found >= least)

    def excludes(self, placement: Placement) -> bool:
        """Whether a placement is below the SQNR limit on all data, or expected to be by the first samples."""
        least, found = self.min_sqnr_db, self.measured_db(placement)
        return least is not None and found is not None and found < least

    @property
    def is_missed(self) -> bool:
        """Whether a built placement was below the SQNR limit."""
        least, found = self.min_sqnr_db, (each.sqnr_db for each in self.known.values())
        return least is not None and any(db is not None and db < least for db in found)

    def measured_db(self, placement: Placement) -> float | None:
        """The SQNR of a placement on all data, or as expected by the first samples; ``None`` if it was not measured."""
        figures = self.figures(placement)
        if figures.all_db is not None or figures.few_db is None:
            return figures.all_db
        return figures.few_db + self.difference.at(figures.few_db, placement)

    def is_known(self, placement: Placement) -> bool:
        """Whether everything that the limits need of a placement is measured."""
        figures = self.figures(placement)
        has_sqnr = not self.confirms_sqnr or figures.whole_db is not None
        return has_sqnr and (self.metric is None or figures.score is not None)

    # ---- measurements ---------------------------------------------------------------------------

    def measure(self, trial: Trial, engine: Runs) -> Trial:
        """The trial with its SQNR, also on all data if it is near the limit and all data may differ much."""
        if self.first_samples is None:
            return trial
        least, found = self.min_sqnr_db, self.first_samples(engine)
        trial = replace(trial, sqnr_db=found)
        self.learn(trial)
        is_near = least is not None and abs(found - least) <= self.near_db
        if is_near and not self.difference.is_small and trial.placement not in self.difference.known:
            trial = self._on_all_data(trial, engine)
        return trial

    def score(self, trial: Trial, engine: Runs) -> Trial:
        """A race winner with its SQNR on all data and its metric; it does not win if one is too low."""
        if not self.are_measured:
            return trial
        trial = self._on_all_data(trial, engine)
        if self.metric is not None and self.metric.score is not None:
            score = self.figures(trial.placement).score
            trial = replace(trial, accuracy=self.metric.score(engine) if score is None else score)
            self.learn(trial)
        return replace(trial, incumbent=trial.incumbent and self.admits(trial.placement))

    def confirm(self, placement: Placement, engine: Runs) -> None:
        """Measure the unknown figures of a placement on all data."""
        figures = self.figures(placement)
        if self.metric is not None and self.metric.score is not None and figures.score is None:
            figures = replace(figures, score=self.metric.score(engine))
        measure = self.all_data or self.first_samples
        if self.confirms_sqnr and measure is not None and figures.whole_db is None:
            figures = replace(figures, all_db=measure(engine), is_part=False)
        self.known[placement.digest] = figures

    def is_below(self, placement: Placement, engine: Runs) -> bool:
        """Whether a placement is expected below the SQNR limit, by the first samples, before all data is read."""
        if self.first_samples is None or self.all_data is None:
            return False
        figures = self.figures(placement)
        few_db = self.first_samples(engine) if figures.few_db is None else figures.few_db
        self.known[placement.digest] = replace(figures, few_db=few_db)
        return self.excludes(placement)

    def learn(self, trial: Trial) -> None:
        """Learn the figures of a trial, also of one of an earlier run."""
        if not trial.ok or trial.subgraph:
            return
        few_db, all_db, placement = trial.sqnr_db, trial.all_data_db, trial.placement
        if few_db is not None and all_db is not None and not trial.is_part:
            self.difference.learn(few_db, all_db, placement)
        figures = self.figures(placement)
        if few_db is not None:
            figures = replace(figures, few_db=few_db)
            all_db = few_db if self.all_data is None and self.are_measured else all_db
        if all_db is not None and figures.whole_db is None:
            figures = replace(figures, all_db=all_db, is_part=trial.is_part)
        if trial.accuracy is not None:
            figures = replace(figures, score=trial.accuracy)
        self.known[placement.digest] = figures

    def _on_all_data(self, trial: Trial, engine: Runs) -> Trial:
        """The trial with its SQNR on as much data as decides, if the limit needs it and there is more data."""
        least, all_data, placement = self.min_sqnr_db, self.all_data, trial.placement
        if not self.confirms_sqnr or least is None or all_data is None:
            return trial
        if not placement.sites or trial.all_data_db is not None:
            return trial
        whole_db = self.figures(placement).whole_db
        found, is_whole = all_data.near(engine, least) if whole_db is None else (whole_db, True)
        trial = replace(trial, all_data_db=found, is_part=not is_whole)
        self.learn(trial)
        return trial

    # ---- the SQNR that the metric needs ---------------------------------------------------------

    def rehearse(self, placement: Placement, sqnr_db: float, *, kept: bool) -> None:
        """Add, once for each placement, the expected SQNR and whether it is expected to meet the metric's limit."""
        self.rehearsed.setdefault(placement.digest, (sqnr_db, kept))

    @property
    def scored(self) -> Scored:
        """The SQNRs of builds of which the metric is known, and of rehearsed placements that were not built.

        A rehearsed placement counts as one that met the limit only above the SQNR of builds that missed it.
        """
        found, least = Scored([], []), math.inf if self.metric is None else self.metric.least
        built = {digest: each for digest, each in self.known.items() if each.score is not None}
        for digest, each in built.items():
            if each.score is not None and each.few_db is not None and digest != NO_PAIRS.digest:
                (found.kept if each.score >= least else found.lost).append(each.few_db)
        missed_db = found.missed_db
        for digest, (sqnr_db, is_kept) in self.rehearsed.items():
            if digest not in built and (not is_kept or sqnr_db > missed_db):
                (found.kept if is_kept else found.lost).append(sqnr_db)
        return found

    @property
    def aim_db(self) -> float | None:
        """The smallest SQNR worth aiming at: the limit, or that between placements that missed and met the metric."""
        kept, lost = scored = self.scored
        aims = [] if self.min_sqnr_db is None else [self.min_sqnr_db]
        if lost:
            step = scored.missed_db + self.step_db
            middle = (scored.missed_db + min(kept)) / 2 if kept else step
            aims.append(min(kept) if scored.missed_db == -math.inf else min(step, middle))
        return max(aims, default=None)

    def bound(self, selected: Placement) -> AccuracyBound | None:
        """The values of the metric for the selected placement; ``None`` without a metric."""
        if self.metric is None:
            return None
        scores = {d: each.score for d, each in self.known.items() if each.score is not None}
        others = [scores[digest] for digest in scores.keys() - {NO_PAIRS.digest}]
        return AccuracyBound(
            metric=self.metric.rules.key,
            least=self.metric.least,
            reference=self.metric.reference,
            selected=scores.get(selected.digest, self.metric.reference),
            best=max(others, default=None),
            scored=len(others),
            samples=self.metric.samples,
        )

    # ---- in words --------------------------------------------------------------------------------

    def missed_text(self, placement: Placement) -> str:
        """By how much a placement missed a limit: ``1.9 dB below the SQNR limit of 20 dB (the default)``."""
        judged = self._judged(placement)
        return f"{judged.gap} below {judged.limit}" if judged.gap else f"not known to be above {judged.limit}"

    def shortfall_text(self, trials: Sequence[Trial]) -> str:
        """The gaps by which candidates faster than the reference missed each limit; empty if none did."""
        by_limit: dict[str, dict[str, tuple[_Judged, float]]] = {}
        for trial in trials:
            placement, ratio = trial.placement, trial.ratio or 1.0
            if trial.ok and not trial.subgraph and ratio < 1 and not self.admits(placement):
                judged = self._judged(placement)
                by_limit.setdefault(judged.limit, {})[placement.digest] = judged, ratio
        texts = []
        for limit in sorted(by_limit, reverse=True):
            lost = list(by_limit[limit].values())
            best, ratio = max(lost, key=lambda each: each[0].value)
            verb, least, which = ("misses", "", "it")
            if len(lost) > 1:
                verb, least, which = ("miss", "at least ", "the most accurate of them")
            by = f" by {least}{best.gap}" if best.gap else ""
            has = f"{best.found} in {ratio_text(ratio)} of the reference's time"
            texts.append(f"{count_text(len(lost), 'faster candidate')} {verb} {limit}{by}: {which} has {has}")
        return "; ".join(texts)

    def _judged(self, placement: Placement) -> _Judged:
        """The limit of the metric decides on a placement that meets that of the SQNR and has a value of the metric."""
        figures, metric, least = self.figures(placement), self.metric, self.min_sqnr_db
        text: Callable[[float], str] = "{:.1f} dB".format
        origin = " (the default)" if self.asked.source == "default" else ""
        limit = "" if least is None else f"the SQNR limit of {least:g} dB{origin}"
        value, found = figures.sqnr_db, "an unknown SQNR"
        if value is not None:
            found = text(value)
        if metric is not None and figures.score is not None and self.keeps_sqnr(placement):
            text, least, value = partial(metric_text, metric.rules.metric), metric.least, figures.score
            limit = f"the limit of {metric.rules.key} of {text(least)}"
            found = f"{metric.rules.key} {text(value)}"
        gap = "" if value is None or least is None else text(least - value)
        return _Judged(limit, found, -math.inf if value is None else value, gap)
