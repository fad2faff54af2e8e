"""Profiles models of any tool on the same inputs: their layers, and their times turn by turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from qdqspec._core.arrays import Array, Feed
from qdqspec.accuracy.data import feed_of_shapes, open_data, random_feeds, shaped_by_data
from qdqspec.accuracy.shapes import input_specs, resolve_shapes
from qdqspec.app.preparation.definition import SAMPLES, compared_with_definition
from qdqspec.backends.base import Backend, BuildOptions, Engine
from qdqspec.graph.model import Model, load_model
from qdqspec.timing.race import settle
from qdqspec.types import Clock, DefinitionEvidence, Inputs, InputShape, LayerTime, Samples, ShapeProfile


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
    rounds: int = 12,
) -> dict[str, Profiled]:
    """Profile models on the same inputs: the first sample of the data of ``inputs``, or random ones from the seed.

    The branch of an If and the iterations of a Loop depend on the values. Without a clock the kernels have no times.
    More ``rounds`` give narrower times, and take the time of a turn of each model each. Raises `BackendError` if a
    model does not build.
    """
    random, has_clock = np.random.default_rng(seed), backend.capabilities(options).has_clock
    definitions, engines = dict[str, DefinitionEvidence | None](), dict[str, Engine]()
    with ExitStack() as opened:
        for name, path in models.items():
            model = load_model(path)
            feeds, timed = _feeds(model, inputs, seed)
            definitions[name] = compared_with_definition(model, feeds, backend, options)
            engines[name] = opened.enter_context(_built(path, backend, options, timed))
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


@contextmanager
def _built(path: Path, backend: Backend, options: BuildOptions, feeds: dict[str, Array]) -> Iterator[Engine]:
    shapes = {name: InputShape.of(value.shape) for name, value in feeds.items()}
    fitting = replace(options, profiles=(ShapeProfile(shapes=shapes),))
    with closing(backend.build(path, fitting)) as engine:
        engine.bind(feeds)
        yield engine
