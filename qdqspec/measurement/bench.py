"""Builds, races and confirms candidates: all timing of a search.

It is given a backend (normally an isolated one), a function that writes a placement to a file, and inputs to time with.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Self, TypeAlias

import numpy as np

from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.errors import BackendError, PlacementError, QdqspecError
from qdqspec.measurement.admission import Admission
from qdqspec.measurement.engines import Engines
from qdqspec.measurement.memory import HasMemory, has_memory
from qdqspec.measurement.profiles import GivenFeeds, Load, Part, attach, loads_of, profile_latencies
from qdqspec.measurement.race import (
    FLOAT,
    WARMUP,
    Entrant,
    PartBench,
    Turn,
    both_of,
    decided,
    profiled,
    race,
    warmed,
)
from qdqspec.measurement.stats import build_deviation, drift, likely_build_deviation
from qdqspec.measurement.together import (
    FreshBuilds,
    IsSettled,
    Looks,
    Take,
    Together,
    common_clock,
    joined,
    merged,
    predictions_between,
    ratio_tests_between,
)
from qdqspec.parity.gate import Runs
from qdqspec.types import (
    Clock,
    Interval,
    LatencyEvidence,
    LayerTime,
    Placement,
    Race,
    RatioTest,
    Samples,
    Trial,
)

# with three, the deviation is underestimated so often that one race in thirty is won falsely
NOISE_BUILDS = 5
NOISE_ROUNDS = 12
FEW_BUILDS, FEW_ROUNDS = 3, 6  # where the time is short
# where it is too short for these: twice the largest deviation seen between builds of real models
ASSUMED_EPS = 0.05
# a gain of so many times the assumed ``eps`` is significant whatever the variation between builds
CLEAR = 2.0
CONFIRM_BUILDS = 3
CONFIRM_ROUNDS = 24
FLOOR_EPS = 0.01  # smallest significant difference: one per cent
MOST_EPS = 0.5  # its upper bound: a larger one no gain would reach

Extract: TypeAlias = Callable[[Placement, tuple[str, ...]], Part]


def significant(deviation: float) -> float:
    """The smallest significant difference where builds of one model have this standard deviation of logarithms."""
    return min(MOST_EPS, max(FLOOR_EPS, 2 * deviation))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A measurable model: a placement, whose file is written when it is built, or a model file.

    Candidates with equal ids share their builds.
    """

    id: str
    model: Placement | Path

    @classmethod
    def of(cls, model: Placement | Path) -> Self:
        """The candidate of a placement, identified by its digest, or of a file, by its path."""
        return cls(str(model) if isinstance(model, Path) else model.digest, model)


class _ProfileError(BackendError):
    """The layers of an engine could not be timed, and it is closed."""


@dataclass(slots=True)
class _Incumbent:
    """The best placement so far. Its engine may be missing after a resume, and is then built when needed."""

    placement: Placement
    ratio: float
    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """A built candidate, or the trial of a failed build. It must be measured once, or closed."""

    trial: Trial
    engine: Engine | None = None
    profile: bool = False
    timed: bool = True

    @property
    def ok(self) -> bool:
        """Whether there is an engine to measure."""
        return self.engine is not None

    def close(self) -> None:
        """Close the engine of a candidate that will not be measured."""
        if self.engine is not None:
            self.engine.close()


class Bench:
    """Keeps the incumbent's engine open and races every challenger against it.

    With ``admission`` a candidate's accuracy is measured too, and one below the limits cannot win. ``feeds``
    are inputs of one shape profile, or loads of several. Without ``write`` only model files are compared.
    ``extract`` writes only the named nodes with their pairs, and gives inputs for them. ``folder`` holds the
    candidates' files, and is removed from recorded messages. With ``looks`` it times reference and incumbent
    from time to time, and the intervals of `compare` include the variation of the ratio between these times.
    ``jobs`` is the number of parallel builds while no measurement is pending; if ``memory`` reports that not
    all of them fit at once, they are opened one after the other. ``report`` is given the steps of measurements
    of fresh builds, as text.

    While ``eps`` is assumed, ``settle`` sets it from measured builds. A race that proves a gain calls it, unless the
    gain is clearly larger than the assumed ``eps``.
    """

    def __init__(
        self,
        backend: Backend,
        write: Callable[[Placement], Path] | None,
        feeds: GivenFeeds,
        *,
        clock: Clock,
        random: np.random.Generator,
        options: BuildOptions | None = None,
        exclusive: Callable[[], AbstractContextManager[object]] = nullcontext,
        admission: Admission | None = None,
        extract: Extract | None = None,
        folder: Path | None = None,
        jobs: int = 1,
        engines: int = 1,
        memory: HasMemory = has_memory,
        looks: Looks | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.clock: Clock = clock
        self.eps = FLOOR_EPS
        self.settle: Callable[[], None] | None = None
        self._backend = backend
        self._write = write
        self._loads = loads_of(feeds)
        self._random = random
        self._options = options or BuildOptions()
        self._exclusive = exclusive
        self._admission = admission
        self._extract = extract
        self._folder = folder
        self._engines = engines
        self._memory = memory
        self._fresh = FreshBuilds(
            clock=clock, random=random, exclusive=exclusive, jobs=jobs, memory=memory, report=report
        )
        self._writing = Lock()
        self._parts = PartBench(partial(self._open, FLOAT), clock=clock, random=random)
        self._looks = looks
        self._incumbent: _Incumbent | None = None
        self._seen: dict[str, Trial] = {}  # by hash of the optimized graph
        self._build_seconds = 0.0  # of the latest build
        self._run_ms: float | None = None  # of the reference, wall time

    @property
    def best(self) -> float | None:
        """The incumbent's time over the reference's; ``None`` before the first trial."""
        return self._incumbent.ratio if self._incumbent else None

    def trial(
        self,
        number: int,
        placement: Placement,
        phase: str,
        *,
        profile: bool = False,
        timed: bool = True,
        subgraph: tuple[str, ...] = (),
    ) -> Trial:
        """Build a candidate and race it, or without ``timed`` only measure its accuracy.

        For a ``subgraph`` only its nodes are built, and raced against the same nodes in float. A failure of the backend
        becomes a failed trial.
        """
        how = {"profile": profile, "timed": timed}
        return self.measure(self.build(number, placement, phase, **how, subgraph=subgraph))

    def build(
        self,
        number: int,
        placement: Placement,
        phase: str,
        *,
        profile: bool = False,
        timed: bool = True,
        subgraph: tuple[str, ...] = (),
    ) -> Built:
        """Build as for `trial`. The result must be measured or closed."""
        start = time.perf_counter()
        blank = Trial(number=number, phase=phase, placement=placement, subgraph=subgraph)
        try:
            engine = self._open(placement, subgraph)
        except (BackendError, PlacementError) as error:
            failed = replace(blank, status="failed", error=self._reason(error))
            return Built(replace(failed, build_seconds=time.perf_counter() - start))
        self._build_seconds = seconds = time.perf_counter() - start
        trial = replace(blank, build_seconds=seconds, graph_hash=engine.graph_hash)
        return Built(trial, engine, profile=profile, timed=timed)

    def measure(self, built: Built) -> Trial:
        """Race a built candidate, or only measure its accuracy. Its engine is closed unless it won."""
        trial, engine = built.trial, built.engine
        if engine is None:
            return trial
        try:
            with self._closed_unless_kept(engine):
                if trial.subgraph:
                    with self._exclusive():
                        return self._parts.measure(trial, engine, profile=built.profile)
                if self._admission is not None:
                    with self._several(trial.placement, engine) as several:
                        trial = self._admission.measured(trial, several)
                if not built.timed:
                    return trial
                before = self._incumbent
                with self._exclusive():
                    trial = self._measure(trial, engine, built.profile)
                trial = self._admitted(trial, before)
                self._look()
                return trial
        except _ProfileError as error:
            return self._without_profile(built, error)
        except BackendError as error:
            return replace(built.trial, status="failed", error=self._reason(error), graph_hash="")

    def _without_profile(self, built: Built, error: BackendError) -> Trial:
        """The trial of a candidate whose layers cannot be timed, built again; a note of its samples has the reason."""
        old = built.trial
        again = self.build(old.number, old.placement, old.phase, timed=built.timed, subgraph=old.subgraph)
        trial = self.measure(again)
        notes = (*trial.samples.notes, f"layers were not timed: {self._reason(error)}")
        return replace(trial, samples=replace(trial.samples, notes=notes)) if trial.ok else trial

    def recall(self, trial: Trial) -> None:
        """Restore a trial of an earlier run as if it had been measured now, without building anything."""
        if trial.ok and trial.ratio is not None and not trial.subgraph:
            self._seen.setdefault(trial.graph_hash, trial)
        if self._admission is not None:
            self._admission.recall(trial)
        is_known = self._incumbent is not None and self._incumbent.placement == trial.placement
        if trial.incumbent and not is_known:
            if self._incumbent is None and trial.samples.wall_ms:
                self._run_ms = trial.samples.median_ms("wall")
            self._expect(trial)
            self._replace_incumbent(_Incumbent(trial.placement, trial.ratio or 1.0))

    def measure_noise(self, placement: Placement, seconds: float | None = None) -> Samples:
        """Build one placement several times and set ``eps`` from the variation between the builds.

        ``eps`` is the larger of one per cent and twice the standard deviation between builds. Returns the samples.
        Fewer rounds, then fewer builds, are made where more would take longer than ``seconds``; the deviation of few
        builds is combined with a usual one (`likely_build_deviation`). Where even these take longer, nothing is built,
        and `ASSUMED_EPS` is used.
        Raises `BackendError` if it does not build again.
        """
        candidates = {"noise": Candidate.of(placement)}
        builds, rounds = self._noise_plan(seconds)
        if not builds:
            self.eps = ASSUMED_EPS
            return Samples()
        built = self._together(candidates, builds, rounds, Turn.sample)
        if built.failures:
            why = self._reason(built.failures["noise"])
            raise BackendError(f"the model was built once and then not again: {why}")
        times = [build.on(self.clock) for build in built.samples["noise"]]
        self.eps = significant(likely_build_deviation(build_deviation(times), builds - 1))
        return joined(built.samples["noise"])

    def _noise_plan(self, seconds: float | None) -> tuple[int, int]:
        """The builds and rounds of `measure_noise` that fit in the time; zero where none do."""
        plans = (NOISE_BUILDS, NOISE_ROUNDS), (NOISE_BUILDS, FEW_ROUNDS), (FEW_BUILDS, FEW_ROUNDS)
        if seconds is None or self._run_ms is None:
            return plans[0]
        turn = Turn.lasting(self._run_ms)
        round_s = (turn.warmup + turn.runs) * self._run_ms / 1e3
        fitting = (
            (builds, rounds)
            for builds, rounds in plans
            if builds * (self._build_seconds + (WARMUP + rounds) * round_s) <= seconds
        )
        return next(fitting, (0, 0))

    def compare(
        self,
        roles: Mapping[str, Placement | Path],
        *,
        builds: int = CONFIRM_BUILDS,
        rounds: int = CONFIRM_ROUNDS,
        is_settled: Callable[[Mapping[str, RatioTest]], bool] = lambda _: False,
        again: Callable[[Mapping[str, RatioTest]], bool] = lambda _: False,
    ) -> LatencyEvidence:
        """Build each role, a placement or a model file, freshly ``builds`` times and time all of them interleaved.

        ``roles`` must include ``reference`` and ``tuned``. Equal models share their builds. It may end after half of
        the rounds if the ratios by role are ``is_settled``. While ``again`` is true of the ratios so far, it is
        repeated with other builds, and all builds count. Raises `BackendError` if the reference does not build;
        another role that fails is omitted, with its reason recorded.
        """
        candidates = {role: Candidate.of(model) for role, model in roles.items()}
        distinct = {each.id: each for each in candidates.values()}
        reference = candidates["reference"].id

        def tests(found: Together, deviation: float = 0.0, freedom: int = 0) -> dict[str, RatioTest]:
            if reference not in found.samples:
                return {}
            clock, times = common_clock(self.clock, found.samples), (deviation, freedom)
            ratios = ratio_tests_between(found.samples, reference, clock, found.measurements, times)
            return {role: ratios[each.id] for role, each in candidates.items() if each.id in ratios}

        def decides(so_far: Together) -> bool:
            tested = tests(so_far)
            return bool(tested) and is_settled(tested)

        found = self._together(distinct, builds, rounds, is_settled=decides)
        deviation, freedom = times = (0.0, 0) if self._looks is None else self._looks.deviation
        tested = tests(found, deviation, freedom)
        measurements = [found]
        while tested and again(tested):
            more = self._together(distinct, builds, rounds)
            if more.samples.keys() != found.samples.keys():
                break  # a model does not build any more
            measurements.append(more)
            found = merged(measurements)
            tested = tests(found, deviation / math.sqrt(len(measurements)), freedom)
        timed = found.samples
        broken = {each: self._reason(error) for each, error in found.failures.items()}
        if why := broken.get(reference):
            raise BackendError(f"the reference model could not be built and run again: {why}")
        clock = common_clock(self.clock, timed)
        ratios = predictions_between(timed, reference, clock, found.measurements, times)
        present = {role: each.id for role, each in candidates.items() if each.id in timed}
        return LatencyEvidence(
            clock=clock,
            samples={role: joined(timed[each]) for role, each in present.items()},
            ratios={role: ratios[each] for role, each in present.items()},
            tested=tested,
            speedup=ratios[present["tuned"]].inverse
            if "tuned" in present
            else Interval(median=1, low=1, high=1),
            builds=len(timed[reference]),
            profiles=profile_latencies(self._loads, timed, present, clock, found.measurements, times),
            drift=drift([build.on(clock) for group in timed.values() for build in group]),
            failures={role: broken[each.id] for role, each in candidates.items() if each.id in broken},
        )

    def admits(self, placement: Placement) -> bool:
        """Whether a placement meets the constraints on all data; measures it if necessary.

        A placement below the SQNR limit on the few samples is not measured on all data.
        """
        admission = self._admission
        if admission is None:
            return True
        if placement.sites and not admission.is_known(placement):
            with closing(self._open(placement)) as engine, self._several(placement, engine) as several:
                if admission.is_below(placement, several):
                    return False
                admission.confirm(placement, several)
        return admission.admits(placement)

    def confirm(self, placement: Placement) -> None:
        """Measure a placement's accuracy on all data, once. Raises `BackendError` if it does not run."""
        admission = self._admission
        if admission is not None and placement.sites and not admission.is_known(placement):
            with closing(self._open(placement)) as engine, self._several(placement, engine) as several:
                admission.confirm(placement, several)

    def layers_of(self, placement: Placement) -> tuple[LayerTime, ...]:
        """Layer times of a build of a placement. Raises `BackendError` if it does not run or cannot be profiled."""
        with closing(self._open(placement)) as engine, self._exclusive():
            return profiled(engine, warmed(engine, self.clock).median_ms(self.clock))

    def close(self) -> None:
        """Close all open engines."""
        self._parts.close()
        self._close_incumbent()
        if self._looks is not None:
            self._looks.close()

    def _close_incumbent(self) -> None:
        if self._incumbent and self._incumbent.engine:
            self._incumbent.engine.close()
            self._incumbent.engine = None

    @contextmanager
    def _several(self, placement: Placement, engine: Engine) -> Iterator[Runs]:
        """The engine of a placement together with others of it, which compute outputs at the same time."""
        most = self._engines
        if most == 1 or not self._memory([engine], most - 1):
            yield engine
            return
        with Engines(partial(self._open, placement), most, given=engine) as several:
            yield several

    def _open(
        self, model: Placement | Path, subgraph: tuple[str, ...] = (), *, fresh: bool = False
    ) -> Engine:
        path, loads, options = model, self._loads, self._options
        if isinstance(path, Placement):
            with self._writing:
                path, loads, options = self._files(path, subgraph)
        return attach(self._backend.build(path, replace(options, fresh=fresh, hashed=not fresh)), loads)

    def _files(
        self, placement: Placement, subgraph: tuple[str, ...]
    ) -> tuple[Path, tuple[Load, ...], BuildOptions]:
        if not subgraph:
            if self._write is None:
                raise BackendError("this bench builds model files only")
            return self._write(placement), self._loads, self._options
        if self._extract is None:
            raise BackendError("this bench builds whole models only")
        part = self._extract(placement, subgraph)  # its inputs have their own names and shapes
        return part.path, part.loads, replace(self._options, profiles=part.profiles)

    @contextmanager
    def _closed_unless_kept(self, engine: Engine) -> Iterator[None]:
        """Close the engine at the end, also on errors, unless it has become the incumbent's."""
        try:
            yield
        finally:
            is_kept = self._parts.holds(engine) or (self._incumbent and self._incumbent.engine is engine)
            if not is_kept:
                engine.close()

    def _measure(self, trial: Trial, engine: Engine, profile: bool) -> Trial:
        if self._incumbent is not None and trial.graph_hash and trial.graph_hash in self._seen:
            return _with_same_graph(trial, self._seen[trial.graph_hash])
        samples = warmed(engine, self.clock)
        layers: tuple[LayerTime, ...] = ()
        if profile:
            try:
                layers = profiled(engine, samples.median_ms(self.clock))
            except BackendError as error:
                raise _ProfileError(error.what, where=error.where, cure=error.cure) from error
        trial = replace(trial, samples=samples, layers=layers)
        if self._incumbent is None:
            self._expect(trial)
            self._run_ms = samples.median_ms("wall")
            self._replace_incumbent(_Incumbent(trial.placement, 1.0, engine))
            trial = replace(trial, incumbent=True, ratio=1.0)
        elif self._admission is not None and self._admission.is_too_noisy(trial):
            trial = replace(trial, ratio=self._screened(samples))
        else:
            trial = self._race(trial, engine, self._incumbent.ratio)
        self._seen[trial.graph_hash] = trial
        return trial

    def _admitted(self, trial: Trial, before: _Incumbent | None) -> Trial:
        """Score a race winner; on rejection ``before`` is the incumbent again. Runs outside the device lock."""
        winner = self._incumbent
        if self._admission is None or not trial.incumbent or winner is None or winner.engine is None:
            return trial
        try:
            with self._several(trial.placement, winner.engine) as several:
                trial = self._admission.scored(trial, several)
        except BackendError:
            self._replace_incumbent(before)
            raise
        if not trial.incumbent:
            self._replace_incumbent(before)
        self._seen[trial.graph_hash] = trial
        return trial

    def _expect(self, trial: Trial) -> None:
        """Note how long the reference takes to build, which the first look does again."""
        if self._looks is not None and self._incumbent is None:
            self._looks.seconds = trial.build_seconds

    def _look(self) -> None:
        """Look at the reference and the incumbent, if it is another placement and a look is due."""
        best = self._incumbent
        if self._looks is not None and best is not None and best.engine is not None and best.placement.sites:
            with self._exclusive():
                self._looks.take_if_due(best.engine, partial(self._open, FLOAT))

    def _screened(self, samples: Samples) -> float:
        """The ratio to the reference by a few runs: sufficient for learning, not for winning."""
        incumbent, engine = self._warm_incumbent()
        theirs = engine.time(len(samples.wall_ms), warmup=1)
        return samples.median_ms(self.clock) / theirs.median_ms(self.clock) * incumbent.ratio

    def _race(self, trial: Trial, engine: Engine, base: float) -> Trial:
        """Race a challenger. A winner must win again, with both built anew, by what makes the mean gain significant.

        Two builds of one model differ by more than a race resolves: without the second race one in six challengers that
        were no faster won, with it one in twenty (simulated, 1.2 % between builds; docs/decisions/0038).
        """
        outcome, ours, theirs = self._bout(trial.placement, engine, self.eps)
        if self.settle is not None and self._is_unclear_gain(outcome, ours, theirs):
            self._close_incumbent()
            engine.close()
            self.settle()
            outcome = decided(outcome.opponent, ours, theirs, self.clock, self.eps)
        if outcome.verdict != "faster":
            return replace(trial, race=outcome, samples=ours, rival=theirs, ratio=outcome.ratio * base)
        self._close_incumbent()
        engine.close()
        fresh = self._open(trial.placement)
        with self._closed_unless_kept(fresh):
            warmed(fresh, self.clock)
            enough = 1 - (1 - self.eps) ** 2 / outcome.ratio
            again, more, others = self._bout(
                trial.placement, fresh, float(np.clip(enough, FLOOR_EPS, self.eps))
            )
            ours, theirs = ours + more, theirs + others
            outcome = both_of(outcome, again, ours, theirs, self.clock)
            ratio, won = outcome.ratio * base, outcome.verdict == "faster"
            if won:
                self._replace_incumbent(_Incumbent(trial.placement, ratio, fresh))
        return replace(trial, race=outcome, samples=ours, rival=theirs, ratio=ratio, incumbent=won)

    def _is_unclear_gain(self, outcome: Race, ours: Samples, theirs: Samples) -> bool:
        """Whether a race proves a gain that may be significant or not, depending on the variation between builds."""
        proved = decided(outcome.opponent, ours, theirs, self.clock, FLOOR_EPS).verdict == "faster"
        return proved and outcome.ratio > 1 - CLEAR * self.eps

    def _bout(self, placement: Placement, engine: Engine, eps: float) -> tuple[Race, Samples, Samples]:
        """One race against the incumbent, for a gain of ``eps``. If the incumbent fails, it is rebuilt once."""
        try:
            return self._race_incumbent(placement, engine, eps)
        except BackendError as error:
            self._close_incumbent()
            try:
                return self._race_incumbent(placement, engine, eps)
            except BackendError:  # the challenger failed, or the incumbent permanently
                self._close_incumbent()
                raise error from None

    def _race_incumbent(
        self, placement: Placement, engine: Engine, eps: float
    ) -> tuple[Race, Samples, Samples]:
        incumbent, rival = self._warm_incumbent()
        return race(
            Entrant(digest=placement.digest, engine=engine, graph_hash=engine.graph_hash),
            Entrant(digest=incumbent.placement.digest, engine=rival, graph_hash=rival.graph_hash),
            clock=self.clock,
            eps=eps,
            random=self._random,
            enough=None if self.settle is None else FLOOR_EPS,
        )

    def _warm_incumbent(self) -> tuple[_Incumbent, Engine]:
        """The incumbent with its engine, built and warmed up if it is not open."""
        incumbent = self._incumbent
        assert incumbent is not None
        if incumbent.engine is None:
            incumbent.engine = self._open(incumbent.placement)
            warmed(incumbent.engine, self.clock)
        return incumbent, incumbent.engine

    def _replace_incumbent(self, successor: _Incumbent | None) -> None:
        self._close_incumbent()
        self._incumbent = successor

    def _together(
        self,
        candidates: Mapping[str, Candidate],
        builds: int,
        rounds: int,
        take: Take = Turn.both,
        is_settled: IsSettled = lambda _: False,
    ) -> Together:
        """Time fresh builds of candidates together. Open engines are closed if memory is short."""
        openers = {
            name: [partial(self._open, each.model, fresh=True)] * builds for name, each in candidates.items()
        }
        kept = [self._incumbent.engine] if self._incumbent and self._incumbent.engine else []
        return self._fresh.time(
            openers, rounds, beside=kept, close_others=self.close, take=take, is_settled=is_settled
        )

    def _reason(self, error: QdqspecError) -> str:
        """The recorded text of a failure, without the temporary folder of the candidates."""
        text = str(error)
        return text if self._folder is None else text.replace(f"{self._folder}{os.sep}", "")


def _with_same_graph(trial: Trial, earlier: Trial) -> Trial:
    """The trial of a candidate whose optimized graph equals an earlier one's, with the earlier measurement."""
    outcome = Race(opponent=earlier.placement.digest, ratio=1.0, p_value=1.0, pairs=0, verdict="same graph")
    return replace(
        trial, race=outcome, ratio=earlier.ratio, samples=earlier.samples, accuracy=earlier.accuracy
    )
