"""Stand-ins for backends, and the times of the simulated device without noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest

from qdqspec._core.arrays import Array
from qdqspec.backends.base import BuildOptions, Capabilities
from qdqspec.backends.fake.cost import cost_of
from qdqspec.backends.fake.engine import OPTIONS, FakeDevice, FakeEngine
from qdqspec.backends.onnxruntime.engine import OnnxRuntime, OnnxRuntimeEngine
from qdqspec.graph.model import load_model
from qdqspec.types import LayerTime, Samples

QUIET = {"fake.run_noise": "0.002", "fake.wall_noise": "0.002", "fake.build_noise": "0.001"}


def simulate_times(monkeypatch: pytest.MonkeyPatch, integer: float = 0.5) -> None:
    """Simulate the times of all engines of ONNX Runtime. ``integer`` is the factor on those of integer kernels.

    What a search finds does then not depend on the speed of the processor. Outputs are those of ONNX Runtime. The
    engines must be threads of this process (see ``engine_threads``).
    """
    device, words = FakeDevice(), {**QUIET, "fake.integer": str(integer)}

    class Simulated(OnnxRuntimeEngine):
        @cached_property
        def timed(self) -> FakeEngine:
            return device.build(self.model, replace(self._options, extra=words))

        def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
            super().bind(feeds, profile)
            self.timed.bind(feeds, profile)

        def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
            self._require_bound(profile)
            return self.timed.time(runs, warmup, profile)

        def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
            self._require_bound(profile)
            return self.timed.layers(runs, profile)

    monkeypatch.setattr("qdqspec.backends.onnxruntime.engine.OnnxRuntimeEngine", Simulated)


def true_ms(model: Path, options: Mapping[str, str] | None = None) -> float:
    """The time of a run of a model in milliseconds."""
    words = OPTIONS.of(options or {})
    return cost_of(load_model(model), words.seed, words.scale, words.integer).milliseconds


class Doubling(OnnxRuntime):
    """A runtime whose optimized models return twice the defined values."""

    def build(self, model: Path, options: BuildOptions) -> OnnxRuntimeEngine:
        engine = super().build(model, options)
        if options.extra.get("onnxruntime.optimization") != "off":
            run = engine.run
            engine.run = lambda feeds: {name: 2 * value for name, value in run(feeds).items()}  # type: ignore[method-assign]
        return engine


class RunsModels:
    """A backend for int8 whose engines can be run, and that fuses nothing."""

    def capabilities(self, options: BuildOptions) -> Capabilities:
        return Capabilities(formats=("int8",), labels={}, activations={}, weights={})
