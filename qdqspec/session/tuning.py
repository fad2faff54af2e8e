"""The search of one case, from the first build to the confirmed winner. Part of the session.

`tune` is the whole story; what a finished search leaves is a `Tuned`, which the cache keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, cast

import numpy as np

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.config import Settings
from qdqspec.graph.weights import WeightStore
from qdqspec.measure.bench import Bench
from qdqspec.measure.stats import inverse
from qdqspec.parity.gate import OutputGate
from qdqspec.placement.insert import Inserter
from qdqspec.placement.space import SchemeSpace
from qdqspec.registry import resolve
from qdqspec.search.base import SearchSetup, Strategy
from qdqspec.search.loop import Budget, Search, Watch
from qdqspec.search.select import Choice, choose, finalists, front_of, raw_winner, reaches
from qdqspec.session.files import BuildLogs
from qdqspec.session.parts import PartFiles
from qdqspec.session.prepare import Candidates, Prepared, require_path
from qdqspec.session.warm import Start, seeds
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import (
    Clock,
    FrontPoint,
    Interval,
    LatencyEvidence,
    Placement,
    SearchResult,
    Trial,
    TuneRules,
)

TRIALS = {"quick": 12, "default": 40, "extensive": 120}  # search builds a preset allows
FRONT = 8  # placements of a front that are built afresh and timed together
NO_PLACEMENT = Placement(sites=frozenset())

MakeStrategy: TypeAlias = Callable[[SearchSetup, np.random.Generator], Strategy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a search came to: its result, the confirming measurement, and what won before confirmation.

    ``confirmed`` are the finalists' lines for the journal, by role.
    """

    result: SearchResult
    latency: LatencyEvidence
    raw_winner: Placement
    confirmed: tuple[tuple[str, Trial], ...]

    @property
    def intervals(self) -> dict[str, Interval]:
        """Confirmed ratios to the reference, by digest of the placement."""
        ratios = self.latency.ratios
        found = {trial.placement.digest: ratios[role] for role, trial in self.confirmed if role in ratios}
        return {**found, self.result.winner.digest: ratios["tuned"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """What a search runs on."""

    backend: Backend
    options: BuildOptions
    settings: Settings
    exclusive: Callable[[], AbstractContextManager[object]]
    watch: Watch | None
    seconds_left: Callable[[], float | None] = lambda: None  # of the run's time limit


def clock_for(rules: TuneRules, threads: int) -> Clock:
    """The clock that gates: thread CPU time where one thread runs, else wall time."""
    return rules.clock if rules.clock != "auto" else "cpu" if threads == 1 else "wall"


def tune(prepared: Prepared, work: Workbench, journal: BuildLogs) -> Tuned:
    """Search, confirm by fresh builds, and choose. Every trial is journalled before the next begins."""
    with Tuning(prepared, work, journal) as tuning:
        tuning.search.run()
        return tuning.confirm()


class Tuning:
    """The search of a case with its bench set up, to be run or stepped through, and then confirmed.

    It goes on where ``journal`` ends. ``make`` gives a strategy, called ``name``, in place of the
    one that the case names.
    """

    def __init__(
        self,
        prepared: Prepared,
        work: Workbench,
        journal: BuildLogs,
        *,
        make: MakeStrategy | None = None,
        name: str | None = None,
    ) -> None:
        self._prepared = prepared
        self._started = time.monotonic(), time.process_time()
        rules, space = prepared.case.tune, prepared.space
        # Apart, so that a resumed run, which measures less, asks for the same placements.
        lots, order = np.random.default_rng(work.settings.seed).spawn(2)
        make = make or named(rules.strategy)
        self._name = name or rules.strategy
        trials = trials_of(rules, space, make)
        with ExitStack() as opened:
            folder = opened.enter_context(TemporaryFolder())
            self._bench = _bench(prepared, work, folder, order)
            opened.callback(self._bench.close)
            self.search = Search(
                make(_setup(prepared, work, self._bench.clock, trials), lots),
                self._bench,
                _budget(rules, trials, work.seconds_left()),
                journal,
                case=prepared.case.name,
                replay=journal.trials(),
                watch=work.watch,
            )
            self._opened = opened.pop_all()

    def confirm(self) -> Tuned:
        """Build the finalists afresh, time them together, and choose what is shipped."""
        rules, trials = self._prepared.case.tune, tuple(self.search.trials)
        ended_by = self.search.ended_by  # now: what follows takes time too
        space = self._prepared.space
        roles = finalists(trials, space.resolve(space.everything()), min_sqnr_db=rules.min_sqnr_db)
        front = _front_roles(trials, roles, rules)
        measured = self._bench.compare({**roles, **front, "tuned": roles["winner"]})
        barred = {t.placement.digest for t in trials if not t.subgraph and not reaches(t, rules.min_sqnr_db)}
        choice = choose(
            roles,
            {role: ratio for role, ratio in measured.ratios.items() if role in roles},
            barred=barred,
            ended_by=ended_by,
        )
        confirmed = tuple(
            (role, _confirmed(number, role, placement, measured))
            for number, (role, placement) in enumerate(roles.items(), len(trials))
        )
        return Tuned(
            result=self._result(
                trials, choice, _front(trials, {**roles, **front}, measured) if front else ()
            ),
            latency=renamed(measured, choice.role),
            raw_winner=raw_winner(trials) or roles["winner"],
            confirmed=confirmed,
        )

    def _result(
        self, trials: tuple[Trial, ...], choice: Choice, front: tuple[FrontPoint, ...]
    ) -> SearchResult:
        prepared, (started, cpu_started) = self._prepared, self._started
        return SearchResult(
            winner=choice.placement,
            trials=trials,
            left_alone=choice.left_alone,
            reason=prepared.nothing or choice.reason,
            strategy=self._name,
            seconds=time.monotonic() - started,
            cpu_seconds=time.process_time() - cpu_started,
            eps=self._bench.eps,
            blocks=len(prepared.space.units),
            regions=len(prepared.regions),
            patterns=len({region.pattern for region in prepared.regions}),
            front=front,
        )

    def rest(self) -> None:
        """End the incumbent's process; it is built again where it is needed."""
        self._bench.close()

    def close(self) -> None:
        """End what runs, and remove the candidates' files. Closing twice does no harm."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _front_roles(
    trials: Sequence[Trial], roles: Mapping[str, Placement], rules: TuneRules
) -> dict[str, Placement]:
    """The placements of the front that are no finalists already, for a search with two objectives."""
    if rules.objective != "pareto":
        return {}
    known = {placement.digest for placement in roles.values()}
    members = [t.placement for t in front_of(trials, FRONT) if t.placement.digest not in known]
    return {f"front-{number}": placement for number, placement in enumerate(members, 1)}


def _front(
    trials: Sequence[Trial], roles: Mapping[str, Placement], measured: LatencyEvidence
) -> tuple[FrontPoint, ...]:
    """What remains of the front once its members were built afresh and timed together."""
    sqnr = {t.placement.digest: t.sqnr_db for t in trials if t.ok and t.sqnr_db is not None}
    timed = [
        (measured.ratios[role], p)
        for role, p in roles.items()
        if role in measured.ratios and p.digest in sqnr
    ]
    points: list[FrontPoint] = []
    for ratio, placement in sorted(timed, key=lambda pair: pair[0].median):
        if not points or sqnr[placement.digest] > points[-1].sqnr_db:
            points.append(
                FrontPoint(
                    placement=placement.digest,
                    pairs=placement.pairs,
                    ratio=ratio,
                    sqnr_db=sqnr[placement.digest],
                )
            )
    return tuple(points)


def renamed(measured: LatencyEvidence, role: str) -> LatencyEvidence:
    """The same measurement with ``tuned`` standing for what is shipped."""
    names = {"tuned": role, "reference": "reference"} | {
        name: name for name in ("runner-up", "everything") if name in measured.samples and name != role
    }
    return LatencyEvidence(
        clock=measured.clock,
        samples={name: measured.samples[source] for name, source in names.items()},
        ratios={name: measured.ratios[source] for name, source in names.items()},
        speedup=inverse(measured.ratios[role]),
        builds=measured.builds,
        provenance=measured.provenance,
        drift=measured.drift,
        profiles=tuple(
            replace(profile, ratios={name: profile.ratios[source] for name, source in names.items()})
            for profile in measured.profiles
        ),
    )


def _confirmed(number: int, role: str, placement: Placement, measured: LatencyEvidence) -> Trial:
    """The journal's line of a finalist's fresh builds."""
    trial = Trial(number=number, phase="confirm", placement=placement)
    if role not in measured.samples:
        return replace(trial, status="failed", error=measured.failures[role])
    return replace(trial, samples=measured.samples[role], ratio=measured.ratios[role].median)


def _bench(prepared: Prepared, work: Workbench, folder: Path, random: np.random.Generator) -> Bench:
    rules = prepared.case.tune
    store = WeightStore(folder, base=require_path(prepared.given).parent)
    inserter = Inserter(prepared.model, prepared.numbers, store=store)
    return Bench(
        work.backend,
        Candidates(folder, require_path(prepared.given), lambda placement: inserter.insert(placement).parts),
        prepared.loads,
        clock=clock_for(rules, work.settings.threads),
        random=random,
        options=work.options,
        exclusive=work.exclusive,
        sqnr_db=_gate(prepared, work) if _watches_accuracy(rules) else None,
        min_sqnr_db=rules.min_sqnr_db,
        extract=PartFiles(prepared, folder, store),
        folder=folder,
    )


def _watches_accuracy(rules: TuneRules) -> bool:
    return rules.objective == "pareto" or rules.min_sqnr_db is not None


def _gate(prepared: Prepared, work: Workbench) -> OutputGate:
    """The reference's outputs on calibration samples, for the accuracy of candidates."""
    with closing(work.backend.build(require_path(prepared.given), work.options)) as reference:
        return OutputGate(reference, prepared.feeds())


def _setup(prepared: Prepared, work: Workbench, clock: Clock, trials: int) -> SearchSetup:
    rules, space = prepared.case.tune, prepared.space
    device = work.backend.device(work.options).key
    start = Start(space=space, backend=work.backend.target, device=device, note=prepared.warnings.append)
    return SearchSetup(
        space=space,
        clock=clock,
        preset=rules.preset,
        trials=trials,
        seeds=seeds(rules.start_from, start),
        min_sqnr_db=rules.min_sqnr_db,
        pareto=rules.objective == "pareto",
    )


def named(strategy: str) -> MakeStrategy:
    """The strategy of that name; raises `ConfigError` with the nearest where there is none."""
    return cast("MakeStrategy", resolve("strategy", strategy))


def trials_of(rules: TuneRules, space: SchemeSpace, make: MakeStrategy | None = None) -> int:
    """How many search builds the case allows: as asked, else as its strategy or the preset has it.

    A strategy may have a budget of its own, as a function ``default_trials(preset, space)``.
    """
    if rules.trials is not None:
        return rules.trials
    own: Callable[[str, SchemeSpace], int] | None = getattr(
        make or named(rules.strategy), "default_trials", None
    )
    return TRIALS[rules.preset] if own is None else own(rules.preset, space)


def _budget(rules: TuneRules, trials: int, seconds_left: float | None) -> Budget:
    limits = [60 * rules.minutes if rules.minutes is not None else None, seconds_left]
    seconds = min((limit for limit in limits if limit is not None), default=None)
    return Budget(trials=trials, seconds=seconds)
