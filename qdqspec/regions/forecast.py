"""Estimates how long tuning a model may take, without building it.

The estimate is a rough guide for planning. A build costs a fixed time per node and per byte of weights; a run
costs a fixed time per multiplication, computed from the shapes, and per node. The constants were measured
with ONNX Runtime on one core of an x86-64 server, each model in its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import onnx

from qdqspec.graph.model import Model, Node

_START_S = 0.6  # start of a process that imports a runtime
_BUILD_S_PER_NODE = 0.0002
_BUILD_S_PER_BYTE = 1e-9
_RUN_S_PER_MAC = 1 / 50e9
_RUN_S_PER_NODE = 2e-6
_RUNS = 80  # of a candidate and its rival: warm-up, profile, screening, and a race, which is usually short
_EITHER_WAY = 3  # factor by which machines and races differ, in both directions


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Estimated range of a search's duration in seconds, with the figures it is computed from."""

    builds: int
    build_s: float
    run_s: float
    macs: int

    @property
    def low_s(self) -> float:
        """The lower bound, in seconds."""
        return self._expected / _EITHER_WAY

    @property
    def high_s(self) -> float:
        """The upper bound, in seconds."""
        return self._expected * _EITHER_WAY

    @property
    def _expected(self) -> float:
        return self.builds * (self.build_s + _RUNS * self.run_s)


def forecast_tuning(model: Model, builds: int) -> Forecast:
    """Estimate the duration of a search with so many builds. Unknown dimensions count as 1."""
    weights = sum(_bytes(tensor) for tensor in model.constants.values())
    macs = sum(multiplications(model, node) for node in model.nodes)
    nodes = len(model.nodes)
    return Forecast(
        builds=builds,
        build_s=_START_S + _BUILD_S_PER_NODE * nodes + _BUILD_S_PER_BYTE * weights,
        run_s=_RUN_S_PER_NODE * nodes + _RUN_S_PER_MAC * macs,
        macs=macs,
    )


def multiplications(model: Model, node: Node) -> int:
    """Multiply-accumulate operations of a node for one input; 0 for operators that mainly move data."""
    count = _COUNTS.get(node.op_type)
    return count(model, node) if count is not None and len(node.inputs) > 1 else 0


def _convolution(model: Model, node: Node) -> int:
    weight = _dims(model, node.inputs[1])
    # Transposed or not, each weight meets each position of the smaller image.
    moved = _dims(model, node.inputs[0] if node.op_type == "ConvTranspose" else node.outputs[0])
    return prod(weight) * prod(moved[2:]) * (moved[0] if moved else 1)


def _product(model: Model, node: Node) -> int:
    left, right = (_dims(model, tensor) for tensor in node.inputs[:2])
    if not left or not right:
        return 0
    shared = left[0] if node.op_type == "Gemm" and node.attributes.get("transA", 0) else left[-1]
    return prod(_dims(model, node.outputs[0])) * shared


_COUNTS: dict[str, Callable[[Model, Node], int]] = {
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "Gemm": _product,
    "MatMul": _product,
}


def _dims(model: Model, tensor: str) -> list[int]:
    return [1 if size is None else size for size in model.shape(tensor) or ()]


def _bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type == onnx.TensorProto.STRING:
        return 0
    return int(prod(tensor.dims)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
