"""The effect of a pattern cache on the search of a similar model: builds with it compared with builds without.

    python benchmarks/warm_start.py                          # generated families, deeper and wider, on ONNX Runtime
    python benchmarks/warm_start.py net.onnx other.onnx ...  # pairs of models of one family
    python benchmarks/warm_start.py net.onnx@160             # a model and itself with images of another size
    python benchmarks/warm_start.py --simulated 50           # the families on the simulated device, seeds per row

A teacher is tuned without a cache and writes its `patterns.yaml`; the pupil is tuned once without and once with
`start_from` that file. Builds are search builds until one is as good as the model selected without a cache (within
2 %), and until the search ends. The selected models and all incumbents of both searches are built again and timed
together at the end. Bar: a third.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import families
import numpy as np
import onnx
import simulation
from tabulate import tabulate

from qdqspec._core.config import Settings
from qdqspec.app.evidence.timing import time_files
from qdqspec.app.preparation.files import write_patterns
from qdqspec.app.preparation.stored import PATTERNS
from qdqspec.app.session import Session
from qdqspec.app.session.work import CaseWork
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.types import NOT_CANDIDATES, Case, SearchResult, Trial

NEAR = 1.02  # a time within this factor is as good
SISTERS = {
    "resnet, deeper": (families.resnet(), families.resnet((3, 3, 2))),
    "resnet, wider": (families.resnet(), families.resnet(width=32)),
    "mobilenet, deeper": (families.mobilenet(), families.mobilenet((2, 3, 3))),
    "mobilenet, wider": (families.mobilenet(), families.mobilenet(width=24)),
    "mobilenet, larger pictures": (families.mobilenet(), families.mobilenet(side=64)),
    "transformer, deeper": (families.transformer(), families.transformer(5)),
    "transformer, wider": (families.transformer(), families.transformer(width=96)),
}
HEADERS = (
    "pupil", "device", "units", "cold: reached", "ended", "warm: reached", "ended", "share reached", "share ended",
    "cold / float", "warm / float", "warm / cold",
)  # fmt: skip


class Pair(NamedTuple):
    """A teacher and its pupil, as files."""

    name: str
    teacher: Path
    pupil: Path


class Row(NamedTuple):
    """Builds until the goal and until the end, without and with a cache, and the ratios of both."""

    cold: int | None
    cold_end: int
    warm: int | None
    warm_end: int
    cold_ratio: float
    warm_ratio: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="pairs of models, or MODEL@SIDE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulated", type=int, default=0, metavar="SEEDS")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        for pair in _pairs(arguments.models, Path(folder)):
            if arguments.simulated:
                seeds = range(arguments.seed, arguments.seed + arguments.simulated)
                rows = list(_simulated(pair, seeds, Path(folder)))
            else:
                rows = [_measured(pair, arguments.seed, Path(folder))]
            print(tabulate(rows, HEADERS, floatfmt=".3f"), flush=True)
    return 0


def _pairs(models: Sequence[str], folder: Path) -> Iterator[Pair]:
    if not models:
        for number, (name, protos) in enumerate(SISTERS.items()):
            paths = folder / f"teacher{number}.onnx", folder / f"pupil{number}.onnx"
            for proto, path in zip(protos, paths, strict=True):
                onnx.save(proto, path)
            yield Pair(name, *paths)
    waiting = list(models)
    while waiting:
        first, _, side = waiting.pop(0).partition("@")
        teacher = Path(first).absolute()
        pupil = _resized(teacher, int(side), folder) if side else Path(waiting.pop(0)).absolute()
        yield Pair(pupil.stem, teacher, pupil)


def _resized(path: Path, side: int, folder: Path) -> Path:
    """Write the network for images of another size, which needs a network without constant shapes."""
    model = onnx.load(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in weights:
            for dim in value.type.tensor_type.shape.dim[2:]:
                dim.dim_value = side
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    target = folder / f"{path.stem}_{side}.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(model, strict_mode=True), target)
    return target


def _reached(trials: Sequence[Trial], ratio: Callable[[Trial], float], goal: float) -> int | None:
    """The number of search builds until one is as good as the goal."""
    builds = [trial for trial in trials if trial.phase not in NOT_CANDIDATES]
    return next((number for number, t in enumerate(builds, 1) if t.ok and ratio(t) <= NEAR * goal), None)


# ---- on ONNX Runtime ----------------------------------------------------------------------------


def _measured(pair: Pair, seed: int, folder: Path) -> tuple[object, ...]:
    teacher, cold, warm = (folder / pair.name / role for role in ("teacher", "cold", "warm"))
    with closing(_session(teacher, seed)) as session:
        session.search(Case(id="default", model=pair.teacher))
    start = Case(id="default", model=pair.pupil)
    with closing(_session(cold, seed)) as one, closing(_session(warm, seed)) as other:
        first = one.search(start)
        warm_case = replace(start, tune=replace(start.tune, start_from=(teacher / PATTERNS,)))
        second = other.search(warm_case)
        ratios = _ratios_together(one.work(start), (first, second), folder)
    goal = ratios[first.winner.digest]
    row = Row(
        _reached(first.trials, lambda t: ratios.get(t.placement.digest, math.inf), goal),
        first.total,
        _reached(second.trials, lambda t: ratios.get(t.placement.digest, math.inf), goal),
        second.total,
        goal,
        ratios[second.winner.digest],
    )
    return _line(pair.name, "onnxruntime", first.blocks, [row])


def _ratios_together(work: CaseWork, results: Sequence[SearchResult], folder: Path) -> dict[str, float]:
    """Ratios to float, by digest, of the winners and incumbents of both searches, built again and timed together."""
    prepared = work.prepared
    placements = {
        placement.digest: placement
        for result in results
        for placement in (*(t.placement for t in result.trials if t.incumbent), result.winner)
    }
    files = {}
    for digest, placement in placements.items():
        files[digest] = folder / f"{digest}.onnx"
        inserted = insert_qdq(prepared.model, placement, prepared.numbers)
        save_model(inserted.proto, files[digest], base=prepared.case.model.parent)
    roles = {**files, "reference": prepared.case.model, "tuned": files[results[0].winner.digest]}
    measured = time_files(work.prepared.resources, roles, prepared.loads, prepared.case.tune)
    return {digest: measured.ratios[digest].median for digest in files}


def _session(folder: Path, seed: int) -> Session:
    return Session(Settings(output=folder, cache_dir=folder / "cache", seed=seed, layout=""))


# ---- simulated ----------------------------------------------------------------------------------


def _simulated(pair: Pair, seeds: range, folder: Path) -> Iterator[tuple[object, ...]]:
    teacher, pupil = (simulation.prepared(Case(id="default", model=p)) for p in (pair.teacher, pair.pupil))
    cache = folder / PATTERNS
    for device, words in simulation.DEVICES.items():
        rows = []
        for seed in seeds:
            taught = simulation.search(teacher, words, seed)
            write_patterns(teacher, taught.tuned.result, taught.tuned.intervals, cache)
            cold = simulation.search(pupil, words, seed)
            warm = simulation.search(simulation.with_rules(pupil, start_from=(cache,)), words, seed)
            truth = simulation.Truth(pupil, {**words, "fake.seed": str(seed)})

            def ratio(trial: Trial, truth: simulation.Truth = truth) -> float:
                return truth.ratio(trial.placement)

            counts = (
                number
                for one in (cold, warm)
                for number in (_reached(one.trials, ratio, cold.true), one.tuned.result.total)
            )
            rows.append(Row(*counts, cold.true, warm.true))
        yield _line(pair.name, device, len(pupil.space.units), rows)


def _line(name: str, device: str, units: int, rows: Sequence[Row]) -> tuple[object, ...]:
    """Means over seeds; builds until the goal are counted only if both searches reached it."""
    both = [(row.cold, row.warm) for row in rows if row.cold and row.warm]
    cold, warm = (np.mean([pair[i] for pair in both]) if both else float("nan") for i in (0, 1))
    ends = np.mean([row.cold_end for row in rows]), np.mean([row.warm_end for row in rows])
    ratios = [np.exp(np.mean(np.log([row[i] for row in rows]))) for i in (4, 5)]
    return (
        name, device, units, f"{cold:.1f}", f"{ends[0]:.1f}", f"{warm:.1f}", f"{ends[1]:.1f}",
        f"{warm / ends[0]:.2f}", f"{ends[1] / ends[0]:.2f}", *ratios, ratios[1] / ratios[0],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
