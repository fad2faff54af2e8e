"""Compares runtimes: the float and tuned models of cases that differ in the runtime only, timed interleaved.

Times of separate runs cannot be compared: the speed of the machine changes between them. So all models are built anew
and timed in one run, each on its own runtime, and compared by ratios to one reference: the fastest float model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.timing import BUILDS, ROUNDS, clock_for
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.errors import BackendError
from qdqspec.graph.model import require_path
from qdqspec.timing.race import attach
from qdqspec.timing.stats import drift
from qdqspec.timing.together import FreshBuilds, Together, joined
from qdqspec.types import NO_PAIRS, Clock, Placement, Progress, RuntimeComparison, RuntimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFile:
    """A model file on a runtime, with the inputs of a case."""

    prepared: Prepared
    path: Path
    backend: Backend
    options: BuildOptions

    @classmethod
    def of(cls, prepared: Prepared, path: Path | None = None) -> TimedFile:
        """A model of a case, by default the given one, on the runtime of the case."""
        path = path or require_path(prepared.given)
        return cls(prepared=prepared, path=path, backend=prepared.backend, options=prepared.options)

    def open(self) -> Engine:
        """A fresh build with its inputs bound."""
        built = self.backend.build(self.path, replace(self.options, fresh=True, hashed=False))
        return attach(built, self.prepared.loads)


def time_across(files: Mapping[str, TimedFile]) -> tuple[Together, Clock]:
    """Time files on their runtimes, each from `BUILDS` fresh builds, one turn of each in every round.

    Also the clock that compares them: CPU time if all cases are measured by it and all builds have it.
    """
    cases = [file.prepared for file in files.values()]
    clocks = {clock_for(prepared.case.tune, prepared.settings.threads) for prepared in cases}
    clock: Clock = "cpu" if clocks == {"cpu"} else "wall"
    fresh = FreshBuilds(
        clock=clock,
        random=np.random.default_rng(cases[0].settings.seed),
        exclusive=lambda: _all_locked(cases),
    )
    openers = {name: [file.open] * BUILDS for name, file in files.items()}
    timed = fresh.time(openers, ROUNDS, close_others=lambda: None)
    return timed, timed.clock(clock)


@contextmanager
def _all_locked(cases: Sequence[Prepared]) -> Iterator[None]:
    """Lock the hardware of all cases, in one order, so that two runs cannot wait for each other."""
    with ExitStack() as stack:
        found = {prepared.resources.lock: prepared.resources.exclusive for prepared in cases}
        for _, exclusive in sorted(found.items()):
            stack.enter_context(exclusive())
        yield


Models: TypeAlias = dict[str, tuple[RuntimeModel, TimedFile]]  # by label


def models_of(
    prepared: Prepared,
    tuned: Path | None = None,
    placement: Placement = NO_PAIRS,
    sqnr_db: float | None = None,
) -> Models:
    """The float model of a case on its runtime and, unless that was selected, the tuned one; without times."""
    name, backend = prepared.case.name, prepared.backend
    blank = RuntimeModel(case=name, backend=backend.name, target=backend.target, model="float")
    models = {blank.label: (blank, TimedFile.of(prepared))}
    if tuned is not None:
        least = prepared.case.tune.limits.min_sqnr_db
        own = replace(
            blank,
            model="tuned",
            scheme=placement.digest,
            pairs=placement.pairs,
            sqnr_db=sqnr_db,
            limit_db=least if least is not None and sqnr_db is not None and sqnr_db < least else None,
        )
        models[own.label] = own, TimedFile.of(prepared, tuned)
    return models


def compare_runtimes(
    name: str, cases: Iterable[Models], watch: Callable[[Progress], None]
) -> RuntimeComparison:
    """Time the float models of all runtimes and their tuned models, and find the fastest that is accurate enough.

    A model that does not run any more is listed with the reason. Raises `BackendError` if no float model runs.
    """
    watch(Progress(case=name, phase="", done=0, total=0, doing="comparing runtimes"))
    started = time.monotonic()
    models = {label: each for own in cases for label, each in own.items()}
    timed, clock = time_across({label: file for label, (_, file) in models.items()})
    ran = {label: model for label, (model, _) in models.items() if label in timed.samples}
    floats = [label for label, model in ran.items() if model.model == "float"]
    if not floats:
        errors = "; ".join(map(str, timed.failures.values()))
        raise BackendError(f"no float model could be built and run again: {errors}", where=name)
    first = timed.ratios(floats[0], clock)
    reference = min(floats, key=lambda label: first[label].median)
    accurate = [label for label, model in ran.items() if model.limit_db is None]
    winner = min(accurate, key=lambda label: first[label].median)
    ratios = timed.ratios(reference, clock)
    to_winner = timed.ratios(winner, clock)
    reference_ms = joined(timed.samples[reference]).median_ms(clock)

    def measured(label: str, model: RuntimeModel) -> RuntimeModel:
        """The model with its measurement, if it has one. Milliseconds follow from the ratio, as in `LatencyLine`."""
        if label not in ran:
            return replace(model, failure=str(timed.failures.get(label, "")))
        return replace(
            model,
            median_ms=reference_ms * ratios[label].median,
            ratio=ratios[label],
            to_winner=to_winner[label],
            samples=joined(timed.samples[label]),
        )

    return RuntimeComparison(
        name=name,
        clock=clock,
        builds=BUILDS,
        models=tuple(measured(label, model) for label, (model, _) in models.items()),
        reference=reference,
        winner=winner,
        drift=drift([build.on(clock) for build in timed.builds]),
        seconds=time.monotonic() - started,
    )
