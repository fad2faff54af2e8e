"""Single Q and DQ of any tool: which operators they are, and the numbers that their inputs and attributes state.

The numbers of a pair are described as they are, whether or not a placement can express them: a comparison of models
covers 4-bit blocks as well as 8-bit channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from qdqspec._core.arrays import Array
from qdqspec.graph import QDQ_OPS, QUANTIZE, Model, Node
from qdqspec.graph.ops import FLOATS, is_default
from qdqspec.graph.trt import (
    DOMAIN,
    DYNAMIC_OPS,
    FP4_DYNAMIC,
    MXFP8_DEQUANTIZE,
    MXFP8_DYNAMIC,
    MXFP8_QUANTIZE,
    PAIR_OPS,
    is_pair_op,
    of_e8m0,
)
from qdqspec.qdq.scales import along

_DOMAINS = ("", "ai.onnx", "com.microsoft")
COMPUTED = "its scale or zero point is computed"
RESCALES = "its DequantizeLinear has other numbers than its QuantizeLinear"
# default axis and block, as in `qdqspec.graph.trt`
_DEFAULTS = {
    FP4_DYNAMIC: (1, 16),
    MXFP8_DYNAMIC: (-1, 32),
    MXFP8_QUANTIZE: (1, 32),
    MXFP8_DEQUANTIZE: (1, 32),
}


def is_op(node: Node, op_type: str) -> bool:
    """Whether a node is a QuantizeLinear or DequantizeLinear, or another operator with that role in a pair."""
    if node.domain == DOMAIN:
        return PAIR_OPS.get(node.op_type, node.op_type) == op_type
    if node.op_type == QUANTIZE:
        return op_type == "QuantizeLinear" and node.domain in _DOMAINS
    return node.op_type == op_type and node.domain in _DOMAINS


def is_qdq(node: Node) -> bool:
    """Whether a node is either of the two."""
    return is_op(node, "QuantizeLinear") or is_op(node, "DequantizeLinear")


def dequantized(model: Model, node: Node) -> Array:
    """The values of a DequantizeLinear of a constant, in the type of its scale or of its attribute.

    Per tensor, per channel (any axis) and blocked, after the ONNX operator's definition.
    """
    integers = model.array(node.inputs[0]).astype(np.float64)  # exact for 32-bit integers and 8-bit floats
    scale = scale_of(model, node)
    dtype = node.number("output_dtype", 0)
    if dtype:
        scale = scale.astype(np.float32)  # a power of two may underflow in the type of the result
    axis, block = blocks_of(node)
    given = node.input_at(2)
    zero_point = model.array(given).astype(np.float64) if given else np.zeros(())
    steps = integers - along(zero_point, integers.shape, axis, block)
    real: Array = steps.astype(scale.dtype) * along(scale, integers.shape, axis, block)
    return real.astype(tensor_dtype_to_np_dtype(dtype)) if dtype else real


def blocks_of(node: Node) -> tuple[int, int]:
    """The axis of a Q or DQ, which may be negative, and the number of elements per scale; 0 without blocks."""
    axis, block = _DEFAULTS.get(node.op_type, (1, 0)) if is_pair_op(node.proto) else (1, 0)
    return node.number("axis", axis), node.number("block_size", block)


def scale_of(model: Model, node: Node) -> Array:
    """The scale of a Q or DQ, which may be a dequantized constant, as in NVFP4."""
    maker = model.producer.get(node.inputs[1])
    if node.inputs[1] not in model.constants and maker is not None:
        return dequantized(model, maker)
    scale = model.array(node.inputs[1])
    return of_e8m0(scale) if node.op_type in (MXFP8_QUANTIZE, MXFP8_DEQUANTIZE) else scale


def is_constant(model: Model, tensors: tuple[str, ...]) -> bool:
    """Whether all these tensors (empty names aside) are constants of the model, or dequantized scales."""
    return all(
        name in model.constants
        or (makes_scale(model, name) and model.producer[name].inputs[0] in model.constants)
        for name in tensors
        if name
    )


def makes_scale(model: Model, tensor: str) -> bool:
    """Whether a DequantizeLinear makes a tensor from constants that is only used as a scale.

    Its input may also be the scales that dynamic quantization computed.
    """
    maker = model.producer.get(tensor)
    ends = model.consumers.get(tensor, ())
    return (
        maker is not None
        and maker.op_type == "DequantizeLinear"
        and all(name in model.constants for name in maker.inputs[1:] if name)
        and (maker.inputs[0] in model.constants or found_scales(model, maker.inputs[0]) is not None)
        and bool(ends)
        and all(end.input == 1 and model.by_name[end.node].op_type in QDQ_OPS for end in ends)
    )


def found_scales(model: Model, tensor: str) -> Node | None:
    """The node that computed these scales of blocks in dynamic quantization; ``None`` for other tensors."""
    maker = model.producer.get(tensor)
    return maker if maker is not None and is_dynamic(maker) and tensor in maker.outputs[1:] else None


def is_dynamic(node: Node) -> bool:
    """Whether a node computes scales while it quantizes: of blocks, or one of the whole tensor."""
    if node.op_type == QUANTIZE:
        return is_default(node)
    return node.op_type in DYNAMIC_OPS and is_pair_op(node.proto)


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
        keys = []
        for each in (self, other):
            kind = each.format, each.axis, each.block, each.precision, each.dynamic
            keys.append((*kind, each.step.shape, each.step.tobytes(), each.zero_point.tobytes()))
        return keys[0] == keys[1]


def read_numbers(model: Model, dequantize: Node, quantize: Node | None) -> tuple[Numbers | None, str]:
    """The numbers of a pair, or of a DequantizeLinear alone; ``None`` and the reason if they are unknown."""
    if quantize is not None and is_dynamic(quantize):
        numbers = _read_dynamic(model, dequantize, quantize)
        return numbers, "" if numbers is not None else RESCALES
    nodes = (dequantize,) if quantize is None else (quantize, dequantize)
    if not all(is_constant(model, node.inputs[1:]) for node in nodes):
        return None, COMPUTED
    # the element type of the integers: uint8 by default for a QuantizeLinear
    first = nodes[0]
    zero_point = first.input_at(2)
    if is_pair_op(first.proto):  # with scales that are powers of two
        elem_type: int = TensorProto.FLOAT8E4M3FN
    elif quantize is None and first.inputs[0] in model.constants:
        elem_type = model.constants[first.inputs[0]].data_type
    elif zero_point:
        elem_type = model.constants[zero_point].data_type
    else:
        elem_type = first.number("output_dtype", 0) or TensorProto.UINT8
    name = str(TensorProto.DataType.Name(elem_type)).lower()
    read = [_read_stored(model, node, name, (quantize or dequantize).inputs[0]) for node in nodes]
    return (read[0], "") if read[0].same(read[-1]) else (None, RESCALES)


def _read_dynamic(model: Model, dequantize: Node, quantize: Node) -> Numbers | None:
    """The parameters of a dynamically quantizing pair; ``None`` if Q and DQ do not match."""
    one, zero = np.ones((), np.float32), np.zeros((), np.float32)
    if quantize.op_type == QUANTIZE:
        if dequantize.inputs != quantize.outputs:
            return None
        if quantize.inputs[0] not in model.constants:
            return Numbers(format="uint8", scale=one, zero_point=zero, dynamic=True)
        values = model.array(
            quantize.inputs[0]
        )  # the operator computes the numbers, by its definition in ONNX
        low, high = (np.float32(limit) for limit in (values.min(initial=0), values.max(initial=0)))
        scale = np.array((high - low) / np.float32(255) or 1, np.float32)
        zero_point = np.array(np.clip(np.rint(-low / scale), 0, 255), np.float32)
        return Numbers(format="uint8", scale=scale, zero_point=zero_point)
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
        scale=one,
        zero_point=zero,
        axis=axis + rank if axis < 0 else axis,
        block=block,
        scale_type=TensorProto.FLOAT8E4M3FN if four_bits else TensorProto.FLOAT8E8M0,
        outer=outer,
        dynamic=True,
    )


def _read_stored(model: Model, node: Node, format_name: str, tensor: str) -> Numbers:
    """The numbers that a Q or DQ of a tensor states: its axis is counted from 0, and ``None`` for a single scale.

    A scale of shape [1] is one for the whole tensor, unless the named axis has one element itself.
    """
    scale, outer = scale_of(model, node).astype(np.float32), None
    stored: int = TensorProto.FLOAT8E8M0
    maker = model.producer.get(node.inputs[1])
    if node.inputs[1] not in model.constants and maker is not None:
        stored, factor = model.constants[maker.inputs[0]].data_type, model.array(maker.inputs[1])
        if len(maker.inputs) == 2 and factor.size == 1:
            scale = model.array(maker.inputs[0]).astype(np.float32)
            outer = factor.astype(np.float32).reshape(())
        else:
            stored = TensorProto.FLOAT  # only the result of the operator is known
    elif not is_pair_op(node.proto):
        stored = model.constants[node.inputs[1]].data_type
    zero_point = np.zeros(scale.shape, np.float32)
    if given := node.input_at(2):
        zero_point = zero_point + model.array(given).astype(np.float32).reshape(zero_point.shape)
    constant = model.constants.get(tensor)
    shape = model.shape(tensor) if constant is None else tuple(constant.dims)
    at, block = blocks_of(node)
    at = at + len(shape) if at < 0 and shape is not None else at
    axis: int | None = at
    if scale.size == 1:
        is_named = any(attribute.name == "axis" for attribute in node.proto.attribute)
        is_one = shape is not None and 0 <= at < len(shape) and shape[at] == 1
        axis = at if scale.ndim and is_named and is_one else None
    if axis is None:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    return Numbers(
        format=format_name,
        scale=scale,
        zero_point=zero_point,
        axis=axis,
        block=block,
        precision=node.number("precision", 0),
        scale_type=None if stored in FLOATS else stored,
        outer=outer,
    )
