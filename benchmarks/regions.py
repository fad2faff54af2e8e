"""The growth of the time of region discovery with the size of the model: ``python benchmarks/regions.py``.

Prints seconds and microseconds per node on seven families of graphs, and the growth exponent of each family (slope of
log seconds over log nodes), over all sizes and over the three largest, where caches of the processor have an effect.
Bars: 1.1, and one second at 20,000 nodes. Shape inference, which is done once for each model, is timed separately.
Times are CPU times of the thread: the search runs in one thread without waiting, so other work on the machine does not
count.

``--verbs`` measures the commands on a model instead: the CPU time of a process and its children, best of ``--repeat``,
minus that of the same command on a model of 20 nodes. The model is a residual network; the tuned one has all pairs.
`explain` and `verify` build engines in child processes; the time of the command alone is printed as well.

``--inspect`` measures `inspect` of three families, for two backends: user CPU time of the command in new processes,
best and median of five. Bars: 2 s at 20,000 nodes, 20 s at 200,000.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import candidates
import onnx
from onnx import TensorProto, helper
from tabulate import tabulate

from qdqspec.graph.model import Model
from qdqspec.graph.regions.search import find_regions


class Net:
    """A model under construction; its methods return the name of the output tensor."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4, 1, 1], [0.1] * 16)
        matrix = helper.make_tensor("m", TensorProto.FLOAT, [4, 4], [0.1] * 16)
        self.weights = [weight, matrix]

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, **attributes))
        return names[0]

    def model(self, last: str, shape: list[int]) -> Model:
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(last, TensorProto.FLOAT, None)],
            self.weights,
        )
        return Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def residual(size: int) -> Model:
    net, x = Net(), "x"
    while len(net.nodes) < size:
        y = net.op("Conv", net.op("Relu", net.op("Conv", x, "w")), "w")
        x = net.op("Relu", net.op("Add", y, x))
    return net.model(x, [1, 4, 8, 8])


def chain(size: int) -> Model:
    net, x = Net(), "x"
    while len(net.nodes) < size:
        x = net.op("Relu", net.op("Conv", x, "w"))
    return net.model(x, [1, 4, 8, 8])


def clips(size: int) -> Model:
    net, x = Net(), "x"
    while len(net.nodes) < size:
        low = net.op("Constant", value_float=0.0)
        high = net.op("Constant", value_float=6.0)
        x = net.op("Clip", net.op("Conv", x, "w"), low, high)
    return net.model(x, [1, 4, 8, 8])


def nested_splits(size: int) -> Model:
    """Nested Splits: the second half of each is split again, and all halves are joined in reverse order."""
    net, x, waiting = Net(), "x", []
    while 2 * len(net.nodes) < size:
        half = net.op("Split", net.op("Conv", x, "w"), outputs=2, axis=1)
        waiting.append(half)
        x = net.op("Concat", half.replace("_0", "_1"), half.replace("_0", "_1"), axis=1)
    for half in reversed(waiting):
        x = net.op("Add", x, net.op("Concat", half, half, axis=1))
        x = net.op("Relu", x)
    return net.model(x, [1, 4, 8, 8])


def split_blocks(size: int) -> Model:
    """Consecutive split blocks, as in ShuffleNet."""
    net, x = Net(), "x"
    while len(net.nodes) < size:
        half = net.op("Split", x, outputs=2, axis=1)
        other = net.op("Relu", half.replace("_0", "_1"))
        x = net.op("Conv", net.op("Concat", half, other, axis=1), "w")
    return net.model(x, [1, 4, 8, 8])


def dense(size: int) -> Model:
    """The outputs of all layers are inputs of one Concat at the end."""
    net, x, seen = Net(), "x", []
    while len(net.nodes) < size - 1:
        x = net.op("Relu", net.op("Conv", x, "w"))
        seen.append(x)
    return net.model(net.op("Concat", *seen, axis=1), [1, 4, 8, 8])


def attention(size: int) -> Model:
    net, x = Net(), "x"
    while len(net.nodes) < size:
        q, k, v = (net.op("MatMul", x, "m") for _ in range(3))
        scores = net.op("Softmax", net.op("MatMul", q, net.op("Transpose", k, perm=[0, 2, 1])))
        x = net.op("Add", net.op("MatMul", net.op("MatMul", scores, v), "m"), x)
        y = net.op("MatMul", net.op("Erf", net.op("MatMul", x, "m")), "m")
        x = net.op("Add", y, x)
    return net.model(x, [1, 16, 4])


FAMILIES: dict[str, Callable[[int], Model]] = {
    f.__name__.replace("_", " "): f
    for f in (residual, chain, clips, nested_splits, split_blocks, dense, attention)
}


def seconds(model: Model) -> tuple[float, int]:
    started = time.thread_time()
    regions = find_regions(model)
    return time.thread_time() - started, len(regions)


VERBS = {
    "inspect": ("inspect", "model.onnx"),
    "lint": ("lint", "model.onnx", "--target", "onnxruntime-cpu"),
    "lint, tuned": ("lint", "tuned.onnx", "--target", "onnxruntime-cpu"),
    "init": ("init", "model.onnx", "-o", "model.qdq.yaml"),
    "fold": ("fold", "tuned.onnx", "-o", "folded.onnx"),
    "import": ("import", "tuned.onnx", "-o", "scheme.json"),
    "apply": ("apply", "model.onnx", "scheme.json", "-o", "applied.onnx"),
    "diff": ("diff", "model.onnx", "tuned.onnx"),
    "strip": ("strip", "tuned.onnx", "-o", "stripped.onnx"),
    "strip, reference": ("strip", "tuned.onnx", "--reference", "model.onnx", "-o", "stripped.onnx"),
    "verify": ("verify", "model.onnx", "tuned.onnx"),
    "explain": ("explain", "model.onnx"),
}
SMALL = 20  # number of nodes at which only start-up is measured
# Runs a command, and writes the CPU seconds of its process and of its children to a file at the end of the process,
# after idle zygotes are stopped. Children count only after waiting for them.
COMMAND = """
import atexit, resource, sys
def write():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    with open(sys.argv[1], "w") as file:
        file.write(" ".join(str(each.ru_utime + each.ru_stime) for each in used))
atexit.register(write)
from qdqspec.app.cli import main
sys.exit(main(sys.argv[2:]))
"""
INSPECTED = {"residual": residual, "nested splits": nested_splits, "attention": attention}
INSPECT_BARS = {20_000: 2.0, 200_000: 20.0}  # seconds


def grow_verbs(sizes: list[int], repeat: int, chosen: list[str]) -> None:
    """Print the seconds of each command at each size, and its growth exponent."""
    verbs = {name: words for name, words in VERBS.items() if not chosen or words[0] in chosen}
    found: dict[str, list[float]] = {name: [] for name in verbs}
    alone: dict[str, list[float]] = {name: [] for name in verbs}
    for size in (SMALL, *sizes):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_models(folder, size)
            for verb, words in verbs.items():
                taken = [cpu_seconds(folder, words) for _ in range(repeat)]
                found[verb].append(min(map(sum, taken)))
                alone[verb].append(min(own for own, _ in taken))
                print(f"{size} nodes, {verb}: {found[verb][-1]:.2f} s", file=sys.stderr)
    rows = []
    for verb, (start, *taken) in found.items():
        slope = exponent(sizes, found[verb])
        own = exponent(sizes, alone[verb])
        judged = "ok" if own <= 1.1 else "MISSED"
        rows.append((verb, start, *(seconds - start for seconds in taken), slope, own, judged))
    heads = ("verb", "start-up s", *sizes, "exponent", "of its own process", "bar")
    print(tabulate(rows, heads, floatfmt=".2f"))


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of log seconds over log nodes, minus the start-up, which is the first of the times."""
    start, *taken = seconds
    logs = [math.log(max(each - start, 1e-3)) for each in taken]
    return statistics.linear_regression([math.log(size) for size in sizes], logs).slope


def write_models(folder: Path, size: int) -> None:
    onnx.save(candidates.residual(size, 10**6), folder / "model.onnx")
    (folder / "work").mkdir()
    maker = candidates.Maker(candidates.load_model(folder / "model.onnx"), folder / "work")
    maker.make(maker.space.everything(), "tuned.onnx")
    for made in (folder / "work").iterdir():  # the model and its external weights
        made.rename(folder / made.name)
    cpu_seconds(folder, VERBS["import"])


def cpu_seconds(folder: Path, words: tuple[str, ...]) -> tuple[float, float]:
    """CPU time of a command and of its children."""
    for left in ("model.qdq.yaml", "folded.onnx", "applied.onnx", "stripped.onnx", "scheme.json"):
        if left in words and words[words.index(left) - 1] == "-o":
            (folder / left).unlink(missing_ok=True)
    used = folder / "used"
    used.unlink(missing_ok=True)
    command = [sys.executable, "-c", COMMAND, used.name, *words]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1) or not used.exists():
        print(f"{' '.join(words)}: {run.stderr}", file=sys.stderr)
        return math.nan, math.nan
    own, children = map(float, used.read_text().split())
    return own, children


def time_inspect(sizes: list[int], repeat: int) -> None:
    """Print the user CPU seconds of `inspect`."""
    rows = []
    for family, make in INSPECTED.items():
        for size in sizes:
            with tempfile.TemporaryDirectory() as name:
                onnx.save(make(size).proto, Path(name) / "model.onnx")
                for backend in ("onnxruntime", "tensorrt"):
                    words = [sys.executable, "-m", "qdqspec", "inspect", "model.onnx", "--backend", backend]
                    taken = [user_seconds(words, name) for _ in range(repeat)]
                    bar = INSPECT_BARS.get(size, math.inf)
                    middle = statistics.median(taken)
                    rows.append(
                        (family, size, backend, min(taken), middle, "ok" if middle <= bar else "MISSED")
                    )
                    print(*rows[-1], file=sys.stderr)
    print(tabulate(rows, ("family", "nodes", "backend", "best s", "median s", "bar"), floatfmt=".2f"))


def user_seconds(words: list[str], folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(words, cwd=folder, capture_output=True, check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 2500, 5000, 10_000, 20_000])
    parser.add_argument("--repeat", type=int, default=3, help="number of repetitions; the best counts")
    parser.add_argument(
        "--verbs", nargs="*", metavar="VERB", help="measure these commands, or all that take a model"
    )
    parser.add_argument("--inspect", action="store_true", help="measure `inspect`, five times each")
    arguments = parser.parse_args()
    if arguments.inspect:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        time_inspect(arguments.sizes, 5)
        return
    if arguments.verbs is not None:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        grow_verbs(arguments.sizes, arguments.repeat, arguments.verbs)
        return
    rows, slopes = [], []
    for name, make in FAMILIES.items():
        points = []
        for size in arguments.sizes:
            model = make(size)
            started = time.thread_time()
            _ = model.types
            inference = time.thread_time() - started
            took, count = min(seconds(model) for _ in range(arguments.repeat))
            points.append((math.log(len(model.nodes)), math.log(took)))
            rows.append((name, len(model.nodes), count, inference, took, 1e6 * took / len(model.nodes)))
        slope, largest = (
            statistics.linear_regression(*zip(*p, strict=True)).slope for p in (points, points[-3:])
        )
        slopes.append((name, slope, largest, "ok" if slope <= 1.1 and took < 1 else "MISSED"))
    print(
        tabulate(
            rows, headers=("family", "nodes", "regions", "inference s", "seconds", "us/node"), floatfmt=".3f"
        )
    )
    print()
    print(
        tabulate(slopes, headers=("family", "growth exponent", "of the largest three", "bar"), floatfmt=".2f")
    )


if __name__ == "__main__":
    main()
