"""The cost of a search in runs of the float model: ``python benchmarks/cost.py MODEL... [--trials N]``.

Searches each model as ``qdqspec tune`` does, with data from ``MODEL_calibration.npz`` and ``MODEL_evaluation.npz``
beside it if they exist, and adds up the duration of calls of engines by purpose: *noise* (variation between builds),
*screening* (of a new engine, including warm-up), *profile*, accuracy of builds on *few samples* and on *all data*,
*parity* of the selected model, *calibration*, *corrections*, *rehearsal*, *races*, *confirmation*, *builds*. *Own* is
the processor time of this process. One float run is the median of the runs of the reference in the confirmation. The
machine must be idle: other work makes calls longer. ``untimed`` is the share of warm-up in the runs of noise,
screening, races and confirmation.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from qdqspec import Session
from qdqspec.accuracy.evaluator import Evaluator
from qdqspec.accuracy.predict import RehearsalOracle
from qdqspec.accuracy.rehearsal import Rehearsal
from qdqspec.app.evidence.parity import SideBySide
from qdqspec.app.preparation import prepare
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.backends import open_engines
from qdqspec.backends.open_engines import Engines
from qdqspec.timing.bench import Bench

KINDS = (
    "calibration", "corrections", "rehearsal", "noise", "screening", "profile", "few samples", "all data", "parity",
    "races", "confirmation", "builds",
)  # fmt: skip
METHODS = {
    (Bench, "measure_variation"): "noise",
    (Bench, "compare"): "confirmation",
    (Bench, "race"): "races",
    (Prepared, "tensor_ranges"): "calibration",
    (prepare, "find_case_corrections"): "corrections",
    (Evaluator, "__call__"): "all data",
    (SideBySide, "reference"): "parity",
    (SideBySide, "tuned"): "parity",
    (SideBySide, "_computed"): "parity",
    (Rehearsal, "__init__"): "rehearsal",
    (Engines, "run"): "rehearsal",
    (RehearsalOracle, "noise"): "rehearsal",
    (RehearsalOracle, "block_errors"): "rehearsal",
}
WHOLE = (
    "calibration",
    "corrections",
    "rehearsal",
    "all data",
    "parity",
)  # all calls of engines within these methods count as theirs
CALLS = {"time": "screening", "layers": "profile", "run": "few samples", "build": "builds"}


@dataclass(slots=True)
class Meter:
    """Seconds by kind, and how many runs were timed and how many were warm-up."""

    seconds: Counter[str] = field(default_factory=Counter)
    timed: int = 0
    untimed: int = 0
    kind: str = ""  # the kind of the current method of the bench

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Add the time of the block to the kind of this call of an engine."""
        kind = self.kind if self.kind in WHOLE or (self.kind and name == "time") else CALLS[name]
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[kind] += time.monotonic() - started

    def of(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, whose time counts as this kind."""

        @functools.wraps(method)
        def counted(*given: Any, **named: Any) -> Any:
            before = self.kind
            self.kind = before if before in WHOLE else kind
            try:
                return method(*given, **named)
            finally:
                self.kind = before

        return counted


class MeteredEngine:
    """An engine whose calls are measured."""

    def __init__(self, engine: Any, meter: Meter) -> None:
        self._engine, self._meter = engine, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, feeds: Mapping[str, Any]) -> Any:
        with self._meter.call("run"):
            return self._engine.run(feeds)

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Any:
        self._meter.timed += runs
        self._meter.untimed += warmup
        with self._meter.call("time"):
            return self._engine.time(runs, warmup, profile)

    def layers(self, *given: Any, **named: Any) -> Any:
        with self._meter.call("layers"):
            return self._engine.layers(*given, **named)


class MeteredBackend:
    """A backend whose builds and engines are measured."""

    def __init__(self, backend: Any, meter: Meter) -> None:
        self._backend, self._meter = backend, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def build(self, model: Path, options: Any) -> MeteredEngine:
        with self._meter.call("build"):
            return MeteredEngine(self._backend.build(model, options), self._meter)


def cost_of(model: Path, **asked: Any) -> tuple[Any, ...]:
    """One row of the table."""
    meter = Meter()
    open_engines.own_cores = lambda: 1  # calls of engines have a kind only if one runs at a time
    for (owner, name), kind in METHODS.items():
        setattr(owner, name, meter.of(kind, ORIGINALS[owner, name]))
    for name in ("calibration", "evaluation"):
        data = model.with_name(f"{model.stem}_{name}.npz")
        if data.is_file():
            asked[name] = data
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        with Session(output=home / "reports", cache_dir=home / "cache") as session:
            session.runtime().backend = MeteredBackend(session.runtime().backend, meter)
            started = time.process_time()
            result = session.tune(model, **asked)
            search = result.search
            own = time.process_time() - started
            one = statistics.median(result.latency.samples["reference"].cpu_ms) / 1e3
    spent = [meter.seconds[kind] / one for kind in KINDS]
    spent.append(own / one)
    races = [t.race for t in search.trials if t.race and t.race.verdict != "same graph"]
    pairs = sum(race.pairs for race in races) / max(1, len(races))
    wins = sum(trial.incumbent for trial in search.trials)
    untimed = meter.untimed / max(1, meter.timed + meter.untimed)
    speed = result.speedup.median
    return (
        model.stem, 1e3 * one, search.built, wins, pairs, *spent, sum(spent), f"{untimed:.0%}", speed,
    )  # fmt: skip


ORIGINALS = {(owner, name): getattr(owner, name) for owner, name in METHODS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--min-sqnr-db", type=float)
    given = vars(parser.parse_args())
    models = given.pop("models")
    asked = {name: value for name, value in given.items() if value is not None}
    heads = ("model", "ms", "built", "wins", "pairs a race", *KINDS, "own", "all", "untimed", "speed-up")
    for model in models:
        print(tabulate([cost_of(model, **asked)], heads, tablefmt="pipe", floatfmt=".4g"), flush=True)


if __name__ == "__main__":
    main()
