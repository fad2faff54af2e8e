"""Races on a GPU between engines whose true ratio is known: ``python benchmarks/trt_on_gpu.py VERSION python
benchmarks/gpu.py [REPEATS [RATIO ...]]``.

The stand-in for TensorRT enqueues kernels of known duration. So the noise is that of a GPU, with CUDA graphs, events
and two processes that take turns, and the true ratio of two engines is known. Each row measures a model against a
copy of it whose layers take a given share of its time, as `qdqspec measure` does: fresh builds of both, interleaved.
*Contains* is how often the 95 % prediction interval contains the true ratio, *gain* how often the test shows one.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from tabulate import tabulate

import qdqspec
from qdqspec.backends.tensorrt import backend

MODEL = Path(__file__).parents[1] / "specs" / "models" / "squeezenet10.onnx"
RATIOS = (1.000002, 0.99, 0.98, 0.95)  # the first is 1 with other names of kernels
HEADS = ("true", "measured", "contains", "gain", "half-width %", "s")


def main() -> int:
    """Measure and print the table."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ratios = [float(text) for text in sys.argv[2:]] or RATIOS
    found = backend().probe()
    if not found.usable:
        sys.exit(f"{found.why}; {found.install}")
    print(", ".join(f"{name} {text}" for name, text in found.facts.items()))
    with tempfile.TemporaryDirectory() as scratch:
        rows = [_row(ratio, repeats, Path(scratch)) for ratio in ratios]
    print(tabulate(rows, HEADS, tablefmt="github"))
    return 0


def _row(ratio: float, repeats: int, scratch: Path) -> list[str]:
    other = _scaled(ratio, scratch / f"{ratio:g}.onnx")
    found, seconds = [], []
    for number in range(repeats):
        started = time.monotonic()
        folder = scratch / f"{ratio:g}-{number}"
        found.append(
            qdqspec.measure(MODEL, other, backend="tensorrt", output=folder, cache_dir=folder / "cache")
        )
        seconds.append(time.monotonic() - started)
    print(_noise(found[0]))
    measured = [1 / each.speedup.median for each in found]
    inside = [1 / each.speedup.high <= ratio <= 1 / each.speedup.low for each in found]
    gains = [each.tested_speedup.low > 1 for each in found]
    widths = [50 * (each.speedup.high - each.speedup.low) / each.speedup.median for each in found]
    return [
        f"{ratio:.2f}",
        f"{min(measured):.4f} to {max(measured):.4f}",
        f"{sum(inside)} of {repeats}",
        f"{sum(gains)} of {repeats}",
        f"{statistics.median(widths):.2f}",
        f"{statistics.median(seconds):.1f}",
    ]


def _noise(found: qdqspec.types.LatencyEvidence) -> str:
    """The median and the spread of single runs of the reference, and the notes on them."""
    samples = found.samples["reference"]
    times = np.array(samples.wall_ms)
    middle = np.percentile(times, [25, 50, 75])
    return (
        f"one run takes {middle[1]:.4f} ms, half of {len(times)} runs within {middle[0]:.4f} to {middle[2]:.4f}; "
        f"{found.builds} builds; notes: {', '.join(samples.notes) or 'none'}"
    )


def _scaled(ratio: float, path: Path) -> Path:
    model = onnx.load(MODEL)
    entry = model.metadata_props.add()
    entry.key, entry.value = "standin.time", repr(ratio)
    onnx.save(model, path)
    return path


if __name__ == "__main__":
    sys.exit(main())
