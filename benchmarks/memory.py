"""The memory of preparation and of creating candidates: ``python benchmarks/memory.py [MEGABYTES]``.

A convolutional network with BatchNormalization and about this size of weights (500) is processed by all steps of a
search except builds: load, fold, infer types, find units, write the observer for calibration, create the first and
further candidates, write the tuned model. For each step, the peak of resident memory above that of Python and the
libraries before loading the model is printed. Bar: 1.3 times the size of the model. The engine of the runtime is not
included. Linux only: the peak is reset between steps.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tabulate import tabulate

from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.fold import fold_weights
from qdqspec.graph.model import load_model
from qdqspec.graph.observe import with_outputs
from qdqspec.graph.storage import WeightStore, save_model
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.search_space import SchemeSpace

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

T = TypeVar("T")
CHANNELS = 512
BAR = 1.3


def write_model(path: Path, megabytes: int) -> None:
    """Conv > BatchNormalization > Relu blocks with 3x3 weights."""
    shape = (CHANNELS, CHANNELS, 3, 3)
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(max(1, round(megabytes * 1e6 / (4 * np.prod(shape))))):
        weights.append(numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 70, f"w{i}"))
        parameters = [np.ones(CHANNELS, np.float32) * value for value in (1.0, 0.1, 0.0, 1.0)]
        weights += [numpy_helper.from_array(p, f"p{i}{k}") for k, p in enumerate(parameters)]
        names = [f"p{i}{k}" for k in range(4)]
        nodes += [
            helper.make_node("Conv", [x, f"w{i}"], [f"c{i}"], f"conv{i}", pads=[1] * 4),
            helper.make_node("BatchNormalization", [f"c{i}", *names], [f"b{i}"], f"norm{i}"),
            helper.make_node("Relu", [f"b{i}"], [f"r{i}"], f"relu{i}"),
        ]
        x = f"r{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, CHANNELS, 4, 4]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


class Meter:
    """Peak resident memory of consecutive steps, in megabytes above the start."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float]] = []
        gc.collect()
        self._start = _megabytes("VmRSS")

    def __call__(self, step: str, do: Callable[[], T]) -> T:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        result = do()
        self.rows.append((step, _megabytes("VmHWM") - self._start))
        return result


def _megabytes(entry: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{entry}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / 1024 if found else float("nan")


def measure(path: Path, folder: Path) -> None:
    """Run all steps in a separate process."""
    meter = Meter()
    given = meter("load", lambda: load_model(path))
    model = meter("fold BatchNormalization", lambda: fold_weights(given)).model
    meter("infer types", lambda: model.types)
    space = meter("find units", lambda: SchemeSpace(model, OnnxRuntime().capabilities()))
    observer = meter("make the observer", lambda: with_outputs(model, space.tensors).proto)
    file = folder / "observer.onnx"
    meter("write the observer", partial(save_model, observer, file, base=path.parent))
    from random_models import ranges_for

    numbers = Quantizer(model, ranges_for(model), biases=space.bias_sources)
    everything = space.resolve(space.everything())
    store = WeightStore(folder, base=path.parent)
    inserter = meter("share weights", lambda: Inserter(model, numbers, store=store))
    first = meter("first candidate", lambda: inserter.insert(everything))
    meter("write it", lambda: save_model(first.proto, folder / "first.onnx"))
    meter("the next three", lambda: [inserter.insert(everything) for _ in range(3)])
    again = Inserter(model, numbers, store=WeightStore(folder, base=path.parent, file_name="again.bin"))
    tuned = meter("make the tuned model", lambda: again.insert(everything))
    meter("write it ", lambda: save_model(tuned.proto, folder / "tuned.onnx", base=folder))
    size = path.stat().st_size / 2**20
    print(
        tabulate(
            [(s, p, p / size) for s, p in meter.rows], ("step", "peak MiB", "of the model"), floatfmt=".2f"
        )
    )
    worst = max(peak for _, peak in meter.rows) / size
    print(
        f"\nmodel {size:.0f} MiB; highest peak {worst:.2f} times that, bar {BAR}: {'ok' if worst <= BAR else 'MISSED'}"
    )


def main() -> int:
    if len(sys.argv) == 3:
        measure(Path(sys.argv[1]), Path(sys.argv[2]))
        return 0
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    with tempfile.TemporaryDirectory() as name:
        path, folder = Path(name) / "model.onnx", Path(name) / "work"
        folder.mkdir()
        write_model(path, megabytes)
        return subprocess.run([sys.executable, __file__, str(path), str(folder)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
