"""The search of one case, from the first build to the confirmed winner. Part of the session.

`tune` is the whole story; what a finished search leaves is a `Tuned`, which the cache keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np

from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.config import Settings
from qdqspec.graph.weights import WeightStore
from qdqspec.measure.bench import Bench
from qdqspec.measure.journal import Journal
from qdqspec.measure.stats import inverse
from qdqspec.placement.insert import Inserter
from qdqspec.placement.space import SchemeSpace
from qdqspec.registry import resolve
from qdqspec.search.base import SearchSetup, Strategy
from qdqspec.search.loop import Budget, Watch, search
from qdqspec.search.select import choose, finalists
from qdqspec.session.prepare import Candidates, Prepared, require_path
from qdqspec.types import Clock, LatencyEvidence, Placement, SearchResult, Trial, TuneRules

TRIALS = {"quick": 12, "default": 40, "extensive": 120}  # search builds a preset allows
NO_PLACEMENT = Placement(sites=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a search came to: its result, the confirming measurement, and what won before confirmation.

    ``confirmed`` are the finalists' lines for the journal, by role.
    """

    result: SearchResult
    latency: LatencyEvidence
    raw_winner: Placement
    confirmed: tuple[tuple[str, Trial], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """What a search runs on."""

    backend: Backend
    options: BuildOptions
    settings: Settings
    exclusive: Callable[[], AbstractContextManager[object]]
    watch: Watch | None


def clock_for(rules: TuneRules, threads: int) -> Clock:
    """The clock that gates: thread CPU time where one thread runs, else wall time."""
    return rules.clock if rules.clock != "auto" else "cpu" if threads == 1 else "wall"


def tune(prepared: Prepared, bench_of: Workbench, journal: Journal) -> Tuned:
    """Search, confirm by fresh builds, and choose. Every trial is journalled before the next begins."""
    started, cpu_started = time.monotonic(), time.process_time()
    settings, rules, space = bench_of.settings, prepared.case.tune, prepared.space
    # Apart, so that a resumed run, which measures less, asks for the same placements.
    lots, order = np.random.default_rng(settings.seed).spawn(2)
    with TemporaryDirectory(prefix="qdqspec-") as folder:
        bench = _bench(prepared, bench_of, Path(folder), order)
        try:
            strategy = _strategy(rules, space, bench.clock, lots)
            trials = search(
                strategy,
                bench,
                _budget(rules, settings),
                journal,
                case=prepared.case.name,
                replay=journal.trials(),
                watch=bench_of.watch,
            )
            roles = finalists(trials, space.resolve(space.everything()))
            measured = bench.compare({**roles, "tuned": roles["winner"]})
        finally:
            bench.close()
    choice = choose(roles, {role: ratio for role, ratio in measured.ratios.items() if role in roles})
    result = SearchResult(
        winner=choice.placement,
        trials=trials,
        left_alone=choice.left_alone,
        reason=choice.reason,
        strategy=rules.strategy,
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - cpu_started,
        eps=bench.eps,
        blocks=len(space.units),
        regions=len(prepared.regions),
        patterns=len({region.pattern for region in prepared.regions}),
    )
    confirmed = tuple(
        (role, _confirmed(number, role, placement, measured))
        for number, (role, placement) in enumerate(roles.items(), len(trials))
    )
    return Tuned(
        result=result,
        latency=renamed(measured, choice.role),
        raw_winner=roles["winner"],
        confirmed=confirmed,
    )


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
    )


def _confirmed(number: int, role: str, placement: Placement, measured: LatencyEvidence) -> Trial:
    """The journal's line of a finalist's fresh builds."""
    trial = Trial(number=number, phase="confirm", placement=placement)
    if role not in measured.samples:
        return replace(trial, status="failed", error=measured.failures[role])
    return replace(trial, samples=measured.samples[role], ratio=measured.ratios[role].median)


def _bench(prepared: Prepared, work: Workbench, folder: Path, random: np.random.Generator) -> Bench:
    store = WeightStore(folder, base=require_path(prepared.given).parent)
    inserter = Inserter(prepared.model, prepared.numbers, store=store)
    return Bench(
        work.backend,
        Candidates(folder, require_path(prepared.given), lambda placement: inserter.insert(placement).proto),
        prepared.sample,
        clock=clock_for(prepared.case.tune, work.settings.threads),
        random=random,
        options=work.options,
        exclusive=work.exclusive,
    )


def _strategy(rules: TuneRules, space: SchemeSpace, clock: Clock, random: np.random.Generator) -> Strategy:
    make = cast("type[Strategy]", resolve("strategy", rules.strategy))
    setup = SearchSetup(space=space, clock=clock, preset=rules.preset, trials=trials_of(rules))
    return make(setup, random)


def trials_of(rules: TuneRules) -> int:
    """How many search builds the case allows."""
    return rules.trials if rules.trials is not None else TRIALS[rules.preset]


def _budget(rules: TuneRules, settings: Settings) -> Budget:
    limits = [60 * rules.minutes if rules.minutes is not None else None, settings.time_limit]
    seconds = min((limit for limit in limits if limit is not None), default=None)
    return Budget(trials=trials_of(rules), seconds=seconds)
