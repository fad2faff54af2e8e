"""Builds models, and races and compares their engines: all timing of a search."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import ClassVar, TypeAlias

from qdqspec._core.arrays import Floats
from qdqspec.accuracy import Runs
from qdqspec.backends import PLAIN, Backend, BuildOptions, Engine, Engines
from qdqspec.errors import BackendError, QdqspecError
from qdqspec.timing.race import MOST_RUNS, Load, Raced, Turn, attach, race, settle, warmed
from qdqspec.timing.stats import Deviation, RatioEstimate, build_deviation, log_ratios, time_deviation
from qdqspec.timing.together import FreshBuilds, IsSettled, Together, merged
from qdqspec.types import (
    NO_PAIRS,
    Interval,
    LatencyEvidence,
    LayerTime,
    Placement,
    ProfileLatency,
    RatioTest,
    Samples,
    Trial,
)

# Of each model in a final measurement: more of either narrow the interval, and take their time.
CONFIRM_BUILDS = 3
CONFIRM_ROUNDS = 24

Nodes: TypeAlias = tuple[str, ...]  # of a part of the model; none for the whole
Extract: TypeAlias = Callable[[Placement, Nodes], tuple[Path, Load]]


@dataclass(eq=False)
class Bench(FreshBuilds):
    """Builds models and times engines of them. It knows no search: which candidate wins is decided in `search.loop`.

    ``loads`` are the inputs at each shape profile. ``write`` gives the file of a placement; without it
    only model files are built. ``extract`` writes only the named nodes with their pairs, and gives inputs for them.
    ``folder`` contains the candidates' files, and is removed from recorded messages. One engine, of a whole model or of
    a part, is kept open for races (`keep`). With ``looks`` (`look`) the intervals of `compare` include the variation of
    the ratio between times; ``series`` has their log ratios by incumbent and look.
    """

    backend: Backend
    write: Callable[[Placement], Path] | None
    loads: tuple[Load, ...]
    _: KW_ONLY
    options: BuildOptions = PLAIN
    extract: Extract | None = None
    folder: Path | None = None
    engines: int = 1
    looks: bool = False
    now: Callable[[], float] = time.monotonic
    floor_eps: ClassVar[float] = 0.01  # smallest significant difference: one per cent
    series: list[list[Floats]] = field(default_factory=list, init=False)
    beside: Engine | None = field(default=None, init=False)  # the reference, for looks
    look_seconds: float = field(default=0.0, init=False)  # of the last look, or of the first build before it

    def __post_init__(self) -> None:
        self._writing = Lock()
        self._looked = self.now()
        self._looked_at: Engine | None = None  # the incumbent of the last series
        self._kept: tuple[Placement, Nodes, Engine] | None = None

    def open(self, model: Placement | Path, subgraph: Nodes = (), *, fresh: bool = False) -> Engine:
        """An engine of a placement, of a part of it, or of a model file, with inputs bound.

        Raises `BackendError` or `PlacementError`.
        """
        path, loads, options = model, self.loads, self.options
        if isinstance(path, Placement):
            with self._writing:
                if subgraph:
                    assert self.extract is not None, "this bench builds whole models only"
                    path, load = self.extract(path, subgraph)  # its inputs have their own names and shapes
                    loads, options = (load,), replace(options, profiles=())
                else:
                    assert self.write is not None, "this bench builds model files only"
                    path = self.write(path)
        started = self.now()
        engine = attach(self.backend.build(path, replace(options, fresh=fresh, hashed=not fresh)), loads)
        self.look_seconds = self.look_seconds or self.now() - started
        return engine

    def keep(self, placement: Placement, engine: Engine, subgraph: Nodes = ()) -> None:
        """Keep an engine open in place of the one before."""
        self.drop()
        self._kept = placement, subgraph, engine

    def keeps(self, engine: Engine) -> bool:
        """Whether this engine is kept open."""
        return self._kept is not None and self._kept[2] is engine

    def kept(self, placement: Placement, subgraph: Nodes = ()) -> Engine:
        """The kept engine of a placement, built and warmed up if another one or none is kept."""
        if self._kept is not None and self._kept[:2] == (placement, subgraph):
            return self._kept[2]
        engine = self.open(placement, subgraph)
        self.keep(placement, engine, subgraph)
        self.warm(engine)
        return engine

    def drop(self) -> None:
        """Close the kept engine."""
        held, self._kept = self._kept, None
        if held is not None:
            held[2].close()

    @contextmanager
    def several(self, placement: Placement, engine: Engine) -> Iterator[Runs]:
        """The engine of a placement together with others of it, which compute outputs at the same time."""
        most = self.engines
        if most == 1 or not self.memory([engine], most - 1):
            yield engine
            return
        with Engines(partial(self.open, placement), most, given=engine) as several:
            yield several

    def warm(self, engine: Engine) -> Samples:
        """Run a fresh engine until it is warm; its last runs."""
        return warmed(engine, self.clock)

    def layers(self, engine: Engine, taken: Samples) -> tuple[LayerTime, ...]:
        """The layer times of an engine, of which these runs were taken: of 5 to 12 runs, within about 24 ms."""
        return engine.layers(max(5, min(12, round(24.0 / max(taken.median_ms(self.clock), 1e-6)))))

    def race(self, engine: Engine, opponent: Placement, eps: float, subgraph: Nodes = ()) -> Raced:
        """Race an engine against the kept one of the opponent, for a gain of ``eps``.

        If one of the two fails, the opponent is built again, once. Raises `BackendError` if it fails again.
        """
        failure: BackendError | None = None
        while True:
            try:
                rival = self.kept(opponent, subgraph)
                return race(engine, rival, opponent.digest, clock=self.clock, eps=eps, random=self.random)
            except BackendError as error:
                self.drop()
                if failure is not None:  # the challenger failed, or the opponent permanently
                    raise failure from None
                failure = error

    def measure_variation(
        self,
        reference: Trial,
        seconds: float | None = None,
        *,
        plans: Sequence[tuple[int, int]] = ((5, 6), (3, 6)),
        assumed: float = 0.05,
    ) -> tuple[float, Samples]:
        """The smallest significant difference, by the variation between builds of the reference, and their samples.

        It is twice the deviation between builds, and a half at most.

        ``plans`` are numbers of builds and rounds: the first that takes no longer than the ``seconds`` is used. With
        three builds the deviation is underestimated so often that one race in thirty is won falsely. Where none fits it
        is ``assumed``, twice the largest deviation seen between builds of real models: less lets more placements win
        that are not faster. Raises `BackendError` if the model does not build again.
        """
        round_s = 0.0
        if reference.samples.wall_ms:
            run_ms = reference.samples.median_ms("wall")
            turn = Turn.lasting(run_ms)
            round_s = (max(1, turn.warmup) + turn.runs) * run_ms / 1e3
        build_s, limit = reference.build_seconds, math.inf if seconds is None or not round_s else seconds
        fitting = (plan for plan in plans if plan[0] * (build_s + (MOST_RUNS + plan[1]) * round_s) <= limit)
        plan = next(fitting, None)
        if plan is None:
            return assumed, Samples()
        built = self._together({"noise": reference.placement}, *plan)
        if built.failures:
            why = self.reason(built.failures["noise"])
            raise BackendError(f"the model was built once and then not again: {why}")
        times = [build.on(self.clock) for build in built.samples["noise"]]
        eps = min(0.5, max(self.floor_eps, 2 * build_deviation(times)))
        return eps, built.joined("noise")

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

        ``roles`` must include ``reference`` and ``tuned``. It may end after each quarter of the rounds if the ratios by
        role are ``is_settled``. While ``again`` is true of them, it is repeated with other builds, and all builds
        count. Raises `BackendError` if the reference does not build; another role that fails is omitted, and its reason
        recorded.
        """
        ids = {role: str(model if isinstance(model, Path) else model.digest) for role, model in roles.items()}
        distinct = {ids[role]: model for role, model in roles.items()}
        reference, times = ids["reference"], time_deviation(self.series)

        def estimates(found: Together, times: Deviation = (0.0, 0)) -> dict[str, RatioEstimate]:
            if reference not in found.samples:
                return {}
            ratios = found.estimates(reference, found.clock(self.clock), times)
            return {role: ratios[each] for role, each in ids.items() if each in ratios}

        def decides(so_far: Together) -> bool:
            ratios = estimates(so_far)
            return bool(ratios) and is_settled(_tests(ratios))

        measurements = [found := self._together(distinct, builds, rounds, is_settled=decides)]
        while (ratios := estimates(found, times)) and again(_tests(ratios)):
            more = self._together(distinct, builds, rounds)
            if more.samples.keys() != found.samples.keys():
                break  # a model does not build any more
            measurements.append(more)
            found = merged(measurements)
        broken = {each: self.reason(error) for each, error in found.failures.items()}
        if why := broken.get(reference):
            raise BackendError(f"the reference model could not be built and run again: {why}")
        clock = found.clock(self.clock)
        present = {role: each for role, each in ids.items() if each in found.samples}
        predicted = {role: ratio.predicted for role, ratio in ratios.items()}
        profiles = []
        for number, load in enumerate(self.loads if len(self.loads) > 1 else ()):
            own = found.estimates(reference, clock, times, number)
            at_load = {role: own[each].predicted for role, each in present.items()}
            profiles.append(ProfileLatency(name=load.name, share=load.share, ratios=at_load))
        return LatencyEvidence(
            clock=clock,
            samples={role: found.joined(each) for role, each in present.items()},
            ratios=predicted,
            tested=_tests(ratios),
            speedup=predicted.get("tuned", Interval(median=1, low=1, high=1)).inverse,
            builds=len(found.samples[reference]),
            profiles=tuple(profiles),
            drift=found.drift(clock),
            failures={role: broken[each] for role, each in ids.items() if each in broken},
        )

    def layers_of(self, placement: Placement) -> tuple[LayerTime, ...]:
        """Layer times of a build of a placement. Raises `BackendError` if it does not run or cannot be profiled."""
        with closing(self.open(placement)) as engine, self.exclusive():
            return self.layers(engine, self.warm(engine))

    def look(self, *, apart: float = 20.0, least_seconds: float = 5.0, rounds: int = 6) -> None:
        """Time the reference beside the kept incumbent, if the last look is long enough ago and memory allows it.

        The state of the machine changes within minutes, and the ratio with it; a short measurement sees one state only
        (docs/decisions/0006). Between two looks ``apart`` times the duration of a look passes, and ``least_seconds``:
        more looks know the variation better, and leave less time to search. A look has ``rounds`` pairs of turns. The
        reference is opened once, and stays open. An engine that fails ends the look.
        """
        held, started = self._kept, self.now()
        is_due = started - self._looked >= max(least_seconds, apart * self.look_seconds)
        if not (self.looks and is_due) or held is None or not held[0].sites or held[1]:
            return
        incumbent = held[2]
        with self.exclusive():
            try:
                if self.beside is None and self.memory([incumbent], 1):
                    self.beside = self.open(NO_PAIRS)
                if self.beside is not None:
                    if incumbent is not self._looked_at:
                        self._looked_at = incumbent
                        self.series.append([])
                    engines, samples = (incumbent, self.beside), [Samples(), Samples()]
                    turn = min((settle(engine, self.clock) for engine in engines), key=lambda each: each.runs)
                    for _ in range(rounds):
                        for side in self.random.permutation(2):
                            samples[side] += turn.sample(engines[side])
                    self.series[-1].append(log_ratios(*(taken.on(self.clock) for taken in samples)))
            except BackendError:
                self._close_beside()
            self._looked = self.now()
        self.look_seconds = self._looked - started

    def _close_beside(self) -> None:
        """Close the reference of the looks; the looks taken so far stay."""
        if self.beside is not None:
            self.beside.close()
        self.beside = self._looked_at = None

    def close(self) -> None:
        """Close all open engines."""
        self.drop()
        self._close_beside()

    def reason(self, error: QdqspecError) -> str:
        """The recorded text of a failure, without the temporary folder of the candidates."""
        text = str(error)
        return text if self.folder is None else text.replace(f"{self.folder}{os.sep}", "")

    def _together(
        self,
        models: Mapping[str, Placement | Path],
        builds: int,
        rounds: int,
        is_settled: IsSettled = lambda _: False,
    ) -> Together:
        """Time fresh builds of models together. Kept engines are closed if memory is short."""
        openers = {name: [partial(self.open, model, fresh=True)] * builds for name, model in models.items()}
        beside = [] if self._kept is None else [self._kept[2]]
        return self.time(openers, rounds, beside=beside, close_others=self.close, is_settled=is_settled)


def _tests(ratios: Mapping[str, RatioEstimate]) -> dict[str, RatioTest]:
    return {role: ratio.test for role, ratio in ratios.items()}
