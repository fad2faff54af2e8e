"""Quantizes a model with NNCF in a separate environment: ``nncf_run.py MODEL FEEDS.npz OUTPUT``.

`benchmarks/rivals.py` creates the environment and runs this program.
"""

from __future__ import annotations

import sys

import nncf
import onnx
from feeds_file import read_feeds


def main(model: str, feeds: str, output: str) -> None:
    samples = read_feeds(feeds)
    given = onnx.load(model)
    ops = {node.op_type for node in given.graph.node}
    kind = nncf.ModelType.TRANSFORMER if {"MatMul", "Softmax"} <= ops and "Conv" not in ops else None
    data = nncf.Dataset(samples)
    onnx.save(nncf.quantize(given, data, model_type=kind, subset_size=len(samples)), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
