"""Corrected biases, which compensate the shift of a layer's mean output by its quantized weight.

The bias before correction is in the metadata of the weight's DequantizeLinear, so that stripping restores it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from qdqspec.graph.dynamic_kernels import encoded
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_default
from qdqspec.graph.protos import copied, metadata
from qdqspec.qdq.quantize.corrections import shift_text
from qdqspec.types import Site

BIAS = "qdqspec.bias"  # metadata of a weight's DequantizeLinear
BIAS_INPUT = 2  # of a Conv
_WEIGHT_INPUT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedLayer:
    """A Conv whose bias can be changed: ``bias`` is its constant, "" if it has none."""

    node: Node
    bias: str
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedBias:
    """The bias of a layer with a shift. ``is_added`` is whether the layer had none before."""

    value: TensorProto
    is_added: bool
    record: str  # for the metadata: name, shift, and value before


def biased_layer(model: Model, site: Site) -> BiasedLayer | None:
    """The Conv that alone reads a weight, if no other node reads its bias or if it has none; else ``None``.

    Omitted are biases that callers can feed, and nodes in bodies. A MatMul has no bias, and that of a Gemm is stored in
    int32 or read by kernels that compute ranges at run time.
    """
    ends = model.consumers.get(site.tensor, ())
    node = model.by_name[ends[0].node] if len(ends) == 1 else None
    if node is None or node.op_type != "Conv" or not is_default(node) or node.scope:
        return None
    weight = model.constants.get(site.tensor)
    if ends[0].input != _WEIGHT_INPUT or weight is None or not weight.dims:
        return None
    channels = weight.dims[0]
    bias = node.input_at(BIAS_INPUT)
    if not bias:
        is_free = len(node.inputs) == BIAS_INPUT
        return BiasedLayer(node=node, bias="", channels=channels) if is_free else None
    constant = model.constants.get(bias)
    is_private = len(model.consumers.get(bias, ())) == 1 and bias not in {
        *model.outputs,
        *model.subgraph_reads,
    }
    is_fed = any(value.name == bias for value in model.flat.graph.input)
    if constant is None or not is_private or is_fed or list(constant.dims) != [channels]:
        return None
    return BiasedLayer(node=node, bias=bias, channels=channels)


def corrected_bias(
    model: Model, layer: BiasedLayer, shift: npt.NDArray[np.float32], free_name: str
) -> CorrectedBias:
    """The bias of a layer plus the shift, in its own type; under ``free_name`` if the layer has none."""
    weight = model.constants[layer.node.inputs[_WEIGHT_INPUT]]
    real = onnx.helper.tensor_dtype_to_np_dtype(weight.data_type)
    if not layer.bias:
        value, before = shift.astype(real), None
    else:
        own = model.array(layer.bias)
        value = (own.astype(np.float32) + shift).astype(own.dtype)
        before = copied(model.constants[layer.bias])
        if before.external_data:
            before = numpy_helper.from_array(np.ascontiguousarray(own), layer.bias)
    name = layer.bias or free_name
    record = {"name": name, "shift": shift_text(shift)}
    record |= {} if before is None else {"before": encoded(before)}
    return CorrectedBias(
        value=numpy_helper.from_array(np.ascontiguousarray(value), name),
        is_added=before is None,
        record=json.dumps(record),
    )


def bias_record(node: Node) -> Mapping[str, object] | None:
    """The record that a DequantizeLinear's metadata holds; ``None`` without one, or if it is damaged."""
    text = metadata(node.proto, BIAS)
    try:
        record = None if text is None else json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("name"), str) else None


def biases_before(model: Model, removed: Collection[int]) -> dict[str, TensorProto | None]:
    """The biases before correction, by name; ``None`` for a bias that the correction added."""
    found: dict[str, TensorProto | None] = {}
    for node in (model.nodes[index] for index in removed):
        record = bias_record(node)
        name = "" if record is None else str(record["name"])
        if record is None or name not in model.constants:
            continue
        before = base64.b64decode(str(record["before"])) if "before" in record else None
        found[name] = None if before is None else TensorProto.FromString(before)
    return found
