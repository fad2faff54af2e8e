"""ONNX Runtime with the times of the simulated device: what a search finds does not depend on the processor's speed.

Outputs are those of ONNX Runtime. The engines must be threads of this process (see ``engine_threads``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import pytest

from qdqspec._core.arrays import Array
from qdqspec.backends.fake.engine import FakeDevice, FakeEngine
from qdqspec.backends.onnxruntime.engine import OnnxRuntimeEngine
from qdqspec.types import LayerTime, Samples

QUIET = {"fake.run_noise": "0.002", "fake.wall_noise": "0.002", "fake.build_noise": "0.001"}


def simulate_times(monkeypatch: pytest.MonkeyPatch, integer: float = 0.5) -> None:
    """Simulate the times of all engines of ONNX Runtime. ``integer`` is the factor on those of integer kernels."""
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
