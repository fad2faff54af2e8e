"""Which candidate of a search is the best so far: built, measured, and raced against the best before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError, PlacementError
from qdqspec.measurement.bench import FLOAT, FLOOR_EPS, Bench
from qdqspec.measurement.race import both_of, profiled, warmed
from qdqspec.parity.gate import Runs
from qdqspec.search.base import Proposal
from qdqspec.search.limits import Limits
from qdqspec.types import Race, Samples, Trial


@dataclass(slots=True)
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


class Contest:
    """Decides which candidate is the best so far, the incumbent.

    A candidate wins if it was faster than the incumbent by ``eps`` in a race, was so again with both built anew, and
    meets the ``limits`` on all data. A candidate that the limits exclude is not raced: its ratio is that of a few runs.
    A candidate with the same optimized graph as another one has its result. Parts of the model are raced for a gain of
    ``part_eps``: the variation between builds is that of the whole model; less takes longer races.
    """

    def __init__(self, bench: Bench, limits: Limits | None = None, *, part_eps: float = 0.01) -> None:
        self.eps = FLOOR_EPS
        self.best: float | None = None  # the incumbent's time over the reference's
        self.limits = limits or Limits()
        self._bench, self._part_eps = bench, part_eps
        self._incumbent = FLOAT
        self._reference_seconds = 0.0  # that its build took
        self._seen: dict[str, Trial] = {}  # by hash of the optimized graph

    def build(self, number: int, proposal: Proposal) -> Built:
        """Build a proposal. The result must be measured or closed."""
        started = time.perf_counter()
        placement, subgraph = proposal.placement, proposal.subgraph
        trial = Trial(number=number, phase=proposal.phase, placement=placement, subgraph=subgraph)
        try:
            engine = self._bench.open(placement, subgraph)
        except (BackendError, PlacementError) as error:
            failed = replace(trial, status="failed", error=self._bench.reason(error))
            return Built(replace(failed, build_seconds=time.perf_counter() - started))
        seconds = time.perf_counter() - started
        trial = replace(trial, build_seconds=seconds, graph_hash=engine.graph_hash)
        return Built(trial, engine, profile=proposal.profile, timed=proposal.timed)

    def measure(self, built: Built) -> Trial:
        """The trial of a built candidate. Its engine is closed unless it won; a failure of the backend is a trial."""
        if built.engine is None:
            return built.trial
        try:
            with self._closed_unless_kept(built):
                trial = self._of_part(built) if built.trial.subgraph else self._of_whole(built)
            if not trial.subgraph:
                self._bench.look(self._reference_seconds)
        except BackendError as error:
            return replace(built.trial, status="failed", error=self._bench.reason(error), graph_hash="")
        return trial

    def recall(self, trial: Trial) -> None:
        """Restore a trial of an earlier run as if it had been measured now, without building anything."""
        if trial.ok and trial.ratio is not None and not trial.subgraph:
            self._seen.setdefault(trial.graph_hash, trial)
        self.limits.learn(trial)
        if trial.incumbent:
            self._replace_incumbent(trial)

    def measure_noise(self, reference: Trial, seconds: float | None = None) -> Samples:
        """Set ``eps`` by the variation between builds; see `Bench.measure_noise`."""
        self.eps, samples = self._bench.measure_noise(reference, seconds)
        return samples

    def _of_whole(self, built: Built) -> Trial:
        trial = self._checked(built.trial, built, self.limits.measure)
        if not built.timed:
            return trial
        before = self._seen.get(trial.graph_hash) if trial.graph_hash and self.best is not None else None
        if before is not None:
            return _with_same_graph(trial, before)
        with self._bench.exclusive():
            trial = self._timed(trial, built)
        if trial.incumbent:
            trial = self._checked(trial, built, self.limits.score)
        if trial.incumbent:
            self._replace_incumbent(trial)
            self._bench.keep(trial.placement, _open(built))
        self._seen[trial.graph_hash] = trial
        return trial

    def _checked(self, trial: Trial, built: Built, measure: Callable[[Trial, Runs], Trial]) -> Trial:
        """The trial with what the limits need of it."""
        if not self.limits.are_measured:
            return trial
        with self._bench.several(trial.placement, _open(built)) as several:
            return measure(trial, several)

    def _timed(self, trial: Trial, built: Built) -> Trial:
        """The trial with its times.

        If layers cannot be timed a note has the reason, and the engine is built again.
        """
        bench, notes = self._bench, tuple[str, ...]()
        samples = warmed(_open(built), bench.clock)
        trial = replace(trial, samples=samples)
        if built.profile:
            try:
                trial = replace(trial, layers=profiled(_open(built), samples.median_ms(bench.clock)))
            except BackendError as error:
                self._rebuild(built)
                notes = (f"layers were not timed: {bench.reason(error)}",)
        if self.best is None:
            trial = replace(trial, incumbent=True, ratio=1.0)
        elif self.limits.excludes(trial.placement):
            theirs = bench.kept(self._incumbent).time(len(samples.wall_ms), warmup=1)
            ratio = samples.median_ms(bench.clock) / theirs.median_ms(bench.clock)
            trial = replace(trial, ratio=ratio * self.best)  # enough to learn from, not to win
        else:
            trial = self._raced(trial, built, self.best)
        noted = replace(trial.samples, notes=(*trial.samples.notes, *notes))
        return replace(trial, samples=noted)

    def _raced(self, trial: Trial, built: Built, best: float) -> Trial:
        """Race a challenger. A winner must win again, with both built anew, by what makes the mean gain significant.

        Two builds of one model differ by more than a race resolves: without the second race one in six challengers that
        were no faster won, with it one in twenty (simulated, 1.2 % between builds; docs/decisions/0038).
        """
        bench, placement = self._bench, trial.placement
        outcome, ours, theirs = bench.race(placement, _open(built), self._incumbent, self.eps)
        if outcome.verdict == "faster":
            bench.drop()
            self._rebuild(built)
            enough = float(np.clip(1 - (1 - self.eps) ** 2 / outcome.ratio, FLOOR_EPS, self.eps))
            again, more, others = bench.race(placement, _open(built), self._incumbent, enough)
            ours, theirs = ours + more, theirs + others
            outcome = both_of(outcome, again, ours, theirs, bench.clock)
        return replace(
            trial,
            race=outcome,
            samples=ours,
            rival=theirs,
            ratio=outcome.ratio * best,
            incumbent=outcome.verdict == "faster",
        )

    def _of_part(self, built: Built) -> Trial:
        """The trial of a part of the model, raced against the same nodes in float; it never becomes the incumbent."""
        bench, engine, trial = self._bench, _open(built), built.trial
        placement, nodes = trial.placement, trial.subgraph
        with bench.exclusive():
            screened = warmed(engine, bench.clock)
            if not placement.sites:
                bench.keep(placement, engine, nodes)
                trial = replace(trial, samples=screened, ratio=1.0)
            else:
                outcome, ours, theirs = bench.race(placement, engine, FLOAT, self._part_eps, nodes)
                trial = replace(trial, samples=ours, rival=theirs, race=outcome, ratio=outcome.ratio)
            layers = profiled(engine, screened.median_ms(bench.clock)) if built.profile else ()
        return replace(trial, layers=layers)

    def _rebuild(self, built: Built) -> None:
        built.close()
        built.engine = None  # it may not build again
        built.engine = self._bench.open(built.trial.placement)
        warmed(built.engine, self._bench.clock)

    def _replace_incumbent(self, trial: Trial) -> None:
        if self.best is None:
            self._reference_seconds = trial.build_seconds
        self._incumbent, self.best = trial.placement, trial.ratio or 1.0

    @contextmanager
    def _closed_unless_kept(self, built: Built) -> Iterator[None]:
        """Close the engine at the end, also on errors, unless it is kept open."""
        try:
            yield
        finally:
            if built.engine is not None and not self._bench.keeps(built.engine):
                built.close()


def _open(built: Built) -> Engine:
    assert built.engine is not None
    return built.engine


def _with_same_graph(trial: Trial, earlier: Trial) -> Trial:
    """The trial of a candidate whose optimized graph equals an earlier one's, with the earlier measurement."""
    outcome = Race(opponent=earlier.placement.digest, ratio=1.0, p_value=1.0, pairs=0, verdict="same graph")
    return replace(
        trial, race=outcome, ratio=earlier.ratio, samples=earlier.samples, accuracy=earlier.accuracy
    )
