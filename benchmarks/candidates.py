"""The time to create one candidate: ``python benchmarks/candidates.py``.

All units of a residual network with distinct weights for every Conv are quantized, for two sizes of the weights.
Creating a candidate consists of three steps: labels to sites (`SchemeSpace.resolve`), sites to a model
(`Inserter.insert`), model to a file. The first candidate also computes all scales and integer weights, which a search
does once for each site. Later candidates alternate between all units and random halves of them, so that each differs
from the previous one. Bar: 300 ms for a later candidate at 20,000 nodes, for any size of the weights. Times are CPU
times of the thread, best and median; the wall time includes other work of the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tabulate import tabulate

from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.storage import WeightStore, save_model
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Label

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

HEADERS = (
    "nodes", "weights MB", "sites", "first ms", "next ms", "median ms", "wall ms", "resolve", "insert", "write",
    "file MB", "bar",
)  # fmt: skip


def residual(size: int, weight_bytes: int) -> onnx.ModelProto:
    """Conv > Relu > Conv > Add > Relu blocks with approximately this total size of weights."""
    convs = 2 * -(-size // 5)
    channels = max(1, round((weight_bytes / 4 / convs) ** 0.5))
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"

    def op(op_type: str, *inputs: str) -> str:
        nodes.append(helper.make_node(op_type, inputs, [f"t{len(nodes)}"], f"n{len(nodes)}"))
        return nodes[-1].output[0]

    def conv(x: str) -> str:
        values = rng.standard_normal((channels, channels, 1, 1), np.float32)
        weights.append(numpy_helper.from_array(values, f"w{len(weights)}"))
        return op("Conv", x, weights[-1].name)

    while len(nodes) < size:
        x = op("Relu", op("Add", conv(op("Relu", conv(x))), x))
    shape = [1, channels, 4, 4]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", x)]
    graph = helper.make_graph(nodes, "residual", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Maker:
    """Creates candidates of a model as a search does."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.folder = folder
        self.space = SchemeSpace(model, OnnxRuntime().capabilities())
        from random_models import ranges_for

        numbers = Quantizer(model, ranges_for(model), biases=self.space.bias_sources)
        store = WeightStore(folder, base=model.path.parent if model.path else None)
        self.inserter = Inserter(model, numbers, store=store)

    def make(self, labels: Mapping[str, Label], name: str) -> tuple[list[float], float, int]:
        """CPU milliseconds of the three steps, wall milliseconds of all, and the number of sites."""
        wall, marks = time.perf_counter(), [time.thread_time()]
        placement = self.space.resolve(labels)
        marks.append(time.thread_time())
        inserted = self.inserter.insert(placement)
        marks.append(time.thread_time())
        save_model(inserted.proto, self.folder / name)
        marks.append(time.thread_time())
        steps = [1000 * (b - a) for a, b in pairwise(marks)]
        return steps, 1000 * (time.perf_counter() - wall), len(placement.sites)


def row(nodes: int, megabytes: int, repeat: int) -> tuple[object, ...]:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(residual(nodes, megabytes * 10**6), folder / "model.onnx")
        (folder / "work").mkdir()
        model = load_model(folder / "model.onnx")
        maker = Maker(model, folder / "work")
        everything = maker.space.everything()
        first, _, sites = maker.make(everything, "first.onnx")
        lots = random.Random(0)
        for half in range(repeat):  # after this, every label was resolved once
            maker.make(_half(everything, lots), f"warm{half}.onnx")
        made = [
            maker.make(everything if i % 2 else _half(everything, lots), f"{i}.onnx") for i in range(repeat)
        ]
        full = [one for one in made if one[2] == sites]
        best = min(full, key=lambda one: sum(one[0]))
        written = (folder / "work" / "1.onnx").stat().st_size / 1e6
    totals = [sum(steps) for steps, _, _ in full]
    verdict = "ok" if min(totals) <= 300 else "MISSED"
    middle = statistics.median(totals), statistics.median(wall for _, wall, _ in full)
    return (len(model.nodes), megabytes, sites, sum(first), min(totals), *middle, *best[0], written, verdict)


def _half(labels: Mapping[str, Label], lots: random.Random) -> dict[str, Label]:
    return {unit: label for unit, label in labels.items() if lots.random() < 0.5}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 5000, 20_000])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 500])
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    rows = [row(nodes, mb, arguments.repeat) for nodes in arguments.nodes for mb in arguments.megabytes]
    print(tabulate(rows, HEADERS, floatfmt=".1f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
