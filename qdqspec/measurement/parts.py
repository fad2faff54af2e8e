"""Times parts of a model, each against the same nodes in float.

A part is timed in isolation, so that its time does not predict that of the whole: it only ranks the placements to
build. Variants race the float part in interleaved pairs, as candidates race the incumbent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError
from qdqspec.measurement.race import Entrant, profiled, race, warmed
from qdqspec.types import Clock, Placement, Race, Samples, Trial

FLOAT = Placement(sites=frozenset())
# fixed: the measured noise of builds is that of the whole model, and a part is ranked by its ratio
EPS = 0.01


class PartBench:
    """Keeps the float engine of one part open. ``open_part`` builds a part in float."""

    def __init__(
        self, open_part: Callable[[tuple[str, ...]], Engine], *, clock: Clock, random: np.random.Generator
    ) -> None:
        self._open_part = open_part
        self._clock: Clock = clock
        self._random = random
        self._held: tuple[tuple[str, ...], Engine] | None = None  # nodes and float engine of the current part

    def measure(self, trial: Trial, engine: Engine, *, profile: bool) -> Trial:
        """Race a part against itself in float; its float engine is kept. Raises `BackendError`."""
        screened = warmed(engine, self._clock)
        if not trial.placement.sites:
            self._hold(trial.subgraph, engine)
            trial = replace(trial, samples=screened, ratio=1.0)
        else:
            outcome, ours, theirs = self._race(trial, engine)
            trial = replace(trial, samples=ours, rival=theirs, race=outcome, ratio=outcome.ratio)
        return replace(trial, layers=profiled(engine, screened.median_ms(self._clock)) if profile else ())

    def holds(self, engine: Engine) -> bool:
        """Whether an engine is the one that stays open."""
        return self._held is not None and self._held[1] is engine

    def close(self) -> None:
        """Close the float engine."""
        if self._held is not None:
            self._held[1].close()
            self._held = None

    def _race(self, trial: Trial, engine: Engine) -> tuple[Race, Samples, Samples]:
        is_fresh = self._held is None or self._held[0] != trial.subgraph
        if is_fresh:
            self._hold(trial.subgraph, self._open_part(trial.subgraph))
        assert self._held is not None
        other = self._held[1]
        try:
            if is_fresh:
                warmed(other, self._clock)
            return race(
                Entrant(digest=trial.placement.digest, engine=engine, graph_hash=engine.graph_hash),
                Entrant(digest=FLOAT.digest, engine=other, graph_hash=other.graph_hash),
                clock=self._clock,
                eps=EPS,
                random=self._random,
            )
        except BackendError:
            self.close()  # whichever of the two failed
            raise

    def _hold(self, nodes: tuple[str, ...], engine: Engine) -> None:
        self.close()
        self._held = nodes, engine
