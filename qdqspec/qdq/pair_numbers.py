"""Single Q and DQ of any tool: which operators they are, and the numbers that their inputs and attributes state.

The numbers of a pair are described as they are, whether or not a placement can express them: a comparison of models
covers 4-bit blocks as well as 8-bit channels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from qdqspec._core.arrays import Array
from qdqspec.errors import ModelError
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import FLOATS, QDQ_OPS, is_default
from qdqspec.graph.trt import (
    DOMAIN,
    DYNAMIC_OPS,
    FP4_DYNAMIC,
    MXFP8_DEQUANTIZE,
    MXFP8_DYNAMIC,
    MXFP8_QUANTIZE,
    PAIR_OPS,
    POWERS_OF_TWO,
    is_pair_op,
    of_e8m0,
)
from qdqspec.qdq.dynamic_kernels import QUANTIZE
from qdqspec.qdq.formats import RUN_TIME, QuantParams, along, format_stored_as, number_format
from qdqspec.qdq.quantizer import run_time_params

_DOMAINS = ("", "ai.onnx", "com.microsoft")
COMPUTED = "its scale or zero point is computed"
RESCALES = "its DequantizeLinear has other numbers than its QuantizeLinear"
UNEQUAL = "it has another number of zero points than of scales"
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
    try:
        step = along(scale, integers.shape, axis, block)
        steps = integers - along(zero_point, integers.shape, axis, block)
        real: Array = steps.astype(scale.dtype) * step
        fits = real.shape == integers.shape and (not block or step.shape == integers.shape)
    except (ValueError, IndexError):
        fits = False
    if not fits:
        shapes = f"scales of shape {list(scale.shape)} for integers of shape {list(integers.shape)}"
        along_axis = f"in blocks of {block} along axis {axis}" if block else f"along axis {axis}"
        what = f"'{node.name}' has {shapes}, which do not fit {along_axis}"
        raise ModelError(
            what, where=model.where, cure="quantize again, with a scale for each channel or block"
        )
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
    return of_e8m0(scale) if node.op_type in POWERS_OF_TWO else scale


def stated_numbers(model: Model, node: Node) -> tuple[Array | None, Array | None]:
    """Scale and zero point of a Q or DQ as its inputs have them, ``None`` for one that is computed.

    A zero point that is not given is zero, in the shape of the scale.
    """
    scale = scale_of(model, node) if is_constant(model, node.inputs[1:2]) else None
    if given := node.input_at(2):
        return scale, model.array(given) if given in model.constants else None
    return scale, None if scale is None else np.zeros(scale.shape)


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


def read_params(model: Model, dequantize: Node, quantize: Node | None) -> tuple[QuantParams | None, str]:
    """The numbers of a pair, or of a DequantizeLinear alone; ``None`` and the reason if they are unknown."""
    if quantize is not None and is_dynamic(quantize):
        params = _read_dynamic(model, dequantize, quantize)
        why = RESCALES if is_constant(model, quantize.inputs[1:2]) else COMPUTED
        return params, "" if params is not None else why
    nodes = (dequantize,) if quantize is None else (quantize, dequantize)
    if not all(is_constant(model, node.inputs[1:]) for node in nodes):
        return None, COMPUTED
    stated = (stated_numbers(model, node) for node in nodes)
    if any(scale is None or zero is None or zero.size not in (1, scale.size) for scale, zero in stated):
        return None, UNEQUAL
    # the element type of the integers: uint8 by default for a QuantizeLinear
    first = nodes[0]
    zero_point = first.input_at(2)
    if is_pair_op(first.proto):  # without a zero point
        elem_type: int = TensorProto.FLOAT8E4M3FN
    elif quantize is None and first.inputs[0] in model.constants:
        elem_type = model.constants[first.inputs[0]].data_type
    elif zero_point:
        elem_type = model.constants[zero_point].data_type
    else:
        elem_type = first.number("output_dtype", 0) or TensorProto.UINT8
    read = [_read_stored(model, node, elem_type, (quantize or dequantize).inputs[0]) for node in nodes]
    # a QuantizeLinear alone has this attribute
    read[-1] = replace(read[-1], precision=read[0].precision)
    many, few = (read[0], read[-1]) if read[0].scale.size >= read[-1].scale.size else (read[-1], read[0])
    if few.scale.size == 1:  # one scale may stand for all
        shape = many.scale.shape
        scale, point = np.resize(few.scale, shape), np.resize(few.zero_point, shape)
        few = replace(few, scale=scale, zero_point=point, axis=many.axis)
    return (many, "") if many.same(few) else (None, RESCALES)


def _read_dynamic(model: Model, dequantize: Node, quantize: Node) -> QuantParams | None:
    """The parameters of a dynamically quantizing pair; ``None`` if Q and DQ do not match."""
    if quantize.op_type == QUANTIZE:
        if dequantize.inputs != quantize.outputs:
            return None
        if quantize.inputs[0] not in model.constants:
            return run_time_params(number_format(RUN_TIME))
        values = model.array(
            quantize.inputs[0]
        )  # the operator computes the numbers, by its definition in ONNX
        low, high = (np.float32(limit) for limit in (values.min(initial=0), values.max(initial=0)))
        scale = np.array((high - low) / np.float32(255) or 1, np.float32)
        zero_point = np.array(np.clip(np.rint(-low / scale), 0, 255), np.float32)
        return QuantParams(number_format("uint8"), scale, zero_point)
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
    stored = TensorProto.FLOAT8E4M3FN, block, TensorProto.FLOAT8E8M0
    if quantize.op_type == FP4_DYNAMIC:
        stored = TensorProto.FLOAT4E2M1, block, TensorProto.FLOAT8E4M3FN
    params = run_time_params(format_stored_as(*stored))
    zero = np.zeros((), np.float32)
    return replace(params, axis=axis + rank if axis < 0 else axis, outer=outer, zero_point=zero)


def _read_stored(model: Model, node: Node, elem_type: int, tensor: str) -> QuantParams:
    """The numbers that a Q or DQ of a tensor states: its axis is counted from 0, and ``None`` for a single scale.

    A scale of shape [1] is one for the whole tensor, unless the named axis has one element itself.
    """
    (scale, zero_point), outer = (np.asarray(each, np.float32) for each in stated_numbers(model, node)), None
    stored: int = TensorProto.FLOAT8E8M0
    maker = model.producer.get(node.inputs[1])
    if node.inputs[1] not in model.constants and maker is not None:
        stored, factor = model.constants[maker.inputs[0]].data_type, model.array(maker.inputs[1])
        if len(maker.inputs) == 2 and factor.size == 1:
            scale = model.array(maker.inputs[0]).astype(np.float32)
            outer = factor.astype(np.float32).reshape(())
        else:
            stored = TensorProto.FLOAT  # only the result of the operator is known
    elif node.op_type not in POWERS_OF_TWO:
        stored = model.constants[node.inputs[1]].data_type
    # one may stand for all
    zero_point = (
        np.resize(zero_point, scale.shape) if zero_point.size == 1 else zero_point.reshape(scale.shape)
    )
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
    fmt = format_stored_as(elem_type, block, None if stored in FLOATS else stored)
    return QuantParams(fmt, scale, zero_point, axis, outer, precision=node.number("precision", 0))
