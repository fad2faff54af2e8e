"""Finds the Q/DQ pairs of a model with their numbers, in names of the model without them.

A pair is described as it is, whether or not a placement can express it: a comparison of models covers 4-bit
blocks as well as 8-bit channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqspec.graph.dynamic_kernels import QUANTIZE
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import FLOATS
from qdqspec.graph.trt import FP4_DYNAMIC, is_pair_op
from qdqspec.qdq.edit.pairs import bias_record
from qdqspec.qdq.read.recognize import (
    blocks_of,
    found_scales,
    is_constant,
    is_dynamic,
    is_op,
    makes_scale,
    scale_of,
)
from qdqspec.qdq.read.strip import StrippedModel
from qdqspec.types import Consumer

COMPUTED = "its scale or zero point is computed"
RESCALES = "its DequantizeLinear has other numbers than its QuantizeLinear"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbers:
    """The parameters of a pair. ``format`` is the ONNX element type in lower case: int8, float8e4m3fn.

    ``scale`` is float32 and has no dimension, one (along ``axis``), or those of the tensor in blocks of
    ``block`` elements along it; ``zero_point`` has the same shape and is zero if none is given. ``precision``
    is the element type that the operators are set to compute in, 0 if unset. ``scale_type`` is the element
    type of scales stored in a narrow format, and ``outer`` their common factor. If ``dynamic``, the scale, or
    those of blocks, are computed at run time, and ``scale`` is 1.
    """

    format: str
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.float32]
    axis: int | None = None
    block: int = 0
    precision: int = 0
    scale_type: int | None = None
    outer: npt.NDArray[np.float32] | None = None
    dynamic: bool = False

    @property
    def step(self) -> npt.NDArray[np.float32]:
        """The value of one unit of the stored numbers, as far as it is known."""
        return self.scale if self.outer is None else np.asarray(self.scale * self.outer, np.float32)

    def same(self, other: Numbers) -> bool:
        """Whether two pairs compute the same."""
        return self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        kind = self.format, self.axis, self.block, self.precision, self.dynamic
        return *kind, self.step.shape, self.step.tobytes(), self.zero_point.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundPair:
    """One quantized tensor and its readers.

    ``tensor`` and ``ends`` are names of the model without Q/DQ, ``quantized`` (the integers) and ``nodes``
    (the DequantizeLinear nodes) those of the model with it. A weight is ``stored`` if it has no
    QuantizeLinear. Without ``numbers``, ``problem`` is why they are unknown.
    """

    tensor: str
    ends: tuple[Consumer, ...]  # including a graph output that it makes, under the name of the tensor
    quantized: str
    nodes: tuple[str, ...]
    weight: bool
    stored: bool
    numbers: Numbers | None
    problem: str = ""
    bias: str = ""  # the shift of the bias of the layer that reads this weight
    earlier: FoundPair | None = None  # the pair whose dequantized values this one quantizes again

    @property
    def unread(self) -> bool:
        """Whether only another pair reads it."""
        return not self.ends

    @property
    def chain(self) -> tuple[FoundPair, ...]:
        """Earlier pairs on the same values, last first. A pair that the next one repeats is left out."""
        found, pair = [], self
        while (earlier := pair.earlier) is not None:
            if earlier.numbers is None or not earlier.same(pair):  # else quantizing twice equals once
                found.append(earlier)
            pair = earlier
        return tuple(found)

    def same(self, other: FoundPair) -> bool:
        """Whether both compute the same, or have no numbers for the same reason."""
        if self.numbers is None or other.numbers is None:
            return self.problem == other.problem
        return self.numbers.same(other.numbers)


def find_pairs(apart: StrippedModel) -> tuple[FoundPair, ...]:
    """The pairs that were removed, in graph order; several readers of the same integers are one pair."""
    found: dict[tuple[str, str], list[FoundPair]] = {}
    made: dict[str, FoundPair] = {}  # by the output of the DequantizeLinear
    for node in apart.found.model.nodes:
        scale = makes_scale(apart.found.model, node.outputs[0])
        if is_op(node, "DequantizeLinear") and node.index in apart.found.removed and not scale:
            pair = made[node.outputs[0]] = _describe_pair(apart, node, made)
            alike = found.setdefault((pair.quantized, pair.tensor), [])
            for index, known in enumerate(alike):
                if known.same(pair):
                    alike[index] = replace(
                        known,
                        ends=tuple(sorted({*known.ends, *pair.ends})),
                        nodes=(*known.nodes, *pair.nodes),
                    )
                    break
            else:
                alike.append(pair)
    return tuple(pair for alike in found.values() for pair in alike)


def _describe_pair(apart: StrippedModel, node: Node, made: Mapping[str, FoundPair]) -> FoundPair:
    model, after = apart.found.model, node.outputs[0]
    quantize = model.producer.get(node.inputs[0])
    stored = quantize is None or not is_op(quantize, "QuantizeLinear")
    earlier = None if quantize is None or stored else made.get(quantize.inputs[0])
    tensor = after if node.index in apart.found.restorer.relus else apart.found.now(after)
    numbers, problem = _read_numbers(model, node, None if stored else quantize)
    # the readers that remain in the model without Q/DQ
    known = (end for end in model.ends(after) if end.is_output or end.node in apart.names)
    ends = {there for end in known for there in apart.ends(tensor, end)}
    return FoundPair(
        tensor=tensor,
        ends=tuple(sorted(ends)),
        quantized=node.inputs[0],
        nodes=(node.name,),
        weight=tensor in apart.stripped.constants,
        stored=stored,
        numbers=numbers,
        problem=problem,
        bias=str((bias_record(node) or {}).get("shift", "")),
        earlier=earlier,
    )


def _read_numbers(model: Model, dequantize: Node, quantize: Node | None) -> tuple[Numbers | None, str]:
    if quantize is not None and is_dynamic(quantize):
        numbers = _read_dynamic(model, dequantize, quantize)
        return numbers, "" if numbers is not None else RESCALES
    nodes = (dequantize,) if quantize is None else (quantize, dequantize)
    if not all(is_constant(model, node.inputs[1:]) for node in nodes):
        return None, COMPUTED
    format_name = _find_format(model, dequantize if quantize is None else quantize)
    read = [_read_stored(model, node, format_name) for node in nodes]
    if not read[0].same(read[-1]):
        return None, RESCALES
    return read[0], ""


def _read_dynamic(model: Model, dequantize: Node, quantize: Node) -> Numbers | None:
    """The parameters of a dynamically quantizing pair; ``None`` if Q and DQ do not match."""
    if quantize.op_type == QUANTIZE:
        if dequantize.inputs != quantize.outputs:
            return None
        if quantize.inputs[0] in model.constants:
            return _compute_range_numbers(model.array(quantize.inputs[0]))
        one, zero = np.ones((), np.float32), np.zeros((), np.float32)
        return Numbers(format="uint8", scale=one, zero_point=zero, dynamic=True)
    source, outer = dequantize.inputs[1], None
    if quantize.op_type == FP4_DYNAMIC:
        undo = model.producer.get(source)
        if undo is None or not is_constant(model, (*undo.inputs[1:2], quantize.inputs[1])):
            return None
        source, outer = undo.inputs[0], model.array(quantize.inputs[1]).astype(np.float32).reshape(())
        if model.array(undo.inputs[1]).astype(np.float32).reshape(-1).tolist() != [outer.item()]:
            return None
    (axis, block), (its_axis, its_block) = blocks_of(quantize), blocks_of(dequantize)
    rank = len(model.shape(quantize.inputs[0]) or ())
    same_axis = (axis - its_axis) % rank == 0 if rank else axis == its_axis
    if found_scales(model, source) is not quantize or block != its_block or not same_axis:
        return None
    four_bits = quantize.op_type == FP4_DYNAMIC
    return Numbers(
        format="float4e2m1" if four_bits else "float8e4m3fn",
        scale=np.ones((), np.float32),
        zero_point=np.zeros((), np.float32),
        axis=axis + rank if axis < 0 else axis,
        block=block,
        scale_type=TensorProto.FLOAT8E4M3FN if four_bits else TensorProto.FLOAT8E8M0,
        outer=outer,
        dynamic=True,
    )


def _compute_range_numbers(values: npt.NDArray[np.generic]) -> Numbers:
    """The numbers that DynamicQuantizeLinear computes for a constant, by its definition in ONNX."""
    low, high = (np.float32(limit) for limit in (values.min(initial=0), values.max(initial=0)))
    scale = (high - low) / np.float32(255) or np.float32(1)
    zero_point = np.clip(np.rint(-low / scale), 0, 255)
    return Numbers(
        format="uint8", scale=np.array(scale, np.float32), zero_point=np.array(zero_point, np.float32)
    )


def _find_format(model: Model, node: Node) -> str:
    """The element type of a pair's integers: uint8 by default for a QuantizeLinear."""
    zero_point = node.input_at(2)
    elem_type: int = TensorProto.FLOAT8E4M3FN
    if is_pair_op(node.proto):
        pass  # with scales that are powers of two
    elif node.inputs[0] in model.constants and node.op_type == "DequantizeLinear":
        elem_type = model.constants[node.inputs[0]].data_type
    elif zero_point:
        elem_type = model.constants[zero_point].data_type
    else:
        elem_type = node.number("output_dtype", 0) or TensorProto.UINT8
    return str(TensorProto.DataType.Name(elem_type)).lower()


def _read_stored(model: Model, node: Node, format_name: str) -> Numbers:
    scale, scale_type, outer = _read_scales(model, node)
    zero_point = np.zeros(scale.shape, np.float32)
    if given := node.input_at(2):
        zero_point = zero_point + model.array(given).astype(np.float32).reshape(zero_point.shape)
    block = blocks_of(node)[1]
    axis = _find_axis(model, node, scale) if scale.size > 1 or scale.ndim else None
    if axis is None:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    return Numbers(
        format=format_name,
        scale=scale,
        zero_point=zero_point,
        axis=axis,
        block=block,
        precision=node.number("precision", 0),
        scale_type=scale_type,
        outer=outer,
    )


def _read_scales(
    model: Model, node: Node
) -> tuple[npt.NDArray[np.float32], int | None, npt.NDArray[np.float32] | None]:
    """The scale of a Q or DQ, its storage type if that is narrow, and its factor."""
    maker = model.producer.get(node.inputs[1])
    if node.inputs[1] not in model.constants and maker is not None:
        inner, outer = model.array(maker.inputs[0]), model.array(maker.inputs[1]).astype(np.float32)
        if len(maker.inputs) == 2 and outer.size == 1:  # else only the result of the operator is known
            stored = model.constants[maker.inputs[0]].data_type
            return inner.astype(np.float32), stored, outer.reshape(())
        return scale_of(model, node).astype(np.float32), None, None
    stored = TensorProto.FLOAT8E8M0 if is_pair_op(node.proto) else model.constants[node.inputs[1]].data_type
    return scale_of(model, node).astype(np.float32), None if stored in FLOATS else stored, None


def _find_axis(model: Model, node: Node, scale: npt.NDArray[np.float32]) -> int | None:
    """The axis of a scale's elements, counted from 0; ``None`` for one scale for the whole tensor.

    A scale of shape [1] is one for the whole tensor, unless the named axis has one element itself.
    """
    shape = _find_shape(model, node)
    axis = blocks_of(node)[0]
    axis = axis + len(shape) if axis < 0 and shape is not None else axis
    if scale.size == 1:
        named = any(attribute.name == "axis" for attribute in node.proto.attribute)
        one = shape is not None and 0 <= axis < len(shape) and shape[axis] == 1
        return axis if named and one else None
    return axis


def _find_shape(model: Model, node: Node) -> tuple[int | None, ...] | None:
    constant = model.constants.get(node.inputs[0])
    if constant is not None:
        return tuple(constant.dims)
    producer = model.producer.get(node.inputs[0])
    if is_op(node, "DequantizeLinear") and producer is not None and is_op(producer, "QuantizeLinear"):
        return _find_shape(model, producer)
    return model.shape(node.inputs[0])
