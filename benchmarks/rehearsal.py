"""The cost of a rehearsal, and its error in predicting the accuracy of built models.

    python benchmarks/rehearsal.py MODEL.onnx DATA.npz [MODEL.onnx DATA.npz ...] [--placements 20] [--samples 8]

Each model is measured on the first samples of the data, in one process with one thread. Printed are the seconds of
processor time to open the rehearsal and to measure the sensitivities of all pairs; the time of a run of the rehearsal
relative to a run of the float model without optimization; for random placements rehearsed and built (ONNX Runtime, all
optimizations) the differences of their SQNR in dB; and the sum of the noise of single pairs compared with the rehearsed
noise, without the worst pairs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from tabulate import tabulate

from qdqspec.accuracy.evaluator import SAMPLES, Evaluator
from qdqspec.accuracy.rehearsal import Rehearsal, Runtime, find_sensitivities
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import unfused
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.storage import WeightStore, save_model
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.switches import sites_of
from qdqspec.types import Case, Inputs, Placement

COSTS = ("model", "switches", "open s", "sensitivities s", "float ms", "off / float", "on / float")
PREDICTED = ("model", "placements", "SQNR dB", "median difference", "95 %", "within 1 dB")
LEFT_OUT = (0, 10, 20, 40, 80)
PLAIN, RUNS = BuildOptions(), 7


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", type=Path, help="models, each followed by its data")
    parser.add_argument("--placements", type=int, default=20)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    costs, predicted, added = [], [], []
    for model, data in zip(arguments.what[::2], arguments.what[1::2], strict=True):
        with tempfile.TemporaryDirectory() as folder, Session(root=Path(folder)) as session:
            case = Case(id="default", model=model.absolute(), inputs=Inputs(calibration=data.absolute()))
            prepared = session.work(case).prepared
            with _opened(prepared, arguments.samples) as (rehearsal, seconds):
                found, sensing = _timed(lambda: find_sensitivities(rehearsal))
                costs.append(_costs(model, rehearsal, seconds, sensing))
                added += _added(model.stem, rehearsal, found, prepared)
                placements = list(_drawn(prepared, arguments.placements, arguments.seed))
                predicted.append(_compared(model.stem, prepared, rehearsal, placements, Path(folder)))
    print(tabulate(costs, COSTS, floatfmt=".2f"))
    print("\n" + tabulate(predicted, PREDICTED, floatfmt=".2f"))
    heads = ("model", "without the worst", "sum of noise dB", "rehearsed dB", "rehearsed at the outputs dB")
    print("\n" + tabulate(added, heads, floatfmt=".1f"))
    return 0


class _opened:  # noqa: N801 - used as a function
    """The rehearsal of a case, and the processor time to open it."""

    def __init__(self, prepared: Prepared, samples: int) -> None:
        backend = OnnxRuntime()
        runtime = Runtime(
            exact=lambda path: backend.build(path, unfused(PLAIN)),
            fast=lambda path: backend.build(path, PLAIN),
        )
        given = prepared.model, sites_of(prepared.space), prepared.numbers, prepared.data.feeds, runtime
        rounded = prepared.capabilities.rounds_biases
        self._rehearsal, self._seconds = _timed(
            lambda: Rehearsal(*given, samples=samples, rounds_biases=rounded)
        )

    def __enter__(self) -> tuple[Rehearsal, float]:
        return self._rehearsal, self._seconds

    def __exit__(self, *_: object) -> None:
        self._rehearsal.close()


def _timed(do: Callable[[], object]) -> tuple:
    started = time.process_time()
    return do(), time.process_time() - started


def _ms(do: Callable[[], object]) -> float:
    """The median of a few runs, thread CPU time."""
    spent = []
    for _ in range(RUNS):
        started = time.thread_time()
        do()
        spent.append(1e3 * (time.thread_time() - started))
    return float(np.median(spent))


def _costs(path: Path, rehearsal: Rehearsal, opening: float, sensing: float) -> list:
    feed = next(rehearsal.feeds())
    count = len(rehearsal.switches)
    with closing(OnnxRuntime().build(path.absolute(), unfused(PLAIN))) as engine:
        floats = _ms(lambda: engine.run(feed))
    off = _ms(lambda: next(rehearsal.values_each([(np.zeros(count, np.bool_), feed)])))
    on = _ms(lambda: next(rehearsal.values_each([(np.ones(count, np.bool_), feed)])))
    return [path.stem, count, opening, sensing, floats, off / floats, on / floats]


def _drawn(prepared: Prepared, count: int, seed: int) -> Iterator[Placement]:
    """Placements with 5 to 100 % of the units quantized, labels at random."""
    random, space = np.random.default_rng(seed), prepared.space
    for share in np.geomspace(0.05, 1, count):
        chosen = [unit for unit in space.units if random.random() < share] or [space.units[0]]
        yield space.resolve({unit.id: str(random.choice(unit.labels[1:])) for unit in chosen})


def _compared(
    name: str, prepared: Prepared, rehearsal: Rehearsal, placements: list[Placement], folder: Path
) -> list:
    """SQNR at the worst output, rehearsed and built; candidates that cannot be built are omitted."""
    base = prepared.given.path.parent
    inserter = Inserter(prepared.model, prepared.numbers, store=WeightStore(folder, base=base))
    samples = rehearsal.samples
    evaluator = Evaluator(
        list(prepared.data.feeds()), lambda: OnnxRuntime().build(prepared.given.path, PLAIN), samples
    )
    rehearsed, built = [], []
    for placement in placements:
        path = folder / f"{placement.digest}.onnx"
        save_model(inserter.insert(placement).proto, path)
        with closing(OnnxRuntime().build(path, PLAIN)) as engine:
            built.append(evaluator(engine))
        rehearsed.append(rehearsal.error(placement).sqnr_db)
        print(f"{name}: rehearsed {rehearsed[-1]:.2f} dB, built {built[-1]:.2f} dB", flush=True)
    apart = np.abs(np.array(rehearsed) - np.array(built))
    span = f"{min(built):.1f} to {max(built):.1f}"
    return [name, len(built), span, np.median(apart), np.percentile(apart, 95), float((apart <= 1).mean())]


def _added(name: str, rehearsal: Rehearsal, found: np.ndarray, prepared: Prepared) -> Iterator[list]:
    """Full quantization without the worst edges: predicted from single edges, and rehearsed."""
    sites = prepared.space.resolve(prepared.space.everything()).ordered
    numbers = [number for site in sites for number in rehearsal.switches.numbers(site)]
    falling = sorted(numbers, key=lambda number: -found[number].max())
    for left in LEFT_OUT:
        if left < len(falling):
            some = Placement(sites=frozenset(rehearsal.switches[number] for number in falling[left:]))
            error = rehearsal.error(some)
            summed_db = -10 * np.log10(found[falling[left:]].sum(axis=0).max())
            yield [name, left, summed_db, error.guiding_db, error.sqnr_db]


if __name__ == "__main__":
    raise SystemExit(main())
