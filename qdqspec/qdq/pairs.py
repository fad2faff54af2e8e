"""Makes one Q/DQ pair as ONNX nodes and constants, with onnx-graphsurgeon. `qdqspec.qdq.insert` inserts it.

The pair of a weight may correct the bias of its layer, which compensates the shift of the layer's mean output by the
quantized weight. The bias before correction is in the metadata of the weight's DequantizeLinear, so that stripping
restores it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype

from qdqspec.errors import PlacementError
from qdqspec.graph import Model, Node, WeightStore
from qdqspec.graph.ops import is_default
from qdqspec.graph.protos import all_graphs, copied, metadata, names_in, numbered_name
from qdqspec.graph.trt import (
    DOMAIN,
    FP4_DYNAMIC,
    MXFP8_DEQUANTIZE,
    MXFP8_DYNAMIC,
    MXFP8_QUANTIZE,
    PAIR_OPS,
    as_e8m0,
)
from qdqspec.qdq.dynamic_kernels import CARRIED, QUANTIZE, encoded
from qdqspec.qdq.formats import BIAS_FORMAT, QuantParams, number_format
from qdqspec.qdq.quantizer import REALS, in_type_of, shift_text
from qdqspec.qdq.units import dynamic_misfit
from qdqspec.types import Site

# Q and DQ compute in the type of their scale, and each operator around them expects the tensor's own type.
# This is the first opset that supports it.
_REAL_OPSET: dict[int, int] = {TensorProto.FLOAT: 13, TensorProto.FLOAT16: 19, TensorProto.BFLOAT16: 19}
_BIAS = "qdqspec.bias"  # metadata of a weight's DequantizeLinear
BIAS_INPUT = 2  # of a Conv
_WEIGHT_INPUT = 1


class QuantSource(Protocol):
    """Source of the numbers of a site: calibration, or a scheme file."""

    def params(self, site: Site) -> QuantParams:
        """Scale and zero point of the site."""
        ...

    def integer_weight(self, site: Site) -> npt.NDArray[np.generic]:
        """The integers of a weight site, in the shape of the weight."""
        ...

    def bias_shift(self, site: Site) -> npt.NDArray[np.float32] | None:
        """The shift of the bias of the layer that reads this weight; ``None`` if its bias is unchanged."""
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The nodes and constants of one site. Consumers read ``output``; ``nodes`` are in topological order.

    ``integer`` is the stored weight if there is one; it then has a DequantizeLinear only. ``opset`` is the
    first version of the default operator set that supports the pair. ``bias`` is the corrected bias of the layer
    that reads the weight.
    """

    nodes: tuple[onnx.NodeProto, ...]
    constants: tuple[TensorProto, ...]
    integer: TensorProto | None
    output: str
    opset: int
    bias: CorrectedBias | None = None


def misfit(model: Model, site: Site) -> str | None:
    """The reason why a site does not fit a model, or ``None`` if it does."""
    if not model.ends(site.tensor):
        return "no node of the model reads it"
    if site.weight and site.tensor not in model.constants:
        return "it is placed as a weight but is no constant"
    if site.format == BIAS_FORMAT and not site.weight:
        return f"{BIAS_FORMAT} is for constants: no QuantizeLinear makes it"
    elem_type = model.elem_type(site.tensor)
    if elem_type not in _REAL_OPSET:
        kind = "unknown" if elem_type is None else TensorProto.DataType.Name(elem_type)
        return f"its element type is {kind}, not FLOAT, FLOAT16 or BFLOAT16"
    return _explain_format(model, site) or _explain_consumers(model, site)


def _explain_format(model: Model, site: Site) -> str | None:
    """The reason why the number format of a site does not fit its tensor."""
    fmt = number_format(site.format)
    if fmt.weight_only and not site.weight:
        return f"{fmt.name} is for weights only"
    if fmt.block and site.axis is None:
        return f"{fmt.name} comes in blocks of {fmt.block}, and the site names no axis for them"
    if fmt.at_run_time and site.weight:
        return f"{fmt.name} is for activations only"
    if fmt.at_run_time and model.elem_type(site.tensor) != TensorProto.FLOAT:
        return f"{QUANTIZE} takes FLOAT only"
    is_blocked = fmt.dynamic and not fmt.at_run_time and not site.weight
    return dynamic_misfit(model, site.tensor, fmt, site.axis) if is_blocked else None


def _explain_consumers(model: Model, site: Site) -> str | None:
    """The reason why the consumers of a site are not those of its tensor."""
    if not site.consumers:
        return "the site names no consumer"
    unknown = sorted(set(site.consumers) - set(model.ends(site.tensor)))
    if unknown and unknown[0].is_output:
        return f"it is not graph output {unknown[0].input} of the model"
    if unknown:
        return f"node '{unknown[0].node}' does not read it at input {unknown[0].input}"
    if makes_output(site) and (site.tensor in model.constants or site.tensor not in model.producer):
        return "it is a graph output that no node computes, so its name cannot pass to a pair"
    return None


def makes_output(site: Site) -> bool:
    """Whether the site's pair makes a graph output, which is always the first consumer."""
    return bool(site.consumers) and site.consumers[0].is_output


@dataclass
class PairMaker:
    """Makes the pairs of one model. Names depend on model and site only, never on other sites."""

    model: Model
    numbers: QuantSource
    floating: frozenset[Site] = frozenset()
    store: WeightStore | None = None

    def __post_init__(self) -> None:
        graphs = (*all_graphs(self.model.proto.graph), *all_graphs(self.model.flat.graph))
        self._taken = frozenset().union(*map(names_in, graphs))
        self._private = (
            frozenset(self.model.constants) - frozenset(self.model.outputs) - self.model.subgraph_reads
        )

    def is_private(self, tensor: str) -> bool:
        """Whether only nodes of the model read this constant."""
        return tensor in self._private

    def stores_integers(self, site: Site) -> bool:
        """Whether the site becomes a stored integer weight.

        A constant of rank 0, or one that a Concat reads, stays float and gets both operators: some compilers refuse
        stored integers there (TRT061, TRT074), and the constant keeps its rank, which may be that of the result.
        """
        if site.format == BIAS_FORMAT or not site.weight:
            return site.weight
        nodes = (self.model.by_name.get(end.node) for end in site.consumers)
        is_joined = any(node is not None and node.op_type == "Concat" for node in nodes)
        return site not in self.floating and bool(self.model.constants[site.tensor].dims) and not is_joined

    def float_name(self, tensor: str) -> str:
        """The new name of a graph output's float tensor before the pair: ``y_float``; ``y_float~1`` if taken."""
        return numbered_name(f"{tensor}_float", self._taken)

    def make(self, site: Site, *, source: str = "", whole: Site | None = None) -> Pair:
        """The pair of a site. Raises `PlacementError` naming tensor and model if it does not fit.

        ``source`` is the tensor to quantize if its name differs from the site's. If the site is the part of a
        ``whole`` one that one graph reads, the constants are those of the whole.
        """
        why = misfit(self.model, site)
        if why is not None:
            raise PlacementError(
                f"tensor '{site.tensor}' cannot be quantized: {why}",
                where=self.model.where,
                cure="make the placement for this very model",
            )
        whole = whole or site
        elem_type = self.model.elem_type(site.tensor) or 0
        params = in_type_of(self.numbers.params(whole), elem_type)
        quantized, output = self._make_name(site, "_quantized"), self._make_name(site, "_dequantized")
        # consumers and later tools find a stored weight that all consumers read under the weight's name
        is_alone = self.stores_integers(site) and self.is_private(site.tensor) and self._covers_all(site)
        if makes_output(site) or is_alone:
            output = site.tensor
        opset = max(_REAL_OPSET[elem_type], params.format.opset)
        if params.is_dynamic:
            dynamic, constants = self._make_dynamic(site, params, elem_type, source or site.tensor, output)
            return Pair(nodes=dynamic, constants=constants, integer=None, output=output, opset=opset)
        names, constants, nodes = self._make_numbers(whole, params, elem_type)
        quantize, dequantize = "QuantizeLinear", "DequantizeLinear"
        if _has_powers(params):
            quantize, dequantize = MXFP8_QUANTIZE, MXFP8_DEQUANTIZE
        integer = None
        if self.stores_integers(whole):
            quantized = self._make_name(whole, "_quantized")
            stored = np.asarray(self.numbers.integer_weight(whole), dtype=params.format.dtype)
            integer = _make_tensor(quantized, stored)
        else:
            # an attribute gives the output type if no zero point does
            typed = {} if params.has_zero_point else {"output_dtype": params.format.elem_type}
            attributes = _write_axis(params) | typed
            read = [source or site.tensor, *names]
            nodes.append(self._make_node(quantize, site, attributes, read, quantized))
        # The output has the scale's type by default, which exponents must not be.
        attributes = _write_axis(params) | ({"output_dtype": elem_type} if _has_powers(params) else {})
        nodes.append(self._make_node(dequantize, site, attributes, [quantized, *names], output))
        bias = self._correct_bias(whole)
        if bias is not None:
            nodes[-1].metadata_props.add(key=_BIAS, value=bias.record)
        return Pair(
            nodes=tuple(nodes),
            constants=constants,
            integer=integer if integer is None or self.store is None else self.store.externalize(integer),
            output=output,
            opset=opset,
            bias=bias,
        )

    def _correct_bias(self, site: Site) -> CorrectedBias | None:
        """The bias of the layer that reads a weight plus its shift, in its own type; ``None`` without a shift."""
        shift = self.numbers.bias_shift(site) if site.weight else None
        layer = None if shift is None else biased_layer(self.model, site)
        if shift is None or layer is None:
            return None
        weight = self.model.constants[layer.node.inputs[_WEIGHT_INPUT]]
        name = layer.bias or self._make_name(site, "_bias")
        record = {"name": name, "shift": shift_text(shift)}
        if layer.bias:
            own = self.model.array(layer.bias)
            value = (own.astype(np.float32) + shift).astype(own.dtype)
            before = copied(self.model.constants[layer.bias])
            if before.external_data:
                before = _make_tensor(layer.bias, own)
            record["before"] = encoded(before)
        else:
            value = shift.astype(tensor_dtype_to_np_dtype(weight.data_type))
        return CorrectedBias(
            value=_make_tensor(name, value), is_added=not layer.bias, record=json.dumps(record)
        )

    def _make_dynamic(
        self, site: Site, params: QuantParams, elem_type: int, source: str, output: str
    ) -> tuple[tuple[onnx.NodeProto, ...], tuple[TensorProto, ...]]:
        """Nodes and constants of an activation whose scales are found when the model runs.

        It has one scale and zero point, or scales of blocks by operators of domain ``trt``.
        """
        fmt = params.format
        if not fmt.block:
            made = [self._make_name(site, kind) for kind in ("_quantized", "_scale", "_zero_point")]
            quantize = self._make_node(QUANTIZE, site, {}, [source], *made)
            return (quantize, self._make_node("DequantizeLinear", site, {}, made, output)), ()
        quantized, scale, stored, outer = (
            self._make_name(site, kind)
            for kind in ("_quantized", "_scale", "_scale_quantized", "_scale_scale")
        )
        along = {"axis": -1, "block_size": fmt.block}
        if params.outer is None:
            attributes = along | {"output_dtype": fmt.elem_type}
            nodes = [self._make_node(MXFP8_DYNAMIC, site, attributes, [source], quantized, scale)]
            attributes = along | {"output_dtype": elem_type}
            nodes.append(self._make_node(MXFP8_DEQUANTIZE, site, attributes, [quantized, scale], output))
            constants: tuple[TensorProto, ...] = ()
        else:
            attributes = along | {"scale_type": fmt.scale_type or 0}
            undo = self._make_node("DequantizeLinear", site, {}, [stored, outer], scale, part="_scale")
            nodes = [
                self._make_node(FP4_DYNAMIC, site, attributes, [source, outer], quantized, stored),
                undo,
                self._make_node("DequantizeLinear", site, along, [quantized, scale], output),
            ]
            constants = (_make_tensor(outer, params.outer.astype(REALS[elem_type])),)
        return tuple(nodes), constants

    def _make_numbers(
        self, site: Site, params: QuantParams, elem_type: int
    ) -> tuple[list[str], tuple[TensorProto, ...], list[onnx.NodeProto]]:
        """The names of scale and, if present, zero point; their values; and the nodes of a scale of two levels."""
        fmt, real = params.format, REALS[elem_type]
        shape = params.scale.shape if fmt.block or params.axis is None else (-1,)
        if _has_powers(params):
            values: npt.NDArray[np.generic] = as_e8m0(params.scale)
        else:
            kind = tensor_dtype_to_np_dtype(fmt.scale_type) if fmt.scale_type else real
            values = params.scale.reshape(shape).astype(kind)
        scale, nodes = self._make_name(site, "_scale"), []
        if params.outer is None:
            constants = [_make_tensor(scale, values)]
        else:
            stored, outer = (self._make_name(site, f"_scale_{part}") for part in ("quantized", "scale"))
            constants = [_make_tensor(stored, values), _make_tensor(outer, params.outer.astype(real))]
            nodes = [self._make_node("DequantizeLinear", site, {}, [stored, outer], scale, part="_scale")]
        names = [scale]
        if params.has_zero_point:
            names.append(self._make_name(site, "_zero_point"))
            constants.append(_make_tensor(names[1], params.zero_point.reshape(shape).astype(fmt.dtype)))
        return names, tuple(constants), nodes

    def _make_node(
        self,
        op_type: str,
        site: Site,
        attributes: dict[str, int],
        inputs: list[str],
        *outputs: str,
        part: str = "",
    ) -> onnx.NodeProto:
        node = copied(_make_blank(op_type, tuple(attributes.items())))
        node.name = self._make_name(site, f"{part}_{op_type}")
        node.input.extend(inputs)
        node.output.extend(outputs)
        node.metadata_props.add(key=CARRIED, value=site.tensor)
        return node

    def _make_name(self, site: Site, kind: str) -> str:
        """``x_scale``; ``x_scale.2`` if only consumers from the third on are meant; ``x_scale~1`` if taken.

        If a graph output is meant and not all others, it is ``x_scale.output``. Names of two sites of a
        placement are distinct: the sites differ in tensor or in first consumer, and the suffixes are
        unambiguous.
        """
        part = ""
        if not self._covers_all(site):
            first = site.consumers[0]
            known = self.model.consumers[site.tensor]
            part = ".output" if first.is_output else f".{known.index(first)}"
        return numbered_name(f"{site.tensor}{kind}{part}", self._taken)

    def _covers_all(self, site: Site) -> bool:
        """Whether each node that reads the tensor reads the pair."""
        readers = {end for end in site.consumers if not end.is_output}
        return len(readers) == len(self.model.consumers.get(site.tensor, ()))


def _write_axis(params: QuantParams) -> dict[str, int]:
    attributes = {} if params.axis is None else {"axis": params.axis}
    return attributes | ({"block_size": params.format.block} if params.format.block else {})


def _has_powers(params: QuantParams) -> bool:
    """Whether scales are powers of two, stored as exponents, which only operators of domain ``trt`` support."""
    return params.format.scale_type == TensorProto.FLOAT8E8M0


def _make_tensor(name: str, values: npt.NDArray[np.generic]) -> TensorProto:
    """Made without graphsurgeon, which does not support sub-byte types and prints that to standard output."""
    return numpy_helper.from_array(np.asarray(values, order="C"), name)  # not `ascontiguousarray`: scalars


@cache
def _make_blank(op_type: str, attributes: tuple[tuple[str, int], ...]) -> onnx.NodeProto:
    """A node from graphsurgeon without name and tensors. Cached: a model takes thousands of a kind."""
    import onnx_graphsurgeon as gs  # late: stripping needs this module, and makes no node

    domain = DOMAIN if op_type in PAIR_OPS else None
    ends = {"inputs": [gs.Variable("x")], "outputs": [gs.Variable("y")]}
    node = gs.Node(op_type, "", dict(attributes), **ends, domain=domain)
    graph = gs.export_onnx(gs.Graph(nodes=[node], inputs=[], outputs=[]), do_type_check=False).graph
    blank: onnx.NodeProto = graph.node[0]
    for field in ("name", "input", "output"):
        blank.ClearField(field)
    return blank


# ---- corrected biases -------------------------------------------------------------------------------


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


def bias_record(node: Node) -> Mapping[str, object] | None:
    """The record that a DequantizeLinear's metadata holds; ``None`` without one, or if it is damaged."""
    text = metadata(node.proto, _BIAS)
    try:
        record = None if text is None else json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("name"), str) else None


def biases_before(model: Model, removed: Collection[int]) -> dict[str, TensorProto | None]:
    """The biases before correction, by name; ``None`` for a bias that the correction added."""
    before: dict[str, TensorProto | None] = {}
    for node in (model.nodes[index] for index in removed):
        record = bias_record(node)
        name = "" if record is None else str(record["name"])
        if record is None or name not in model.constants:
            continue
        value = base64.b64decode(str(record["before"])) if "before" in record else None
        before[name] = None if value is None else TensorProto.FromString(value)
    return before
