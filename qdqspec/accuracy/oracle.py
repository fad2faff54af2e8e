"""Rehearsals of a case, and the accuracy oracle of its search.

A rehearsal computes the accuracy of placements on the reference runtime, whatever the backend of the case. The oracle
adds the effect of the backend, estimated from builds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np

from qdqspec.arrays import Feed
from qdqspec.closing import Closing
from qdqspec.errors import BackendError, DataError, PlacementError
from qdqspec.measurement.admission import NEAR_DB
from qdqspec.parity.gate import (
    LIKELY,
    MOST_DB,
    SMALL_DB,
    AllData,
    AllDataDifference,
    HeldOutputs,
    OutputGate,
)
from qdqspec.parity.metrics import Score, Scores
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.preparation.auxiliary_runs import reference_runtime
from qdqspec.preparation.prepare import Prepared
from qdqspec.preparation.resources import Resources
from qdqspec.rehearsal import (
    KnownOutputs,
    Rehearsal,
    RehearsalRefusedError,
    Subject,
    find_sensitivities,
    is_foreign,
    quick_runs,
    sites_by_label,
    sites_of,
)
from qdqspec.types import EXACT_DB, AccuracyRules, BlockError, LabelNoise, Placement, Rehearsed, Site, Trial
from qdqspec.units import count_text, metric_text, seconds_text

FIRST_DOUBT_DB, LEAST_DOUBT_DB = 0.5, 0.1  # of predictions: initial and smallest standard deviation
MOST_DOUBT_DB = 2.0  # largest: two builds with opposite errors do not show what the next one will have
NEAREST = 5  # builds with the nearest rehearsed SQNR, from which the offset is estimated

# Cost of the sensitivity analysis, in runs of the rehearsal per switch: two samples for each switch, more for those
# with a large error, and on average half of the graph, optimized. On the first sample alone it is .3 to .9: the
# pairs of a model may be near its inputs.
RUNS_A_SWITCH, RUNS_QUICK = 1.5, 0.4
SHARE, QUICK_SHARE = 0.25, 0.5  # largest share of the search's time that is left, for either variant
ROUGH_SHARE = 0.04  # of the time that is left, for a rough analysis where the quick variant takes more
MOST_ROUGH_SHARE = 0.25  # that it may take with `MOST_TENSORS` together
MOST_TENSORS = 64  # neighbouring ones measured together where the quick variant takes more, at most
MOST_SECONDS = 30.0  # of the variant with several samples, whatever the search's time
ALL_DATA_SHARE = 0.1  # of the time that is left, for a placement near the limit on all data
ALL_DATA_RUNS = 1.5  # that a sample takes without switches and, the first time, with the float model
ALL_DATA_SECONDS, MOST_ALL_DATA_SHARE = 30.0, 0.7  # for all such placements, without a time limit and of one

SecondsLeft: TypeAlias = Callable[[], float | None]  # ``None`` without a limit

_FLOAT = Placement(sites=frozenset())
LOST_DB = -100.0  # below it outputs have another shape or are not finite: the SQNR is -200 dB and the offset


class Rehearser(Closing):
    """Rehearses placements of a case. The graph, with all pairs of the case's space, is built on first use.

    A placement with other pairs, such as one read from a scheme, rebuilds it with these added. The data is ``given``
    with its name, else the calibration data.
    """

    def __init__(
        self, prepared: Prepared, resources: Resources, given: tuple[Iterable[Feed], str] | None = None
    ) -> None:
        self._prepared = prepared
        self._resources = resources
        self._given = given
        self._sites: tuple[Site, ...] = ()
        self._rehearsal: Rehearsal | None = None
        self._opened = ExitStack()

    @property
    def rehearsal(self) -> Rehearsal:
        """The rehearsal of the space. Raises `RehearsalRefusedError` if the model cannot be rehearsed."""
        if self._rehearsal is None:
            self._rehearsal = self._open(self._sites or sites_of(self._prepared.space))
        return self._rehearsal

    def error(self, placement: Placement) -> Rehearsed:
        """The error of a placement on the first samples.

        Raises `RehearsalRefusedError` if the model cannot be rehearsed.
        """
        return self.including(placement).error(placement)

    def including(self, placement: Placement) -> Rehearsal:
        """The rehearsal, rebuilt with the pairs of a placement if it lacks some."""
        try:
            self.rehearsal.switches.setting(placement)
        except PlacementError:
            self._sites = (*self.rehearsal.subject.sites, *placement.ordered)
            self.close()
        return self.rehearsal

    def close(self) -> None:
        """Stop the process of the rehearsal. Closing twice is harmless; the next use opens it again."""
        self._opened.close()
        self._rehearsal = None

    def _open(self, sites: Iterable[Site]) -> Rehearsal:
        prepared, resources = self._prepared, self._resources
        data = "random" if prepared.calibration is None else "calibration"
        feeds, data = (lambda: given[0], given[1]) if (given := self._given) else (prepared.feeds, data)
        subject = Subject(
            model=prepared.model,
            sites=tuple(sites),
            numbers=prepared.numbers,
            feeds=feeds,
            data=data,
            rounds_biases=prepared.capabilities.rounds_biases,
        )
        runtime = reference_runtime(self._opened, resources.options, resources.backend)
        return self._opened.enter_context(Rehearsal(subject, runtime))


class RehearsalOracle:
    """Predicts the SQNR that a search will measure: rehearsed on the same samples, plus an offset from builds.

    The rehearsal is opened on first use. If the model cannot be rehearsed, every answer is ``None`` and ``note``
    receives the reason. ``left`` gives the seconds that the search has left to choose and build candidates, which bound
    the cost of the sensitivity analysis: it uses fewer samples or is skipped. Nothing new is rehearsed once they are
    over. Placements far from the limit ``least_db`` are rehearsed on fewer samples. ``difference`` is that of all data
    from the few samples; placements nearer to the limit than the largest one known are rehearsed on all data.
    ``measured`` is the comparison of builds on all data, whose reference computes what a rehearsal does in float.
    """

    def __init__(
        self,
        rehearser: Rehearser,
        space: SchemeSpace,
        note: Callable[[str], None],
        left: SecondsLeft = lambda: None,
        metric: RehearsedMetric | None = None,
        least_db: float | None = None,
        difference: AllDataDifference | None = None,
        measured: AllData | None = None,
    ) -> None:
        self._rehearser = rehearser
        self._space = space
        self._note = note
        self._gate: OutputGate | None = None
        self._noise: LabelNoise | None = None
        self._rough: LabelNoise | None = None
        self._known: dict[str, float | None] = {}  # rehearsed SQNR by digest
        self._partial: set[str] = set()  # digests of those rehearsed on the first samples only
        self.measured: dict[
            str, tuple[float, float]
        ] = {}  # rehearsed and measured SQNR of built candidates, by digest
        self.difference = difference or AllDataDifference()
        self._measured = measured
        self._all_data: AllData | None = None
        self._all_data_seconds = 0.0
        self._on_all_data: dict[str, float] = {}  # rehearsed SQNR by digest
        self._decided_db: list[float] = []  # of all data, or of the part that decided, minus the few samples
        self._refused = False
        self._missing = ""  # why the sensitivity analysis was not made
        self._left = left
        self._outputs = None if metric is None else KnownOutputs()
        self._metric = metric
        self._least_db = least_db

    def noise(self) -> LabelNoise | None:
        """Noise power over signal power of each (unit, label) alone; the `rough_noise` if that cannot be measured."""
        if self._noise is None and not self._refused and not self._missing and not self._is_over:
            try:
                self._noise = self._sensitivities(self._left())
                if self._noise is None:
                    self._note(f"{self._missing}, and was skipped: raise the time limit")
            except RehearsalRefusedError as error:
                self._refuse(error.what)
            except BackendError as error:
                self._missing = error.what
                self._note(f"the error of each Q/DQ pair alone could not be measured: {error.what}")
        return self._noise if self._noise is not None or not self._missing else self._rough

    def rough_noise(self, spent: Mapping[str, float]) -> LabelNoise | None:
        """Noise power of each (unit, label), measured for neighbouring tensors together, in little of the time.

        Those of the units that take most of the time ``spent`` are measured alone, in as much time.
        """
        left = self._left()
        if self._noise is not None or self._refused or self._missing or left is None or left <= 0:
            return None
        try:
            rehearsal = self._measured_rehearsal()
            runs = quick_runs(rehearsal)  # of the graph, each tensor alone
            whole = RUNS_QUICK * rehearsal.run_seconds * runs
            if self._rough is None and whole > ROUGH_SHARE * left:
                tensors = min(MOST_TENSORS, math.ceil(whole / RUNS_QUICK / (ROUGH_SHARE * left)))
                if 2 * whole / tensors > MOST_ROUGH_SHARE * left:
                    return None
                alone = self._of_longest(rehearsal, spent, runs // tensors)
                found = find_sensitivities(rehearsal, segments=1, quick=True, tensors=tensors, alone=alone)
                self._rough = found.by_label(self._space)
        except (RehearsalRefusedError, BackendError) as error:
            self._refuse(error.what)
        return self._rough

    def _of_longest(self, rehearsal: Rehearsal, spent: Mapping[str, float], tensors: int) -> frozenset[int]:
        """The switches of the units that take most time, of so many tensors at most."""
        found, seen = set[int](), set[tuple[str, str]]()
        for unit in sorted(self._space.units, key=lambda unit: -spent.get(unit.id, 0.0)):
            sites = {site for sites in sites_by_label(self._space, unit).values() for site in sites}
            own = [site for site in sites if not is_foreign(site)]
            seen.update((site.tensor, site.format) for site in own)
            if len(seen) > tensors:
                break
            found.update(number for site in own for number in rehearsal.switches.numbers(site))
        return frozenset(found)

    def block_errors(self, seconds: float) -> tuple[tuple[BlockError, ...], str]:
        """The error of each unit alone, largest first, and why there is none.

        It is measured now if the search did not need it and ``seconds`` allow.
        """
        if self._noise is None and not self._missing:
            if seconds <= 0:
                return (), "the search's time was over"
            try:
                self._noise = self._sensitivities(seconds)
            except (RehearsalRefusedError, BackendError) as error:
                self._missing = error.what
        return self.errors, self._missing or ("" if self.errors else "no block alone changes the outputs")

    def _sensitivities(self, seconds: float | None) -> LabelNoise | None:
        rehearsal = self._measured_rehearsal()
        whole = RUNS_A_SWITCH * rehearsal.run_seconds * len(rehearsal.switches)
        quick = RUNS_QUICK * rehearsal.run_seconds * quick_runs(rehearsal)
        left = float("inf") if seconds is None else seconds
        tensors = 1
        if quick > QUICK_SHARE * left:
            tensors = math.ceil(quick / (SHARE * left)) if left > 0 else MOST_TENSORS + 1
        if tensors > MOST_TENSORS:
            self._missing = (
                f"measuring each of {len(rehearsal.switches)} Q/DQ pairs alone would take about "
                f"{seconds_text(quick)}, too much of {seconds_text(left)}"
            )
            return None
        is_quick = whole > min(SHARE * left, MOST_SECONDS)
        return find_sensitivities(rehearsal, quick=is_quick, tensors=tensors).by_label(self._space)

    def _measured_rehearsal(self) -> Rehearsal:
        """The rehearsal, of which the time of a run is known."""
        everything = self._space.resolve(self._space.everything())
        if everything.digest not in self._known:
            self._known[everything.digest] = self._rehearsed(everything)
        return self._rehearser.rehearsal

    @property
    def errors(self) -> tuple[BlockError, ...]:
        """The error of each unit alone that was measured, largest first."""
        found = (
            BlockError(block=unit, label=label, sqnr_db=min(-10 * math.log10(noise), EXACT_DB))
            for (unit, label), noise in (self._noise or {}).items()
            if noise > 0 and math.isfinite(noise)
        )
        return tuple(sorted(found, key=lambda error: (error.sqnr_db, error.block, error.label)))

    def predicted_db(self, placement: Placement) -> float | None:
        """The expected SQNR of a build on all data."""
        rehearsed = self.rehearsed_db(placement)
        return None if rehearsed is None else self._expected(placement.digest, rehearsed, placement)

    def keeps_metric(self, placement: Placement) -> bool | None:
        """Whether the task metric of a placement is expected to meet its limit; ``None`` if unknown."""
        if self._metric is None or self._refused or not placement.sites or self._is_over:
            return None
        try:
            rehearsal = self._rehearser.including(placement)
            predicted_db = self.predicted_db(placement)
            return self._metric.keeps(placement, rehearsal, predicted_db, self._outputs)
        except RehearsalRefusedError as error:
            self._refuse(error.what)
        except (BackendError, PlacementError):
            pass  # as in `_rehearsed`
        return None

    @property
    def _is_over(self) -> bool:
        """Whether the search has no time left to build another placement."""
        left = self._left()
        return left is not None and left <= 0

    def rehearsed_db(self, placement: Placement) -> float | None:
        """The SQNR of a placement at the worst output, rehearsed once; ``None`` if unknown and the time is over."""
        if self._refused:
            return None
        if not placement.sites:
            return MOST_DB
        if placement.digest not in self._known:
            if self._is_over:
                return None
            self._known[placement.digest] = self._rehearsed(placement)
        return self._known[placement.digest]

    def roughly_db(self, placement: Placement) -> float | None:
        """The SQNR of a placement on very few samples, to rank placements by it."""
        if placement.digest in self._known or not placement.sites:
            return self.rehearsed_db(placement)
        return None if self._refused or self._is_over else self._rehearsed(placement, roughly=True)

    def offset_db(self, rehearsed_db: float) -> float:
        """Median of measured minus rehearsed SQNR of builds near that value: the effect of the backend.

        An offset of zero counts as one build more, so that a single build with an odd error does not refuse all others.
        """
        near = sorted(self.measured.values(), key=lambda pair: abs(pair[0] - rehearsed_db))[:NEAREST]
        return float(np.median([0.0, *(measured - rehearsed for rehearsed, measured in near)]))

    @property
    def doubt_db(self) -> float:
        """The standard deviation of the SQNR that the offset does not explain, within bounds."""
        if len(self.measured) < 2:
            return FIRST_DOUBT_DB
        errors = [measured - self.offset_db(own) - own for own, measured in self.measured.values()]
        return float(np.clip(np.std(errors[-2 * NEAREST :]), LEAST_DOUBT_DB, MOST_DOUBT_DB))

    def learn(self, trial: Trial) -> None:
        """Add the measured SQNR of a rehearsed candidate to the estimate."""
        if self._metric is not None:
            self._metric.learn(trial)
        known = self._known.get(trial.placement.digest)
        if known is None or trial.placement.digest in self._partial:
            return
        if trial.ok and trial.sqnr_db is not None and not trial.subgraph:
            self.measured[trial.placement.digest] = known, trial.sqnr_db

    def text(self, placement: Placement) -> str:
        """Rehearsed and measured SQNR of a placement for the reason of a choice; empty unless both are known."""
        found = self.measured.get(placement.digest)
        if found is None:
            return ""
        rehearsed, measured = found
        offset = self.offset_db(rehearsed)
        return f"rehearsed {rehearsed:.1f} dB, measured {measured:.1f} dB on the same samples, offset {offset:+.1f} dB"

    def refused_text(self, least_db: float | None) -> str:
        """The number of rehearsed placements expected below the limits and not built; empty for none."""
        texts = []
        if least_db is not None:
            expected = [
                self._expected(digest, db)
                for digest, db in self._known.items()
                if db is not None and digest not in self.measured
            ]
            below = [sqnr_db for sqnr_db in expected if sqnr_db < least_db]
            if below:
                placements = count_text(len(below), "rehearsed placement")
                texts.append(
                    f"expected below {least_db:g} dB and not built: {placements}, {_at_most(max(below))}"
                )
        if self._metric is not None:
            texts.append(self._metric.refused_text())
        return "; ".join(filter(None, texts))

    def _expected(self, digest: str, rehearsed_db: float, placement: Placement | None = None) -> float:
        if digest in self._on_all_data:
            return self._on_all_data[digest] + self.offset_db(rehearsed_db)
        few_db = rehearsed_db + self.offset_db(rehearsed_db)
        return few_db + self.difference.at(few_db, placement)

    @property
    def _rehearsed_limits(self) -> tuple[float, float] | None:
        """The rehearsed SQNRs between which placements may be at the limit, the lower one first.

        One has the difference of all data that is known nearest to the limit, the other has none: the difference may
        be that of placements with another SQNR.
        """
        if self._least_db is None:
            return None
        limits = (self._least_db, self._least_db - self.difference.at(self._least_db))
        low, high = sorted(db - self.offset_db(db) for db in limits)
        return low, high

    @property
    def _near_db(self) -> tuple[float, float]:
        """Distances below and above the limits within which a placement may be on their other side on all data.

        Each is the largest difference known, of all data or of the part that decided. Such a part shows only that a
        placement is below a limit, so that above the limits it is `SMALL_DB` more until one of all data is known.
        """
        decided_db = max(map(abs, self._decided_db), default=NEAR_DB)
        if not self.difference.is_known:
            return min(decided_db, NEAR_DB), min(decided_db + SMALL_DB, NEAR_DB)
        known_db = self.difference.most_db
        below_db = max(decided_db, known_db) if self._decided_db else known_db
        return min(below_db, NEAR_DB), min(known_db, NEAR_DB)

    def _rehearsed(self, placement: Placement, *, roughly: bool = False) -> float | None:
        try:
            rehearsal = self._rehearser.including(placement)
            if self._gate is None:
                float_model = rehearsal.engine(_FLOAT, self._outputs)
                # a list: an error of the gate would keep an iterator, and its data file, open
                self._gate = OutputGate(float_model, list(rehearsal.feeds()))
            engine, limits = rehearsal.engine(placement, self._outputs), self._rehearsed_limits
            if roughly:
                return self._gate.first(engine)
            if limits is None:
                return self._gate(engine)
            low, high = limits
            below_db, above_db = self._near_db
            found, samples = self._gate.near(engine, low, high + above_db)
            if samples < self._gate.samples:
                self._partial.add(placement.digest)
            elif low - below_db <= found <= high + above_db:
                self._run_on_all_data(rehearsal, placement, found)
            return found
        except RehearsalRefusedError as error:
            self._refuse(error.what)
        except (BackendError, PlacementError):
            pass  # this placement cannot be rehearsed: the reference runtime lacks its formats
        return None

    def _run_on_all_data(self, rehearsal: Rehearsal, placement: Placement, few_db: float) -> None:
        """Rehearse a placement on all data, or on as much of it as little of the time allows, and learn from it."""
        assert self._gate is not None
        assert self._least_db is not None
        left, spent, started = self._left(), self._all_data_seconds, time.monotonic()
        if self._all_data is None:
            seconds = max(ALL_DATA_RUNS * rehearsal.run_seconds, 1e-6)  # of a sample
            feeds = _First(
                rehearsal.subject.feeds, None if left is None else int(ALL_DATA_SHARE * left / seconds)
            )
            samples = sum(1 for _ in feeds)
            if samples <= 2 * self._gate.samples:
                return
            if self._measured is None:
                float_model = partial(rehearsal.engine, _FLOAT, self._outputs, samples=samples)
                known = HeldOutputs(self._gate.known)
                self._all_data = AllData(feeds, float_model, known, samples=samples, decided=LIKELY)
            else:
                self._all_data = self._measured.rehearsed(feeds, samples)
        if spent <= (ALL_DATA_SECONDS if left is None else MOST_ALL_DATA_SHARE * (left + spent)):
            limit_db = self._least_db - self.offset_db(few_db)
            with rehearsal.engine(placement, self._outputs, samples=self._all_data.samples) as engine:
                found_db, is_whole = self._all_data.near(engine, limit_db)
            self._on_all_data[placement.digest] = found_db
            self._decided_db.append(found_db - few_db)
            if is_whole:
                self.difference.learn(few_db, found_db, placement)
            self._all_data_seconds += time.monotonic() - started

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._missing = reason
        self._note(f"{reason}: the search measures the accuracy of placements by building them")


def _at_most(best_db: float) -> str:
    """The largest expected SQNR as text."""
    if best_db > LOST_DB:
        return f"{best_db:.1f} dB at most"
    return "all with outputs of another shape or with values that are not finite"


@dataclass(frozen=True, slots=True)
class _First:
    """The first inputs, at most ``most``, read again each time."""

    feeds: Callable[[], Iterable[Feed]]
    most: int | None

    def __iter__(self) -> Iterator[Feed]:
        return islice(iter(self.feeds()), self.most)


METRIC_SECONDS = 60.0  # for all placements of a search without a time limit
METRIC_SHARE = 0.2  # of the time that is left
EXPECTED = 40  # placements
LEAST_FEEDS = 16  # of the evaluation data


@dataclass(slots=True)
class RehearsedMetric:
    """Expects the metric of placements: of the reference, plus the change in a rehearsal, plus an offset from builds.

    The offset is the median over builds whose SQNR is not lower than the placement's: the loss of a build beyond its
    rehearsal does not apply to placements with less noise. ``reference`` is the metric of the reference on all data,
    ``least`` the limit, ``left`` gives the seconds that the search has left. All evaluation data is used if the time
    allows, else its first feeds; then a metric that counts samples may lose one more.
    """

    scores: Scores
    rules: AccuracyRules
    reference: float
    least: float
    left: SecondsLeft = lambda: None
    _feeds: int = 0  # used for each placement
    _float: Score | None = None
    _known: dict[str, float] = field(default_factory=dict)  # change of the metric, by digest
    _sqnr_db: dict[str, float | None] = field(default_factory=dict)  # expected, by digest
    _built: dict[str, tuple[float | None, float]] = field(default_factory=dict)  # SQNR and offset, by digest

    def keeps(
        self,
        placement: Placement,
        rehearsal: Rehearsal,
        sqnr_db: float | None,
        known: KnownOutputs | None,
    ) -> bool | None:
        """Whether a placement with an expected SQNR meets the limit; ``None`` if the metric cannot be computed."""
        if not self._rehearse(placement, rehearsal, known):
            return None
        self._sqnr_db[placement.digest] = sqnr_db
        return self._expected(placement.digest) + self._tolerance >= self.least

    def learn(self, trial: Trial) -> None:
        """Add the measured metric of a rehearsed candidate to the estimate of the offset."""
        change = self._known.get(trial.placement.digest)
        if change is not None and trial.accuracy is not None:
            sqnr_db = trial.sqnr_db if trial.all_data_db is None else trial.all_data_db
            self._built[trial.placement.digest] = sqnr_db, trial.accuracy - self.reference - change

    def refused_text(self) -> str:
        """The number of rehearsed placements expected to miss the limit and their best value; empty for none."""
        values = [self._expected(digest) for digest in self._known if digest not in self._built]
        missed = [value for value in values if value + self._tolerance < self.least]
        if not missed:
            return ""
        return (
            f"expected below {self.rules.key} {metric_text(self.rules.metric, self.least)} and not built: "
            f"{count_text(len(missed), 'rehearsed placement')}, {metric_text(self.rules.metric, max(missed))} at most"
        )

    def _rehearse(self, placement: Placement, rehearsal: Rehearsal, known: KnownOutputs | None) -> bool:
        """Rehearse the metric of a placement, once. False if the metric cannot be computed."""
        try:
            if self._float is None:
                self._feeds = self._affordable(rehearsal)
                self._float = self._score(_FLOAT, rehearsal, known)
            if placement.digest not in self._known:
                score = self._score(placement, rehearsal, known)
                self._known[placement.digest] = score.value - self._float.value
        except DataError:
            return (
                False  # of the metric itself, for example on a part of the samples; it is computed for builds
            )
        return True

    def _expected(self, digest: str) -> float:
        own = self._sqnr_db.get(digest)
        offsets = [offset for db, offset in self._built.values() if own is None or db is None or db >= own]
        return self.reference + self._known[digest] + float(np.median(offsets or [0.0]))

    @property
    def _tolerance(self) -> float:
        """The value of one sample, if a part of the data is used and the metric counts samples.

        A metric that declares no unit counts samples if all its values are multiples of one sample's.
        """
        if self._float is None or self._feeds >= self.scores.feeds:
            return 0.0
        base, samples = self._float.value, self._float.samples
        parts = [samples * (base + change) for change in (0.0, *self._known.values())]
        counts = self._float.right is not None or np.allclose(parts, np.round(parts), rtol=0, atol=1e-6)
        return 1.0 / samples if counts else 0.0

    def _affordable(self, rehearsal: Rehearsal) -> int:
        """The number of feeds for each placement that the time allows."""
        first = next(iter(rehearsal.feeds()), None)
        if first is None:
            raise DataError("there is no sample to compute the metric on")
        rehearsal.outputs(_FLOAT, first)
        left = self.left()
        seconds = METRIC_SECONDS if left is None else METRIC_SHARE * left
        most = seconds / EXPECTED / max(rehearsal.run_seconds, 1e-6)
        return int(min(max(most, LEAST_FEEDS), self.scores.feeds))

    def _score(self, placement: Placement, rehearsal: Rehearsal, known: KnownOutputs | None) -> Score:
        with rehearsal.engine(placement, known, samples=self._feeds) as engine:
            return self.scores.of_engine(engine, self.rules.metric, self.rules.output, feeds=self._feeds)
