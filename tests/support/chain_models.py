"""Random models whose channels pass from a layer to the next, for equalization."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper
from operator_models import Graph

from qdqspec.graph.model import Model

IMAGE_STEPS = (
    "conv", "depthwise", "relu", "leaky", "max", "average", "scale", "shift", "normalize", "gate", "mean gate", "slice",
)  # fmt: skip
TOKEN_STEPS = ("linear", "relu", "scale", "shift", "layernorm", "prelu")
ENDS = ("gemm", "transposed", "matmul", "conv", "global")
MEAN: dict[str, dict[str, object]] = {"gate": {}, "mean gate": {"axes": [2, 3]}}
SIZE, TOKENS = 6, 3


class ChainModel(Graph):
    """Builds a model of float32 operators step by step; ``now`` is the latest result."""

    def __init__(self, seed: int, shape: list[int]) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.inputs.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, shape))
        self.now = "x"

    def constant(self, *shape: int, least: float | None = None) -> str:
        values = self.random.standard_normal(shape).astype(np.float32)
        return self.const(values if least is None else np.abs(values) + np.float32(least))

    def integers(self, *values: int) -> str:
        return self.const(values, np.int64)

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        self.now = self.node(op, *(inputs or (self.now,)), **attributes)
        return self.now

    def model(self, *outputs: str) -> Model:
        return Model(super().model(self.now, *outputs))


def image_model(seed: int, steps: list[str], end: str, channels: int = 4) -> Model:
    """A convolution, the steps, and a layer at the end."""
    work = ChainModel(seed, [1, 3, SIZE, SIZE])
    work.add("Conv", "x", work.constant(channels, 3, 3, 3), work.constant(channels), pads=[1, 1, 1, 1])
    for step in steps:
        _image_step(work, step, channels)
    if end == "conv":
        work.add("Conv", work.now, work.constant(2, channels, 1, 1))
        return work.model()
    columns = channels if end == "global" else channels * SIZE * SIZE
    if end == "global":
        work.add("GlobalAveragePool")
    work.add("Flatten", axis=1)
    _linear(work, end, columns)
    return work.model()


def token_model(seed: int, steps: list[str], end: str, channels: int = 4) -> Model:
    """A LayerNormalization, the steps, and a layer at the end that reads tokens."""
    work = ChainModel(seed, [2, TOKENS, channels])
    work.add("LayerNormalization", "x", work.constant(channels), work.constant(channels))
    for step in steps:
        if step == "linear":
            work.add("MatMul", work.now, work.constant(channels, channels))
        elif step == "layernorm":
            work.add("LayerNormalization", work.now, work.constant(channels))
        elif step in ("scale", "shift"):
            work.add("Mul" if step == "scale" else "Add", work.now, work.constant(channels))
        else:
            work.add(*(("PRelu", work.now, work.constant(1)) if step == "prelu" else ("Relu", work.now)))
    if end in ("gemm", "transposed"):
        work.add("Reshape", work.now, work.integers(-1, channels))
    _linear(work, end, channels)
    return work.model()


def _image_step(work: ChainModel, step: str, channels: int) -> None:
    if step == "conv":
        work.add("Conv", work.now, work.constant(channels, channels, 1, 1), work.constant(channels))
    elif step == "depthwise":
        weight = work.constant(channels, 1, 3, 3)
        work.add("Conv", work.now, weight, group=channels, pads=[1, 1, 1, 1])
    elif step in ("max", "average"):
        pool = {"max": "MaxPool", "average": "AveragePool"}[step]
        work.add(pool, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    elif step in ("scale", "shift"):
        work.add("Mul" if step == "scale" else "Add", work.now, work.constant(channels, 1, 1))
    elif step == "slice":  # all of it
        bounds = [work.integers(*values) for values in ((0, 0), (SIZE, channels), (2, 1), (1, 1))]
        work.add("Slice", work.now, *bounds)
    elif step == "normalize":
        names = [work.constant(channels) for _ in range(3)]
        work.add("BatchNormalization", work.now, *names, work.constant(channels, least=0.1))
    elif step in ("gate", "mean gate"):  # squeeze and excitation
        features = work.now
        work.add(*(("GlobalAveragePool",) if step == "gate" else ("ReduceMean", features)), **MEAN[step])
        work.add("Conv", work.now, work.constant(channels, channels, 1, 1))
        work.add("Mul", features, work.add("Sigmoid"))
    else:
        work.add("LeakyRelu" if step == "leaky" else "Relu")


def _linear(work: ChainModel, end: str, columns: int) -> None:
    if end == "transposed":
        work.add("Gemm", work.now, work.constant(5, columns), work.constant(5), transB=1)
    elif end == "gemm":
        work.add("Gemm", work.now, work.constant(columns, 5))
    else:
        work.add("MatMul", work.now, work.constant(columns, 5))
