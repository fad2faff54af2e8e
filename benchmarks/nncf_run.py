"""Quantizes a model with NNCF in a separate environment: ``nncf_run.py MODEL FEEDS.npz OUTPUT``.

The arrays in ``FEEDS.npz`` are named ``<sample>/<input>``. `benchmarks/nncf_peer.py` creates the environment and runs
this program.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import nncf
import numpy as np
import onnx


def main(model: str, feeds: str, output: str) -> None:
    samples: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    with np.load(feeds) as arrays:  # noqa: TID251 - closed here
        for name in arrays.files:
            number, _, own = name.partition("/")
            samples[int(number)][own] = arrays[name]
    given = onnx.load(model)
    ops = {node.op_type for node in given.graph.node}
    kind = nncf.ModelType.TRANSFORMER if {"MatMul", "Softmax"} <= ops and "Conv" not in ops else None
    data = nncf.Dataset([samples[number] for number in sorted(samples)])
    onnx.save(nncf.quantize(given, data, model_type=kind, subset_size=len(samples)), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
