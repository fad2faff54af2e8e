"""Compares runtimes: the float and tuned models of cases that differ in the runtime only, timed interleaved.

Times of separate runs cannot be compared: the speed of the machine changes between them. So all models are built anew
and timed in one run, each on its own runtime, and compared by ratios to one reference: the fastest float model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.errors import BackendError
from qdqspec.graph.model import require_path
from qdqspec.measurement.profiles import Load, attach
from qdqspec.measurement.race import FLOAT
from qdqspec.measurement.stats import drift
from qdqspec.measurement.together import FreshBuilds, Together, common_clock, joined, ratios_between
from qdqspec.preparation.case import CaseSetup
from qdqspec.preparation.timing import BUILDS, ROUNDS, clock_for
from qdqspec.session.evidence import CaseWork
from qdqspec.types import Clock, Interval, Placement, RuntimeComparison, RuntimeModel, Samples

Report = Callable[[str, str], None]  # of a case, and what is done


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFile:
    """A model file on a runtime, with its inputs."""

    backend: Backend
    options: BuildOptions
    path: Path
    loads: tuple[Load, ...]

    def open(self) -> Engine:
        """A fresh build with its inputs bound."""
        built = self.backend.build(self.path, replace(self.options, fresh=True, hashed=False))
        return attach(built, self.loads)


def time_across(files: Mapping[str, TimedFile], setups: Sequence[CaseSetup]) -> tuple[Together, Clock]:
    """Time files of the cases' runtimes, each from `BUILDS` fresh builds, one turn of each in every round.

    Also the clock that compares them: CPU time if all cases are measured by it and all builds have it.
    """
    clocks = {clock_for(setup.case.tune, setup.settings.threads) for setup in setups}
    clock: Clock = "cpu" if clocks == {"cpu"} else "wall"
    fresh = FreshBuilds(
        clock=clock,
        random=np.random.default_rng(setups[0].settings.seed),
        exclusive=lambda: _all_locked(setups),
    )
    openers = {name: [file.open] * BUILDS for name, file in files.items()}
    timed = fresh.time(openers, ROUNDS, close_others=lambda: None)
    return timed, common_clock(clock, timed.samples)


@contextmanager
def _all_locked(setups: Sequence[CaseSetup]) -> Iterator[None]:
    """Lock the hardware of all cases, in one order, so that two runs cannot wait for each other."""
    with ExitStack() as stack:
        found = {setup.resources.lock: setup.resources.exclusive for setup in setups}
        for _, exclusive in sorted(found.items()):
            stack.enter_context(exclusive())
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A case on its runtime, and its tuned model: ``None`` if the float model was selected."""

    setup: CaseSetup
    tuned: Path | None = None
    placement: Placement = FLOAT
    sqnr_db: float | None = None


def side_of(work: CaseWork) -> Side:
    """A case that was searched."""
    kept = work.finder.find()
    if kept.model is None:
        return Side(setup=work.setup)
    return Side(
        setup=work.setup,
        tuned=kept.model,
        placement=kept.result.winner,
        sqnr_db=work.parity.sqnr_db,
    )


def grouped(works: Iterable[CaseWork]) -> list[tuple[str, list[CaseWork]]]:
    """The works of cases that choose a backend and differ in nothing else, with the common part of their names."""
    groups: dict[tuple[str, ...], list[CaseWork]] = {}
    for work in works:
        case = work.setup.case
        if case.backend is not None:
            rest = {axis: value for axis, value in case.matrix.items() if axis != "backend"}
            name = "-".join([case.spec_name, *(str(value) for value in rest.values())])
            groups.setdefault((str(case.spec), str(case.model), repr(rest), name), []).append(work)
    return [
        (key[-1], found) for key, found in groups.items() if len({w.setup.backend.name for w in found}) > 1
    ]


def compare_runtimes(name: str, sides: Sequence[Side], report: Report) -> RuntimeComparison:
    """Time the float models of all runtimes and their tuned models, and find the fastest that is accurate enough.

    A model that does not run any more is listed with the reason. Raises `BackendError` if no float model runs.
    """
    report(name, "comparing runtimes")
    started = time.monotonic()
    blank = [model for side in sides for model in _models(side)]
    files: dict[str, TimedFile] = {}
    for side in sides:
        setup = side.setup
        given = TimedFile(
            backend=setup.backend,
            options=setup.resources.options,
            path=require_path(setup.given),
            loads=setup.prepared.loads,
        )
        for model in _models(side):
            files[model.label] = (
                replace(given, path=side.tuned or given.path) if model.model == "tuned" else given
            )
    timed, clock = time_across(files, [side.setup for side in sides])
    failures = {label: str(error) for label, error in timed.failures.items()}
    floats = [m.label for m in blank if m.model == "float" and m.label in timed.samples]
    if not floats:
        raise BackendError(
            "no float model could be built and run again: " + "; ".join(failures.values()), where=name
        )
    first = ratios_between(timed.samples, floats[0], clock)
    reference = min(floats, key=lambda label: first[label].median)
    may_win = [m.label for m in blank if m.label in timed.samples and m.limit_db is None]
    winner = min(may_win, key=lambda label: first[label].median)
    found = partial(
        _measured,
        samples=timed.samples,
        ratios=ratios_between(timed.samples, reference, clock),
        to_winner=ratios_between(timed.samples, winner, clock),
        reference_ms=joined(timed.samples[reference]).median_ms(clock),
    )
    return RuntimeComparison(
        name=name,
        clock=clock,
        builds=BUILDS,
        models=tuple(found(replace(model, failure=failures.get(model.label, ""))) for model in blank),
        reference=reference,
        winner=winner,
        drift=drift([build.on(clock) for builds in timed.samples.values() for build in builds]),
        seconds=time.monotonic() - started,
    )


def _models(side: Side) -> list[RuntimeModel]:
    """The float model of a case and, unless that was selected, the tuned one; without times."""
    setup = side.setup
    blank = RuntimeModel(case=setup.case.name, backend=setup.backend.name, target=setup.target, model="float")
    if side.tuned is None:
        return [blank]
    sqnr_db, least = side.sqnr_db, setup.case.tune.limits.min_sqnr_db
    limit_db = least if least is not None and sqnr_db is not None and sqnr_db < least else None
    tuned = replace(blank, model="tuned", scheme=side.placement.digest, pairs=side.placement.pairs)
    return [blank, replace(tuned, sqnr_db=sqnr_db, limit_db=limit_db)]


def _measured(
    model: RuntimeModel,
    *,
    samples: Mapping[str, Sequence[Samples]],
    ratios: Mapping[str, Interval],
    to_winner: Mapping[str, Interval],
    reference_ms: float,
) -> RuntimeModel:
    """The model with its measurement, if it has one. Milliseconds follow from the ratio, as in `LatencyLine`."""
    label = model.label
    if label not in samples:
        return model
    return replace(
        model,
        median_ms=reference_ms * ratios[label].median,
        ratio=ratios[label],
        to_winner=to_winner[label],
        samples=joined(samples[label]),
    )
