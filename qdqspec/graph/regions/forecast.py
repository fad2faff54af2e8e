"""Estimates how long tuning a model may take, without building it.

The estimate is a rough guide for planning. A build costs a fixed time per node and per byte of weights; a run
costs a fixed time per multiplication, computed from the shapes, and per node. The constants were measured
with the default backend on one core of an x86-64 server, each model in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from qdqspec.graph.model import Model, Node
from qdqspec.graph.protos import size_of, without_weights

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
    low_s: float
    high_s: float
    macs: int
    assumed: tuple[str, ...] = ()  # dimensions of inputs that count as 1


def forecast_tuning(model: Model, builds: int, shapes: Mapping[str, Sequence[int]] | None = None) -> Forecast:
    """Estimate the duration of a search with this number of ``builds``.

    ``shapes`` are those of inputs, as far as known. Other dynamic dimensions of inputs count as 1 and are named in the
    result; so do unknown ones inside, which depend on values.
    """
    weights = sum(map(size_of, model.constants.values()))
    known, assumed = _fix_shapes(model, shapes or {})
    macs = sum(multiplications(known, node) for node in model.nodes)
    nodes = len(model.nodes)
    build_s = _START_S + _BUILD_S_PER_NODE * nodes + _BUILD_S_PER_BYTE * weights
    run_s = _RUN_S_PER_NODE * nodes + _RUN_S_PER_MAC * macs
    expected = builds * (build_s + _RUNS * run_s)
    return Forecast(
        builds=builds,
        low_s=expected / _EITHER_WAY,
        high_s=expected * _EITHER_WAY,
        macs=macs,
        assumed=assumed,
    )


def multiplications_by_node(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The multiplications of each node for one input, at these shapes of the model's inputs."""
    known, _ = _fix_shapes(model, shapes)
    return {node.name: multiplications(known, node) for node in model.nodes}


def _fix_shapes(model: Model, shapes: Mapping[str, Sequence[int]]) -> tuple[Model, tuple[str, ...]]:
    """The model for shape inference with these shapes of inputs, and the dynamic dimensions that are set to 1."""
    if all(None not in (model.shape(name) or (None,)) for name in model.inputs):
        return model, ()
    light = without_weights(model.proto)
    free = [info for info in light.graph.input if info.name in model.inputs]
    sizes: dict[str, int] = {}  # by name of a dimension
    for info in free:
        for dim, size in zip(info.type.tensor_type.shape.dim, shapes.get(info.name, ()), strict=False):
            if dim.dim_param:
                sizes.setdefault(dim.dim_param, size)
    assumed: dict[str, None] = {}
    for info in free:
        kind, given = info.type.tensor_type, shapes.get(info.name, ())
        if not kind.HasField("shape"):
            assumed[f"the shape of input '{info.name}'"] = None
        for number, dim in enumerate(kind.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:  # some exporters write -1 for a dynamic one
                continue
            if number < len(given):
                dim.dim_value = given[number]
            elif dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
            else:
                name = f"'{dim.dim_param}'" if dim.dim_param else f"dimension {number} of input '{info.name}'"
                assumed[name] = None
                dim.dim_value = 1
    return Model(light, path=model.path), tuple(assumed)


def multiplications(model: Model, node: Node) -> int:
    """Multiply-accumulate operations of a node for one input; 0 for operators that mainly move data."""
    count = _COUNTS.get(node.op_type)
    return count(model, node) if count is not None and len(node.inputs) > 1 else 0


def _count_convolution(model: Model, node: Node) -> int:
    weight = _find_dims(model, node.inputs[_find_weight_input(node)])
    # Transposed or not, each weight meets each position of the smaller image.
    moved = _find_dims(model, node.inputs[0] if node.op_type == "ConvTranspose" else node.outputs[0])
    return prod(weight) * prod(moved[2:]) * (moved[0] if moved else 1)


def _count_product(model: Model, node: Node) -> int:
    operands = node.inputs[0], node.inputs[_find_weight_input(node)]
    left, right = (_find_dims(model, tensor) for tensor in operands)
    if not left or not right:  # one row at least meets a constant weight
        return sum(prod(_find_dims(model, tensor)) for tensor in operands if tensor in model.constants)
    shared = left[0] if node.attributes.get("transA", 0) else left[-1]
    if (
        model.shape(node.outputs[0]) is None
    ):  # operators of other domains: the right operand counts as a matrix
        return prod(left) * prod(right) // max(shared, 1)
    return prod(_find_dims(model, node.outputs[0])) * shared


def _count_recurrence(model: Model, node: Node) -> int:
    # The weights of all directions and gates meet each step of each sample, in either layout.
    weights = sum(prod(_find_dims(model, tensor)) for tensor in node.inputs[1:3])
    return prod(_find_dims(model, node.inputs[0])[:2]) * weights


def _count_blocked_product(model: Model, node: Node) -> int:
    return prod(_find_dims(model, node.inputs[0])) * int(node.number("N", 0))


def _find_weight_input(node: Node) -> int:
    """The index of the right operand; in some operators the scale and zero point of the left one precede it."""
    return 3 if node.op_type in _QUANTIZED else 1


_QUANTIZED = frozenset({"QGemm", "QLinearConv", "QLinearMatMul"})
_COUNTS: dict[str, Callable[[Model, Node], int]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "QLinearConv"), _count_convolution),
    **dict.fromkeys(("Gemm", "MatMul", "MatMulInteger", "QGemm", "QLinearMatMul"), _count_product),
    **dict.fromkeys(("DynamicQuantizeMatMul", "MatMulIntegerToFloat"), _count_product),
    "MatMulNBits": _count_blocked_product,
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _count_recurrence),
}


def _find_dims(model: Model, tensor: str) -> list[int]:
    return [1 if size is None else size for size in model.shape(tensor) or ()]
