"""Compares the speed-up that qdqspec reports with what a program measures that uses the two models.

    qdqspec tune model.onnx -o results/model                  # leaves reference.onnx and tuned.onnx
    python benchmarks/claims.py results --repeats 3           # every folder of `results` that has both files
    python benchmarks/claims.py results --models ../models/squeezenet10.onnx --super-resolution   # tunes these first

A *claim* is `qdqspec.measure(reference, tuned)`: the measurement that confirms a search. Beside it
`benchmarks/independent.py` times the same files with plain `InferenceSession.run` in two ways: *in a row*, five runs of
one model at a time, and *alternating*, single runs of both models in turn, so that each finds the caches as the
other left them. Both are taken once with nothing planted and once beside processes that copy memory all the time, one
for every other core. Bars: the median of the deviations within 3 %, and 95 of 100 independent figures inside the
claimed intervals. An independent figure has noise of its own, which counts against the claim here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from independent import Feed, Interval, time_models
from onnx import TensorProto, helper, numpy_helper
from tabulate import tabulate

import qdqspec

CLI = "from qdqspec.cli import main; raise SystemExit(main())"
WAYS = {"in a row": 5, "alternating": 1}  # runs of one model at a time
ROUNDS = {"in a row": 12, "alternating": 40}
UNKNOWN_DIMENSION = 8
COPIED_BYTES = 48 << 20  # more than a last-level cache holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim beside one independent figure, both reference over tuned."""

    model: str
    load: str
    way: str
    claimed: Interval
    measured: Interval

    @property
    def deviation(self) -> float:
        """How far the claim is above what was measured, as a share."""
        return self.claimed.median / self.measured.median - 1

    @property
    def is_inside(self) -> bool:
        """Whether the claimed interval has the independent figure in it."""
        return self.claimed.low <= self.measured.median <= self.claimed.high


def main() -> int:
    """Measure all folders, print the table, and return 1 where a bar is missed."""
    arguments = _arguments()
    _tune_missing(arguments)
    folders = sorted(file.parent for file in arguments.results.glob("*/tuned.onnx"))
    rows = []
    for folder in folders:
        for load in arguments.loads:
            with planted(load):
                for _ in range(arguments.repeats):
                    rows += _rows(folder, load)
                    print(_table(rows[-len(WAYS) :]).splitlines()[-1], flush=True)
    print(_table(rows))
    return _judge(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="folder of folders with reference.onnx and tuned.onnx")
    parser.add_argument(
        "--models", type=Path, nargs="*", default=[], help="tune these where no folder is there"
    )
    parser.add_argument("--super-resolution", action="store_true", help="make and tune such a model as well")
    parser.add_argument("--minutes", type=float, default=2, help="for each search")
    parser.add_argument("--repeats", type=int, default=2, help="claims for each model and load")
    parser.add_argument("--loads", nargs="*", default=["none", "memory"], choices=["none", "memory"])
    return parser.parse_args()


def _tune_missing(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        models = list(arguments.models)
        if arguments.super_resolution:
            models.append(super_resolution(Path(scratch) / "super_resolution.onnx"))
        for model in models:
            folder = arguments.results / model.stem
            if not (folder / "reference.onnx").is_file():
                words = ["tune", str(model), "-o", str(folder), "--minutes", str(arguments.minutes)]
                subprocess.run([sys.executable, "-c", CLI, *words], check=False)


def _rows(folder: Path, load: str) -> list[Row]:
    files = {"reference": folder / "reference.onnx", "tuned": folder / "tuned.onnx"}
    claimed = _claim(files["reference"], files["tuned"])
    feed = feed_of(files["reference"])
    rows = []
    for way, visit in WAYS.items():
        timing = time_models(files, feed, rounds=ROUNDS[way], visit=visit)
        found = timing.ratio("reference", "tuned")
        rows.append(Row(model=folder.name, load=load, way=way, claimed=claimed, measured=found))
    return rows


def _claim(reference: Path, tuned: Path) -> Interval:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        found = qdqspec.measure(reference, tuned, output=home / "reports", cache_dir=home / "cache").speedup
    return Interval(median=found.median, low=found.low, high=found.high)


# ---- what is measured, and beside what ----------------------------------------------------------


@contextmanager
def planted(load: str) -> Iterator[None]:
    """Processes that use every other core, its cache and the memory's bandwidth, while the block runs."""
    count = max(1, (os.cpu_count() or 2) - 1) if load == "memory" else 0
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_copy_for_ever, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _copy_for_ever() -> None:
    one = np.ones(COPIED_BYTES, np.uint8)
    other = np.empty_like(one)
    while True:
        other[:] = one
        one[:] = other


def feed_of(path: Path) -> Feed:
    """Random floats, or ones where integers are asked for; unknown dimensions are 8."""
    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    random = np.random.default_rng(0)
    feed = {}
    for value in graph.input:
        if value.name in weights:
            continue
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [dim.dim_value or UNKNOWN_DIMENSION for dim in value.type.tensor_type.shape.dim]
        is_float = np.issubdtype(kind, np.floating)
        feed[value.name] = (random.random(shape) if is_float else np.ones(shape)).astype(kind)
    return feed


def super_resolution(path: Path) -> Path:
    """A network with large activations: four convolutions at 224 x 224 and a threefold upscaling, seeded weights."""
    random = np.random.default_rng(0)
    nodes, weights, tensor = [], [], "x"
    for number, (inputs, outputs, size) in enumerate([(1, 64, 5), (64, 64, 3), (64, 32, 3), (32, 9, 3)]):
        scale = np.sqrt(2 / (inputs * size * size))
        kernel = (scale * random.standard_normal((outputs, inputs, size, size))).astype(np.float32)
        bias = (0.01 * random.standard_normal(outputs)).astype(np.float32)
        weights += [
            numpy_helper.from_array(kernel, f"w{number}"),
            numpy_helper.from_array(bias, f"b{number}"),
        ]
        names = [tensor, f"w{number}", f"b{number}"]
        nodes.append(helper.make_node("Conv", names, [f"c{number}"], f"conv{number}", pads=[size // 2] * 4))
        tensor = f"c{number}"
        if number < 3:
            nodes.append(helper.make_node("Relu", [tensor], [f"r{number}"], f"relu{number}"))
            tensor = f"r{number}"
    nodes.append(helper.make_node("DepthToSpace", [tensor], ["y"], "upscale", blocksize=3, mode="CRD"))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, side, side])
        for name, side in (("x", 224), ("y", 672))
    ]
    graph = helper.make_graph(nodes, "super_resolution", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


# ---- what is printed ----------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> str:
    heads = ("model", "load", "independent", "claimed", "interval", "measured", "deviation", "inside")
    return tabulate([_cells(row) for row in rows], heads, tablefmt="pipe", disable_numparse=True)


def _cells(row: Row) -> tuple[str, ...]:
    claimed = row.claimed
    return (
        row.model,
        row.load,
        row.way,
        f"{claimed.median:.3f}",
        f"{claimed.low:.3f} to {claimed.high:.3f}",
        f"{row.measured.median:.3f}",
        f"{100 * row.deviation:+.1f} %",
        "yes" if row.is_inside else "no",
    )


def _judge(rows: Sequence[Row]) -> int:
    """Print both bars; 1 where one is missed."""
    away = float(np.median([abs(row.deviation) for row in rows]))
    inside = sum(row.is_inside for row in rows)
    print(f"\nmedian deviation {100 * away:.1f} %, {inside} of {len(rows)} inside the claimed interval")
    return int(away > 0.03 or inside < 0.95 * len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
