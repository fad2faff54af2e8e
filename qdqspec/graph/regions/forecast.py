"""Estimates how long tuning a model may take, without building it, from its multiplications, nodes and weights.

The estimate is a rough guide for planning. A build costs a fixed time per node and per byte of weights; a run
costs a fixed time per multiplication, computed from the shapes, and per node. The constants were measured
with the default backend on one core of an x86-64 server, each model in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import cast

from qdqspec._core.units import list_text, plain, seconds_text
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_fused_attention, made_of_constants
from qdqspec.graph.protos import size_of, without_weights

_START_S = 0.6  # start of a process that imports a runtime
_BUILD_S_PER_NODE = 0.0002
_BUILD_S_PER_BYTE = 1e-9
_RUN_S_PER_MAC = 1 / 50e9
_RUN_S_PER_NODE = 2e-6
_RUNS = 80  # of a candidate and its rival: warm-up, profile, screening, and a race, which is usually short
_EITHER_WAY = 3  # factor by which machines and races differ, in both directions

_CONVOLUTIONS = frozenset({"Conv", "ConvInteger", "ConvTranspose", "DeformConv", "FusedConv", "QLinearConv"})
_PRODUCTS = frozenset({
    "DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "QGemm", "QLinearMatMul",
})  # fmt: skip
_PAST_KEYS = {
    "Attention": 4,
    "GroupQueryAttention": 3,
    "MultiHeadAttention": 6,
}  # the input of keys of earlier tokens
_RECURRENCES = frozenset({"DynamicQuantizeLSTM", "GRU", "LSTM", "RNN"})
_COUNTED = _CONVOLUTIONS | _PRODUCTS | _RECURRENCES | _PAST_KEYS.keys() | {"Einsum", "MatMulNBits"}
# the scale and zero point of the left operand precede the right one
_QUANTIZED = frozenset({"QGemm", "QLinearConv", "QLinearMatMul"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Estimated range of a search's duration in seconds, with the figures it is computed from."""

    builds: int
    low_seconds: float
    high_seconds: float
    multiplications: int
    assumed: tuple[str, ...] = ()  # dimensions of inputs that count as 1


def forecast_tuning(model: Model, builds: int, shapes: Mapping[str, Sequence[int]] | None = None) -> Forecast:
    """Estimate the duration of a search with this number of ``builds``.

    ``shapes`` are those of inputs, as far as known. Other dynamic dimensions of inputs count as 1 and are named in the
    result; so do unknown ones inside, which depend on values.
    """
    weights = sum(map(size_of, model.constants.values()))
    known, assumed = _fix_shapes(model, shapes or {})
    macs = sum(_count_multiplications(known, node) for node in model.nodes)
    nodes = len(model.nodes)
    build_s = _START_S + _BUILD_S_PER_NODE * nodes + _BUILD_S_PER_BYTE * weights
    run_s = _RUN_S_PER_NODE * nodes + _RUN_S_PER_MAC * macs
    expected = builds * (build_s + _RUNS * run_s)
    return Forecast(
        builds=builds,
        low_seconds=round(expected / _EITHER_WAY, 1),
        high_seconds=round(expected * _EITHER_WAY, 1),
        multiplications=macs,
        assumed=assumed,
    )


def forecast_line(guess: Forecast) -> str:
    """The estimated time of a search, as a sentence."""
    low, high = (seconds_text(seconds) for seconds in (guess.low_seconds, guess.high_seconds))
    names = list_text([plain(name) for name in guess.assumed], 4)
    assumed = f" (unknown sizes taken as 1: {names})" if names else ""
    count = guess.multiplications
    macs = f"{count / 1e6:,.0f} million" if count >= 1e6 else "less than a million"
    return (
        f"the search may take {low} to {high}: {guess.builds} builds, estimated from node count, weights and "
        f"{macs} multiplications{assumed}; nothing was built; calibration before it, and the "
        "timing of its finalists and the comparison of outputs after it, come on top"
    )


def multiplications_by_node(
    model: Model,
    shapes: Mapping[str, Sequence[int]],
    seen: Callable[[list[str]], Mapping[str, Sequence[int]]] = lambda _: {},
) -> tuple[dict[str, int], list[str]]:
    """The multiplications of each node for one input, at these shapes of the model's inputs, and the nodes not known.

    ``seen`` gives the shapes of tensors in a run: of those that shape inference does not find, and for the result of a
    node in a body one number, the elements of all iterations. What it does not give is not known: such sizes count as
    1, and such nodes of bodies once. Nodes that compute constants cost nothing: a runtime folds them.
    """
    known, _ = _fix_shapes(model, shapes)
    constant = made_of_constants(model)

    def is_unknown(tensor: str) -> bool:
        return bool(tensor) and tensor not in constant and None in (known.shape(tensor) or (None,))

    counted = [n for n in model.nodes if n.op_type in _COUNTED and n.outputs and n.outputs[0] not in constant]
    read = {node.name: (*node.inputs, *node.outputs[:1]) for node in counted}
    wanted = [t for node in counted if not node.scope for t in read[node.name] if is_unknown(t)]
    wanted += [node.outputs[0] for node in counted if node.scope]
    found = seen([*dict.fromkeys(wanted)]) if wanted else {}
    counts, unknown = dict.fromkeys(model.by_name, 0), list[str]()
    for node in counted:
        if not node.scope:
            counts[node.name] = _count_multiplications(known, node, found)
            if any(is_unknown(tensor) and tensor not in found for tensor in read[node.name]):
                unknown.append(node.name)
            continue
        counts[node.name] = once = _count_multiplications(known, node)
        result, elements = known.shape(node.outputs[0]), prod(found.get(node.outputs[0], (0,)))
        if elements and result is not None and (known.shape(node.inputs[0]) or (None,))[-1] is not None:
            counts[node.name] = once * elements // prod(size or 1 for size in result)
        else:
            unknown.append(node.name)
    return counts, unknown


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


def _count_multiplications(
    model: Model, node: Node, seen: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> int:
    """Multiply-accumulate operations of a node for one input; 0 for operators that mainly move data."""

    def dims(tensor: str) -> list[int]:
        return [1 if size is None else size for size in seen.get(tensor) or model.shape(tensor) or ()]

    if len(node.inputs) < 2:
        return 0
    left = dims(node.inputs[0])
    operand = node.inputs[3 if node.op_type in _QUANTIZED else 1]
    right = dims(operand)
    if node.op_type in _CONVOLUTIONS:
        # Transposed or not, each weight meets each position of the smaller image.
        image = left if node.op_type == "ConvTranspose" else dims(node.outputs[0])
        return prod(right) * prod(image[2:]) * (image[0] if image else 1)
    if node.op_type in _PRODUCTS:
        if not left or not right:  # one row at least meets a constant weight
            return prod(left or right) if left or right else 0
        shared = left[-2] if node.attributes.get("transA", 0) else left[-1]
        if (
            node.outputs[0] not in seen and model.shape(node.outputs[0]) is None
        ):  # of other domains: the right operand counts as a matrix
            return prod(left) * prod(right) // max(shared, 1)
        return prod(dims(node.outputs[0])) * shared
    if node.op_type in _RECURRENCES:
        # The weights of all directions and gates meet each step of each sample, in either layout.
        return prod(left[:2]) * sum(prod(dims(tensor)) for tensor in node.inputs[1:3])
    if node.op_type == "Einsum":
        return _einsum_multiplications(node, [dims(tensor) for tensor in node.inputs])
    if is_fused_attention(node) and left:  # the product that makes queries, keys and values, too
        return prod(left) * (right[-1] + 2 * left[1]) if right else 0
    if node.op_type in _PAST_KEYS and len(right) > 1:
        past = dims(node.input_at(_PAST_KEYS[node.op_type]))
        return 2 * prod(left) * (right[-2] + (past[2] if len(past) > 2 else 0))
    return prod(left) * int(node.number("N", 0)) if node.op_type == "MatMulNBits" else 0


def _einsum_multiplications(node: Node, shapes: Sequence[Sequence[int]]) -> int:
    """The elements of the space of all its indices; 0 if a shape does not fit."""
    terms = cast("bytes", node.attributes["equation"]).decode().replace(" ", "").split("->")[0].split(",")
    sizes: dict[str | int, int] = {}  # by letter; of the dots by distance from their last dimension
    for term, shape in zip(terms, shapes, strict=False):
        before, dots, after = term.partition("...")
        spread = len(shape) - len(before) - len(after)
        if spread < 0 or (spread and not dots):
            return 0
        for index, size in zip((*before, *range(-spread, 0), *after), shape, strict=True):
            sizes[index] = max(size, sizes.get(index, 1))
    return prod(sizes.values())
