"""Searches on the simulated device, and the true costs of their results. For other benchmarks.

The device runs in this process, with noise between runs and builds, drift, and candidates that it refuses. Its cost of
each placement without noise is known, so that the claims of a search can be verified. Scales are calibrated once per
model on ONNX Runtime: they do not affect costs, and the reference implementation would take minutes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from qdqspec._core.arrays import Array
from qdqspec._core.config import Settings
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import Resources
from qdqspec.app.preparation.stored import open_journal
from qdqspec.app.session.tuning import Tuned, Tuning
from qdqspec.backends.base import BuildOptions, Capabilities
from qdqspec.backends.fake.cost import cost_of
from qdqspec.backends.fake.engine import OPTIONS, FakeDevice, FakeEngine
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.insert import Inserter
from qdqspec.types import Case, Interval, Label, LayerTime, Placement, Samples, Trial

# The noise of real machines: 3 % between runs, 1.2 % between builds; twice that; and a device on which half of all
# integer kernels are slower.
DEVICES: Mapping[str, Mapping[str, str]] = {
    "usual": {"fake.drift": "0.05", "fake.fail_rate": "0.05"},
    "loud": {
        "fake.run_noise": "0.06", "fake.build_noise": "0.024", "fake.drift": "0.1", "fake.fail_rate": "0.2",
    },
    "barren": {"fake.integer": "2", "fake.drift": "0.05", "fake.fail_rate": "0.05"},
}  # fmt: skip


class MeteredDevice(FakeDevice):
    """A simulated device that measures the processor time of the simulation, and is not used for calibration."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_seconds = 0.0

    def capabilities(self, options: BuildOptions) -> Capabilities:
        """The capabilities without calibration, for which outputs take too long."""
        return replace(super().capabilities(options), observes=False)

    def build(self, model: Path, options: BuildOptions) -> MeteredEngine:  # type: ignore[override]  # the same interface
        """Build with measured processor time."""
        with self.metered():
            return MeteredEngine(super().build(model, options), self)

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Count the processor time of the block as simulation."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.cpu_seconds += time.thread_time() - started


class MeteredEngine:
    """An engine whose calls count as simulation."""

    def __init__(self, engine: FakeEngine, device: MeteredDevice) -> None:
        self.graph_hash = engine.graph_hash
        self._engine = engine
        self._metered = device.metered

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        with self._metered():
            return self._engine.run(feeds)

    def bind(self, feeds: Mapping[str, Array]) -> None:
        with self._metered():
            self._engine.bind(feeds)

    def time(self, runs: int, warmup: int = 0) -> Samples:
        with self._metered():
            return self._engine.time(runs, warmup)

    def layers(self, runs: int = 12) -> tuple[LayerTime, ...]:
        with self._metered():
            return self._engine.layers(runs)

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One search: its result, the claimed ratio of its winner, and the true ratio. Ratios are relative to float."""

    tuned: Tuned
    claimed: Interval
    true: float
    everything: float
    own_seconds: float  # processor time of this process without the simulation

    @property
    def trials(self) -> tuple[Trial, ...]:
        return self.tuned.result.trials

    @property
    def unchanged(self) -> bool:
        return self.tuned.result.unchanged

    @property
    def covered(self) -> bool:
        """Whether the interval contains the true ratio."""
        return self.claimed.low <= self.true <= self.claimed.high


class Truth:
    """The true cost of placements of one model on one device, without noise, relative to float."""

    def __init__(self, prepared: Prepared, words: Mapping[str, str]) -> None:
        self._words = OPTIONS.of(words)
        self._inserter = Inserter(prepared.model, prepared.numbers)
        self._space = prepared.space
        self._reference = self._milliseconds(prepared.given)

    def ratio(self, placement: Placement) -> float:
        if not placement.sites:
            return 1.0
        return self._milliseconds(Model(self._inserter.insert(placement).proto)) / self._reference

    def best(self) -> float:
        """The least ratio found by changing single units and pairs of neighbours, from several starts.

        It may not be the global minimum, but uses thousands of exact costs, whereas a search has dozens of noisy ones.
        """
        starts: list[dict[str, Label]] = [{}, self._space.everything(), self._space.uniform("in-only")]
        return min(map(self._descended, starts))

    def _descended(self, labels: dict[str, Label]) -> float:
        least, before = self.ratio(self._space.resolve(labels)), float("inf")
        while least < before:
            before = least
            for changes in self._changes():
                found = self.ratio(self._space.resolve({**labels, **changes}))
                if found < least:
                    least, labels = found, {**labels, **changes}
        return least

    def _changes(self) -> Iterator[dict[str, Label]]:
        """Other labels for one unit, and for two neighbours in graph order."""
        units = self._space.units
        for one, other in zip(units, (*units[1:], None), strict=True):
            for label in one.labels:
                yield {one.id: label}
                if other is not None:
                    yield {one.id: label, other.id: label if label in other.labels else other.full}

    def _milliseconds(self, model: Model) -> float:
        words = self._words
        return cost_of(model, words.seed, words.scale, words.integer).milliseconds


def prepared(case: Case) -> Prepared:
    """A prepared case for searches on simulated devices, calibrated once."""
    resources = Resources(backend=MeteredDevice(), options=BuildOptions(), settings=Settings(seed=0))
    ready = Prepared(case, load_model(case.model), resources)
    assert ready.space.units, "nothing can be quantized"
    return ready


def with_rules(ready: Prepared, **rules: object) -> Prepared:
    """The prepared case with other rules of the search and the same calibration."""
    other = copy.copy(ready)
    other.case = replace(ready.case, tune=replace(ready.case.tune, **rules))
    other.warnings = []
    return other


def search(ready: Prepared, words: Mapping[str, str], seed: int) -> Outcome:
    """Run one search with this seed, on the device of this seed."""
    words = {**words, "fake.seed": str(seed)}
    device = MeteredDevice()
    work = Resources(
        backend=device,
        options=BuildOptions(extra=words),
        settings=Settings(backend="fake", seed=seed),
    )
    own_device = copy.copy(ready)
    own_device.resources = work
    started = time.process_time()
    with (
        TemporaryDirectory() as folder,
        open_journal(Path(folder), {}, []) as journal,
        Tuning(own_device, journal) as tuning,
    ):
        tuned = tuning.run()
    own = time.process_time() - started - device.cpu_seconds
    truth = Truth(ready, words)
    return Outcome(
        tuned=tuned,
        claimed=tuned.latency.ratios["tuned"],
        true=truth.ratio(tuned.result.winner),
        everything=truth.ratio(ready.space.resolve(ready.space.everything())),
        own_seconds=own,
    )
