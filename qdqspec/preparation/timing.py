"""Times model files of any tool against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from qdqspec.arrays import Array, Feed
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.graph.model import Model, load_model, require_path
from qdqspec.measurement.bench import Bench
from qdqspec.measurement.profiles import GivenFeeds
from qdqspec.measurement.race import settle
from qdqspec.parity.data import feed_of_shapes, open_data, random_feeds, shaped_by_data
from qdqspec.parity.shapes import input_specs, resolve_shapes
from qdqspec.preparation.candidates import half_reference, note_float_types, plain_file
from qdqspec.preparation.definition import SAMPLES, compared_with_definition
from qdqspec.preparation.prepare import Prepared
from qdqspec.preparation.resources import Resources
from qdqspec.temporary import TemporaryFolder
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
    feeds: GivenFeeds,
    rules: TuneRules,
    *,
    builds: int = BUILDS,
    rounds: int = ROUNDS,
) -> LatencyEvidence:
    """Time files by role (including ``reference`` and ``tuned``), interleaved, from fresh builds.

    Raises `BackendError` if the reference does not run; another role that fails is omitted, with its reason recorded.
    """
    bench = Bench(
        resources.backend,
        None,
        feeds,
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
    """Time the given model and another with the same inputs, interleaved, from fresh builds.

    The given model in float16 is timed too, if `half_reference` can make it, and in float32 if candidates are.
    """
    files = {"reference": require_path(prepared.given), "tuned": tuned}
    loads, rules = prepared.loads, prepared.case.tune
    with TemporaryFolder() as folder:
        files |= half_reference(prepared, folder)
        if prepared.is_converted:
            files[FLOAT32] = plain_file(prepared, folder)
        measured = time_files(prepared.resources, files, loads, rules, builds=builds, rounds=rounds)
    note_float_types(prepared, measured)
    return measured


PROFILE_ROUNDS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Layers of a built model, and its end-to-end times on one clock; without a clock only its layers.

    ``definition`` is the difference of its outputs from its definition in ONNX.
    """

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
) -> dict[str, Profiled]:
    """Profile models on the same inputs: the first sample of the data of ``inputs``, or random ones from the seed.

    The branch of an If and the iterations of a Loop depend on the values. Without a clock the kernels have no times.
    Raises `BackendError` if a model does not build.
    """
    random = np.random.default_rng(seed)
    loaded = {name: load_model(path) for name, path in models.items()}
    feeds = {name: _feeds(model, inputs, seed) for name, model in loaded.items()}
    definitions = {
        name: compared_with_definition(model, feeds[name][0], backend, options)
        for name, model in loaded.items()
    }
    with ExitStack() as opened:
        engines = {
            name: opened.enter_context(_built(path, backend, options, feeds[name][1]))
            for name, path in models.items()
        }
        if not backend.capabilities(options).has_clock:
            return {name: Profiled(layers=engine.layers(1)) for name, engine in engines.items()}
        turns = {name: settle(engine, clock) for name, engine in engines.items()}
        samples = dict.fromkeys(engines, Samples())
        names = list(engines)
        for _ in range(PROFILE_ROUNDS):
            for position in random.permutation(len(names)):
                name = names[position]
                samples[name] += turns[name].sample(engines[name])
        return {
            name: Profiled(
                layers=engine.layers(),
                samples=taken,
                median_ms=taken.median_ms(clock),
                definition=definitions[name],
            )
            for (name, engine), taken in zip(engines.items(), samples.values(), strict=True)
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


@contextmanager
def _built(path: Path, backend: Backend, options: BuildOptions, feeds: dict[str, Array]) -> Iterator[Engine]:
    shapes = {name: InputShape.of(value.shape) for name, value in feeds.items()}
    fitting = replace(options, profiles=(ShapeProfile(shapes=shapes),))
    with closing(backend.build(path, fitting)) as engine:
        engine.bind(feeds)
        yield engine
