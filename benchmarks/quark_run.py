"""Quantizes a model with AMD Quark in a separate environment: ``quark_run.py MODEL FEEDS.npz OUTPUT CONFIGURATION``.

`benchmarks/rivals.py` creates the environment and runs this program.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from feeds_file import read_feeds
from onnxruntime.quantization import CalibrationDataReader
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config


class Reader(CalibrationDataReader):
    """The samples in order, once: Quark keeps them."""

    def __init__(self, samples: Sequence[dict[str, np.ndarray]]) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def main(model: str, feeds: str, output: str, configuration: str) -> None:
    quantizer = ModelQuantizer(Config(global_quant_config=get_default_config(configuration)))
    quantizer.quantize_model(model, output, Reader(read_feeds(feeds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
