"""A simulated device: seeded, by default without delays, with configurable noise and faults.

For tests of searches and statistics, and for dry runs of a spec. Times are simulated (see
`qdqspec.backends.fake.cost`); outputs are real, from the ONNX reference implementation.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec._core.options import NUMBER, declare, one_of, option, whole
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities
from qdqspec.errors import BackendError
from qdqspec.types import DeviceKey, LayerTime, Samples

_BUILD_MS = 200.0  # simulated time that passes while building
_MEMORY_MARGIN = 64 << 20  # bytes a process may still allocate when running out of memory is simulated
_number: partial[Any] = partial(option, NUMBER)
_stage: partial[Any] = partial(option, one_of("build", "run", "bind", "time", "layers"), default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """The options after ``fake.`` in the configuration. A crash is a real one: faults are for child processes."""

    seed: int = option(whole(0), "Selects the device.", 0)
    run_noise: float = _number("Log standard deviation of single runs on the CPU.", 0.03)
    wall_noise: float = _number("The same on the wall clock of a shared machine.", 0.12)
    build_noise: float = _number("The same between builds.", 0.012)
    drift: float = _number("Amplitude of a slow variation.", 0.0)
    drift_period: float = _number("Simulated seconds of one variation.", 30.0)
    state: float = _number("Log standard deviation of integer kernels between states of the device.", 0.0)
    state_period: float = _number("Simulated seconds that a state lasts.", 30.0)
    scale: float = _number("Slows everything by this factor.", 1.0)
    integer: float = _number("Slows integer kernels only; by 2, about half are slower than float.", 1.0)
    fail_rate: float = _number("Share of candidates whose build fails, always the same ones.", 0.0)
    fault_rate: float = _number("Share of candidates with one of the faults below.", 1.0)
    raise_: str = _stage("The stage at which the device raises.")
    crash: str = _stage("The stage at which it ends by a segmentation fault.")
    hang: str = _stage("The stage at which it sleeps for ever.")
    oom: str = _stage("The stage at which it runs out of memory.")


OPTIONS = declare("fake", FakeOptions, separator="_")


class FakeDevice:
    """One simulated device. Deterministic for a seed and a sequence of calls."""

    name = "fake"
    target = "fake"
    options = OPTIONS

    def __init__(self) -> None:
        self._builds = 0
        self._now_ms = 0.0  # simulated time, which determines drift and state
        self._state = (-1, 0.0)  # the number of the last state, and its deviation

    def probe(self, options: BuildOptions = PLAIN) -> Availability:  # noqa: ARG002 - there is one device only
        """Always usable."""
        return Availability(usable=True, facts={"device": "simulated"})

    def device(self, options: BuildOptions) -> DeviceKey:  # noqa: ARG002 - simulated threads are all alike
        """One key for all simulated devices: their results are comparable only within one seed."""
        return DeviceKey(key="fake", details={"note": "simulated times, not measured ones"})

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:  # noqa: ARG002 - there is one device only
        """Those of ONNX Runtime, on a few more operators, and TensorRT's float formats."""
        from qdqspec.backends.fake import cost

        formats = (cost.INT8, cost.FP8, cost.INT4, cost.NVFP4, cost.MXFP8)
        return Capabilities(
            formats=formats,
            labels=cost.LABELS,
            activations={name: name for name in formats if name != cost.INT4} | {cost.INT8: "uint8"},
            weights={name: name for name in formats},
            absorbs=cost.FUSED,
            blocked_axes=cost.BLOCKED_AXES,
            computes=False,
        )

    def build(self, model: Path, options: BuildOptions) -> FakeEngine:
        """Read the model and compute its cost; fail or crash if that is configured."""
        from qdqspec.backends.fake.cost import cost_of, fraction
        from qdqspec.graph import load_model
        from qdqspec.graph.ops import QDQ_OPS

        words = OPTIONS.of(options.extra)
        loaded = load_model(model)
        cost = cost_of(loaded, words.seed, words.scale, words.integer)
        if fraction(words.seed, "faulty", cost.structure) >= words.fault_rate:
            words = replace(words, raise_="", crash="", hang="", oom="")
        break_down(words, "build")
        is_candidate = any(node.op_type in QDQ_OPS for node in loaded.nodes)
        if is_candidate and fraction(words.seed, "refused", cost.structure) < words.fail_rate:
            raise BackendError("the simulated device refuses this placement", where=model)
        random = np.random.default_rng([words.seed, int(cost.structure, 16), options.serial + self._builds])
        self._builds += 1
        self.pass_time(_BUILD_MS)
        return FakeEngine(self, model, words, cost.layers, cost.structure, loaded.inputs, random)

    def pass_time(self, milliseconds: float) -> None:
        """Advance the simulated time."""
        self._now_ms += milliseconds

    def drift(self, words: FakeOptions) -> float:
        """The factor on all times at the current simulated time."""
        return math.exp(words.drift * math.sin(2 * math.pi * self._now_ms / 1e3 / words.drift_period))

    def state(self, words: FakeOptions) -> float:
        """The factor on integer kernels in the current state."""
        number = int(self._now_ms / 1e3 / words.state_period)
        if number != self._state[0]:
            self._state = number, float(np.random.default_rng([words.seed, number]).standard_normal())
        return math.exp(words.state * self._state[1])


class FakeEngine:
    """A model on the simulated device."""

    def __init__(
        self,
        device: FakeDevice,
        model: Path,
        words: FakeOptions,
        layers: tuple[LayerTime, ...],
        graph_hash: str,
        inputs: tuple[str, ...],
        random: np.random.Generator,
    ) -> None:
        self.graph_hash = graph_hash
        self._device = device
        self._model = model
        self._words = words
        self._inputs = inputs
        self._random = random
        factor = math.exp(words.build_noise * random.standard_normal())
        self._layers = tuple(replace(layer, milliseconds=layer.milliseconds * factor) for layer in layers)
        self._sizes: dict[int, int] = {}  # elements of the inputs, by profile

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the outputs with the ONNX reference implementation."""
        import onnx

        from qdqspec.graph import evaluator_of

        break_down(self._words, "run")
        self._check(feeds)
        try:
            evaluator = evaluator_of(onnx.load(str(self._model)))
            values = evaluator.run(None, dict(feeds))
        except NotImplementedError as error:
            raise BackendError(
                f"ONNX's reference implementation, which this device computes with, lacks an operator: {error}",
                where=self._model,
                cure="choose a backend that has it, such as onnxruntime, or cut that part off the model",
            ) from None
        except Exception as error:  # it raises whatever NumPy does
            raise BackendError(
                "ONNX's reference implementation, which this device computes with, failed: "
                f"{type(error).__name__}: {error}",
                where=self._model,
                cure="choose another backend, such as onnxruntime",
            ) from error
        return {name: np.asarray(value) for name, value in zip(evaluator.output_names, values, strict=True)}

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Check the names of the inputs; of the values only their number affects a simulated time."""
        break_down(self._words, "bind")
        self._check(feeds)
        self._sizes[profile] = sum(value.size for value in feeds.values())

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Draw the times of ``runs`` runs; at another profile work scales with the inputs, launches do not."""
        break_down(self._words, "time")
        state, layers = self._device.state(self._words), self._layers_at(profile)
        steady = math.fsum(layer.milliseconds * (state if layer.integer else 1.0) for layer in layers)
        self._device.pass_time(warmup * steady)
        cpu, wall = list[float](), list[float]()
        for _ in range(runs):
            drifted = steady * self._device.drift(self._words)
            cpu.append(drifted * math.exp(self._words.run_noise * self._random.standard_normal()))
            wall.append(cpu[-1] * math.exp(self._words.wall_noise * abs(self._random.standard_normal())))
            self._device.pass_time(wall[-1])
        return Samples(wall_ms=tuple(wall), cpu_ms=tuple(cpu))

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Times per kernel, with the noise of a mean of ``runs`` runs."""
        break_down(self._words, "layers")
        layers = self._layers_at(profile)
        noise, drift = self._words.run_noise / math.sqrt(max(runs, 1)), self._device.drift(self._words)
        factors = np.exp(noise * self._random.standard_normal(len(self._layers))) * drift
        return tuple(
            replace(layer, milliseconds=layer.milliseconds * float(factor))
            for layer, factor in zip(layers, factors, strict=True)
        )

    def close(self) -> None:
        """No resources are held."""

    def _check(self, feeds: Mapping[str, Array]) -> None:
        if missing := sorted(set(self._inputs) - set(feeds)):
            raise BackendError(f"no value is given for input {', '.join(missing)}", where=self._model)

    def _layers_at(self, profile: int) -> tuple[LayerTime, ...]:
        if profile not in self._sizes:
            raise BackendError("no inputs are bound", where=self._model, cure="call bind(feeds) first")
        if not profile:
            return self._layers
        from qdqspec.backends.fake.cost import LAUNCH_MS

        grown = self._sizes[profile] / max(self._sizes.get(0, 0), 1)
        launch = LAUNCH_MS * self._words.scale
        return tuple(
            replace(layer, milliseconds=launch + max(layer.milliseconds - launch, 0.0) * grown)
            for layer in self._layers
        )


def break_down(words: FakeOptions, stage: str) -> None:
    """Raise, crash, hang or run out of memory, if that is configured for this stage."""
    if words.raise_ == stage:
        raise RuntimeError(f"simulated failure in {stage}")
    if words.crash == stage:
        sys.stderr.write("simulated device: about to crash\n")
        sys.stderr.flush()
        ctypes.string_at(0)
        raise SystemError("reading address 0 did not crash this process")
    if words.hang == stage:
        while True:
            time.sleep(3600)
    if words.oom == stage:
        if sys.platform == "win32":
            raise MemoryError("simulated")
        import resource

        # a limit of this process alone, so that the machine's memory is not used up
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_MARGIN, most))
        bytearray(4 * _MEMORY_MARGIN)


backend = FakeDevice
