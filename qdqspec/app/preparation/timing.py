"""Times and profiles model files of any tool against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.files import TemporaryFolder
from qdqspec.accuracy.data import feed_of_shapes, open_data, random_feeds, shaped_by_data
from qdqspec.accuracy.shapes import input_specs, resolve_shapes
from qdqspec.app.preparation.auxiliary_runs import SAMPLES, compared_with_definition
from qdqspec.app.preparation.candidates import half_reference, note_float_types, plain_file
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.resources import Resources
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.graph.model import Model, load_model, require_path
from qdqspec.timing.bench import Bench
from qdqspec.timing.race import Load, settle
from qdqspec.types import (
    FLOAT32,
    Clock,
    DefinitionEvidence,
    Inputs,
    InputShape,
    LatencyEvidence,
    LayerTime,
    Samples,
    ShapeProfile,
    TuneRules,
)

Measure: TypeAlias = Callable[[int, int], LatencyEvidence]  # by numbers of builds and rounds

BUILDS, ROUNDS = 3, 24  # the same precision as the confirmation of a search


def clock_for(rules: TuneRules, threads: int) -> Clock:
    """The clock that decides races: thread CPU time for one thread, else wall time."""
    return rules.clock if rules.clock != "auto" else "cpu" if threads == 1 else "wall"


def time_files(
    resources: Resources,
    files: Mapping[str, Path],
    loads: tuple[Load, ...],
    rules: TuneRules,
    *,
    builds: int = BUILDS,
    rounds: int = ROUNDS,
) -> LatencyEvidence:
    """Time files by role (including ``reference`` and ``tuned``), interleaved, from fresh builds.

    Raises `BackendError` if the reference does not run; another role that fails is omitted, with its reason.
    """
    bench = Bench(
        resources.backend,
        None,
        loads,
        clock=clock_for(rules, resources.settings.threads),
        random=np.random.default_rng(resources.settings.seed),
        options=resources.options,
        exclusive=resources.exclusive,
        jobs=resources.jobs,
        report=resources.report_step,
    )
    return bench.compare(files, builds=builds, rounds=rounds)


def time_tuned(
    prepared: Prepared, tuned: Path, builds: int = BUILDS, rounds: int = ROUNDS
) -> LatencyEvidence:
    """Time the given model and another with the same inputs, and the given one in other float types as in a search."""
    files = {"reference": require_path(prepared.given), "tuned": tuned}
    loads, rules = prepared.loads, prepared.case.tune
    with TemporaryFolder() as folder:
        files |= half_reference(prepared, folder)
        if prepared.is_converted:
            files[FLOAT32] = plain_file(prepared, folder)
        measured = time_files(prepared.resources, files, loads, rules, builds=builds, rounds=rounds)
    note_float_types(prepared, measured)
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Layers of a built model, its times on a clock, and the difference of its outputs from its definition in ONNX."""

    layers: tuple[LayerTime, ...]
    samples: Samples = field(default_factory=Samples)
    median_ms: float | None = None
    definition: DefinitionEvidence | None = None


def profile_models(
    models: Mapping[str, Path],
    backend: Backend,
    options: BuildOptions,
    inputs: Inputs,
    *,
    clock: Clock,
    seed: int = 0,
    rounds: int = 12,
) -> dict[str, Profiled]:
    """Profile models on the same inputs: the first sample of the data of ``inputs``, or random ones from the seed.

    Without a clock the kernels have no times. More ``rounds`` give narrower times, and take a turn of each model each.
    Raises `BackendError` if a model does not build.
    """
    random, has_clock = np.random.default_rng(seed), backend.capabilities(options).has_clock
    definitions, engines = dict[str, DefinitionEvidence | None](), dict[str, Engine]()
    with ExitStack() as opened:
        for name, path in models.items():
            model = load_model(path)
            feeds, timed = _feeds(model, inputs, seed)
            definitions[name] = compared_with_definition(model, feeds, backend, options)
            shapes = {own: InputShape.of(value.shape) for own, value in timed.items()}
            fitting = replace(options, profiles=(ShapeProfile(shapes=shapes),))
            engines[name] = opened.enter_context(closing(backend.build(path, fitting)))
            engines[name].bind(timed)
        samples = dict.fromkeys(engines, Samples())
        if has_clock:
            turns = {name: settle(engine, clock) for name, engine in engines.items()}
            names = list(engines)
            for position in np.concatenate([random.permutation(len(names)) for _ in range(rounds)]):
                name = names[position]
                samples[name] += turns[name].sample(engines[name])
        return {
            name: Profiled(
                layers=engine.layers() if has_clock else engine.layers(1),
                samples=samples[name],
                median_ms=samples[name].median_ms(clock) if has_clock else None,
                definition=definitions[name],
            )
            for name, engine in engines.items()
        }


def _feeds(model: Model, inputs: Inputs, seed: int) -> tuple[Iterable[Feed], dict[str, Array]]:
    """All inputs, and the one that is timed: the first in the shapes of the case."""
    shaped = shaped_by_data(model, inputs)
    shapes = resolve_shapes(model, shaped)
    data = inputs.calibration or inputs.evaluation
    if data is None:
        feeds: Iterable[Feed] = random_feeds(model, shapes, seed, SAMPLES)
    else:
        feeds = open_data(data, input_specs(model, shapes, shaped.profiles), fixed=inputs.values)
    fed = {name: shape for name, shape in shapes.items() if name not in inputs.values}
    return feeds, feed_of_shapes(lambda: feeds, fed)
