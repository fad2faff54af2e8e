"""The regression gate on the real runtime: ``python benchmarks/gate_real.py [MODEL]``.

The model is tuned, a baseline of the tuned model is measured, and three models are gated against it: the same model,
the same model again, and the model with additional work of about 10 % of its time. The first two must pass and the
last must fail.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
from gate import ROLES, baseline_of, gate_once
from onnx import TensorProto, helper

from qdqspec.app.evidence.baselines import Entry
from qdqspec.app.evidence.regression import CLOSE_BUILDS
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.checks.kinds.regression import judge_change
from qdqspec.timing.bench import Bench
from qdqspec.timing.race import Load
from qdqspec.types import Case, TuneRules

MODEL = Path(__file__).parents[1] / "specs" / "models" / "squeezenet10.onnx"
ALLOWED, ADDED = 0.05, 0.10
Feed = dict[str, np.ndarray]


def main() -> None:
    given = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else MODEL
    with tempfile.TemporaryDirectory() as name, closing(Isolated("onnxruntime")) as backend:
        tuned, feed = tuned_model(given, Path(name)), feed_of(given)
        unchanged = bench_of(backend, feed, given, tuned)
        known = baseline_of(unchanged)
        print(f"baseline: tuned / reference {known.ratio.median:.3f}\n")
        print("| tuned model | outcome | change (95 %) | looks |\n|---|---|---|---|")
        say("the same", unchanged, known)
        say("the same again", unchanged, known)
        changed = bench_of(backend, feed, given, slower(backend, tuned, feed))
        say(f"with about {100 * ADDED:.0f} % of work added", changed, known)


def bench_of(backend: Isolated, feed: Feed, reference: Path, tuned: Path) -> Bench:
    """A bench that times two model files interleaved."""
    files = {ROLES["reference"].digest: reference, ROLES["tuned"].digest: tuned}
    return Bench(
        backend,
        lambda placement: files[placement.digest],
        (Load(feeds=feed),),
        clock="cpu",
        random=np.random.default_rng(0),
        options=BuildOptions(threads=1),
    )


def say(title: str, bench: Bench, known: Entry) -> None:
    """Gate once and print a row."""
    change, number = gate_once(bench, known, ALLOWED)
    low, median, high = (
        100 * (factor - 1) for factor in (change.builds.low, change.builds.median, change.builds.high)
    )
    moved = f"{median:+.1f} % ({low:+.1f} % to {high:+.1f} %)"
    print(f"| {title} | {judge_change(change, ALLOWED)} | {moved} | {number} |", flush=True)


def tuned_model(given: Path, folder: Path) -> Path:
    """The model selected by a short search."""
    case = Case(id="default", model=given, tune=TuneRules(trials=6))
    with closing(Session(output=folder / "reports", cache_dir=folder / "cache", no_cache=True)) as session:
        session.search(case)
        return session.output(case) / "tuned.onnx"


def feed_of(given: Path) -> Feed:
    """Random values for the model's inputs; unknown dimensions are 8."""
    graph = onnx.load(given).graph
    weights = {tensor.name for tensor in graph.initializer}
    random = np.random.default_rng(0)
    return {
        value.name: random.random(
            [dim.dim_value or 8 for dim in value.type.tensor_type.shape.dim], dtype=np.float32
        )
        for value in graph.input
        if value.name not in weights
    }


def slower(backend: Isolated, tuned: Path, feed: Feed) -> Path:
    """The model with additional elementwise work, which takes the share `ADDED` longer.

    The amount is found by timing the model with a known amount of work, and again with the computed amount.
    """
    size = 1 << 14
    for _ in range(2):
        timed = bench_of(backend, feed, tuned, with_work(tuned, feed, size)).compare(
            ROLES, builds=CLOSE_BUILDS
        )
        size = int(size * ADDED / (timed.ratios["tuned"].median - 1))
    return with_work(tuned, feed, size)


def with_work(tuned: Path, feed: Feed, size: int) -> Path:
    """The model with eight Erf over the first values of its input, repeated to ``size`` values."""
    model = onnx.load(tuned)
    name, value = next(iter(feed.items()))
    repeats = -(-size // value.size)
    constants = {
        "work_flat": np.array([-1]),
        "work_repeats": np.array([repeats]),
        "work_start": np.array([0]),
        "work_end": np.array([size]),
    }
    for constant, numbers in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers.astype(np.int64), constant))
    model.graph.node.extend(
        [
            helper.make_node("Reshape", [name, "work_flat"], ["work_row"]),
            helper.make_node("Tile", ["work_row", "work_repeats"], ["work_rows"]),
            helper.make_node("Slice", ["work_rows", "work_start", "work_end"], ["work_0"]),
            *(helper.make_node("Erf", [f"work_{step}"], [f"work_{step + 1}"]) for step in range(8)),
        ]
    )
    model.graph.output.append(helper.make_tensor_value_info("work_8", TensorProto.FLOAT, [size]))
    path = tuned.with_name(f"slower-{size}.onnx")
    onnx.save(model, path)
    return path


if __name__ == "__main__":
    main()
