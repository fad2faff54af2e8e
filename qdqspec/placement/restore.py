"""Restores names and values of float weights behind a DequantizeLinear."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

from qdqspec.arrays import Array
from qdqspec.graph.dynamic_kernels import CARRIED, QUANTIZE
from qdqspec.graph.model import QDQ_OPS, Model, Node
from qdqspec.graph.protos import DEFAULT_DOMAINS, copied, is_external, metadata
from qdqspec.graph.trt import (
    DYNAMIC_OPS,
    FP4_DYNAMIC,
    MXFP8_DEQUANTIZE,
    MXFP8_DYNAMIC,
    MXFP8_QUANTIZE,
    is_pair_op,
    of_e8m0,
)

# Default axis and block, as in `qdqspec.graph.trt`.
_DEFAULTS = {
    FP4_DYNAMIC: (1, 16),
    MXFP8_DYNAMIC: (-1, 32),
    MXFP8_QUANTIZE: (1, 32),
    MXFP8_DEQUANTIZE: (1, 32),
}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(slots=True)
class FloatWeights:
    """Finds the float form of integer weights, in the reference if it has them."""

    model: Model
    reference: Model | None
    restored: list[str] = field(default_factory=list)
    dequantized: list[str] = field(default_factory=list)

    def name(self, node: Node) -> str:
        """The name of the weight behind this DequantizeLinear in the model without Q/DQ.

        Our own nodes record it; else it is the tensor that the node's consumer reads in the reference; else
        the integer tensor's name without the suffix ``_quantized``; else the node's output.
        """
        if node.outputs[0] in self.model.outputs:
            return node.outputs[0]
        name = (
            metadata(node.proto, CARRIED)
            or self._name_in_reference(node)
            or node.inputs[0].removesuffix("_quantized")
        )
        return name if name != node.inputs[0] and self._is_free(name, node) else node.outputs[0]

    def tensor(self, node: Node, name: str) -> TensorProto:
        """The float weight: the reference's own bytes, or the integers dequantized."""
        original = self._original(node, name)
        if original is None or self.reference is None:
            return numpy_helper.from_array(dequantized(self.model, node), name)
        return within_reach(original, self.reference, self.model)

    def note(self, node: Node, name: str) -> None:
        """Record the source of the float weight."""
        (self.dequantized if self._original(node, name) is None else self.restored).append(name)

    def _original(self, node: Node, name: str) -> TensorProto | None:
        """The reference's constant of that name and shape."""
        found = self.reference.constants.get(name) if self.reference else None
        same = found is not None and list(found.dims) == list(self.model.constants[node.inputs[0]].dims)
        return found if same else None

    def _name_in_reference(self, node: Node) -> str | None:
        if self.reference is None:
            return None
        shape = tuple(self.model.constants[node.inputs[0]].dims)
        for end in self.model.consumers.get(node.outputs[0], ()):
            reader = self.reference.by_name.get(end.node)
            if reader is None or end.input >= len(reader.inputs):
                continue
            name = reader.inputs[end.input]
            constant = self.reference.constants.get(name)
            if constant is not None and tuple(constant.dims) == shape:
                return name
        return None

    def _is_free(self, name: str, node: Node) -> bool:
        """Whether the name is unused, this node's output, or the weight itself."""
        if name == node.outputs[0]:
            return True
        known, integers = self.model.constants.get(name), self.model.constants[node.inputs[0]]
        if known is not None:
            return known.data_type in _FLOATS and tuple(known.dims) == tuple(integers.dims)
        return name not in self.model.producer and name not in self.model.inputs


def dequantized(model: Model, node: Node) -> Array:
    """The values of a DequantizeLinear of a constant, in the type of its scale or of its attribute.

    Per tensor, per channel (any axis) and blocked, after the ONNX operator's definition.
    """
    integers = model.array(node.inputs[0]).astype(np.float64)  # exact for 32-bit integers and 8-bit floats
    scale = scale_of(model, node)
    dtype = int(str(node.attributes.get("output_dtype", 0)))
    if dtype:
        scale = scale.astype(np.float32)  # a power of two may underflow in the type of the result
    axis, block = blocks_of(node)
    zero_point = np.zeros(())
    if len(node.inputs) > 2 and node.inputs[2]:
        zero_point = model.array(node.inputs[2]).astype(np.float64)
    steps = integers - along(zero_point, integers.shape, axis, block)
    real: Array = steps.astype(scale.dtype) * along(scale, integers.shape, axis, block)
    return real.astype(tensor_dtype_to_np_dtype(dtype)) if dtype else real


def blocks_of(node: Node) -> tuple[int, int]:
    """The axis of a Q or DQ, which may be negative, and the number of elements per scale; 0 without blocks."""
    axis, block = _DEFAULTS.get(node.op_type, (1, 0)) if is_pair_op(node.proto) else (1, 0)
    attributes = node.attributes
    return int(str(attributes.get("axis", axis))), int(str(attributes.get("block_size", block)))


def scale_of(model: Model, node: Node) -> Array:
    """The scale of a Q or DQ, which may be a dequantized constant, as in NVFP4."""
    maker = model.producer.get(node.inputs[1])
    if node.inputs[1] not in model.constants and maker is not None:
        return dequantized(model, maker)
    scale = model.array(node.inputs[1])
    return of_e8m0(scale) if node.op_type in (MXFP8_QUANTIZE, MXFP8_DEQUANTIZE) else scale


def within_reach(tensor: TensorProto, owner: Model, reader: Model) -> TensorProto:
    """The tensor as a model in ``reader``'s folder can find it: external data is not moved.

    Its file may be outside that folder, which ONNX does not allow: such data is included when the model is
    written.
    """
    if not is_external(tensor) or owner.path is None or reader.path is None:
        return tensor
    if owner.path.parent == reader.path.parent:
        return tensor
    moved = copied(tensor)
    for entry in moved.external_data:
        if entry.key == "location":
            entry.value = os.path.relpath(owner.path.parent / entry.value, reader.path.parent)
    return moved


def along(values: npt.NDArray[Any], shape: tuple[int, ...], axis: int, block: int) -> npt.NDArray[Any]:
    """Scale or zero point in a shape that broadcasts over the weight's."""
    if values.ndim == 0 or (values.size == 1 and not block):
        return values.reshape(())
    if block:
        axis %= len(shape)
        return np.repeat(values, block, axis=axis).take(range(shape[axis]), axis=axis)
    return values.reshape([-1 if index == axis % len(shape) else 1 for index in range(len(shape))])


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
        return node.domain in DEFAULT_DOMAINS
    return node.op_type in DYNAMIC_OPS and is_pair_op(node.proto)
