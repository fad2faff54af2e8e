"""One Q/DQ pair as ONNX nodes and constants, built with onnx-graphsurgeon.

May import floors 0 to 2, numpy, onnx and onnx-graphsurgeon. Knows how a pair looks, not where it is put.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.graph.protos import all_graphs
from qdqspec.graph.weights import WeightStore
from qdqspec.quantize.formats import BIAS_FORMAT, QuantParams
from qdqspec.types import Site

MARK = "qdqspec.tensor"  # node metadata of what we insert: the tensor whose values the node carries

# Q and DQ compute in the type of their scale, and every operator around them expects the tensor's own.
_REALS: dict[int, tuple[type[np.floating], int]] = {
    onnx.TensorProto.FLOAT: (np.float32, 10),
    onnx.TensorProto.FLOAT16: (np.float16, 19),  # the first opset with float16 scales
}


class QuantSource(Protocol):
    """Where the numbers of a site come from: calibration, or a scheme file."""

    def params(self, site: Site) -> QuantParams:
        """Scale and zero point of the site."""
        ...

    def integer_weight(self, site: Site) -> npt.NDArray[np.generic]:
        """The integers of a weight site, in the shape of the weight."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What stands for one site. Consumers read ``output``; ``nodes`` come in topological order.

    ``integer`` is the stored weight where there is one; it then has a DequantizeLinear only.
    ``opset`` is the first version of the default operator set that takes the pair.
    """

    nodes: tuple[onnx.NodeProto, ...]
    constants: tuple[onnx.TensorProto, ...]
    integer: onnx.TensorProto | None
    output: str
    opset: int


def misfit(model: Model, site: Site) -> str | None:
    """Why a site does not fit a model, or ``None`` where it does."""
    if site.tensor not in model.consumers:
        return "no node of the model reads it"
    if site.weight and site.tensor not in model.constants:
        return "it is placed as a weight but is no constant"
    if site.format == BIAS_FORMAT and not site.weight:
        return f"{BIAS_FORMAT} is for constants: no QuantizeLinear makes it"
    elem_type = model.elem_type(site.tensor)
    if elem_type not in _REALS:
        kind = "unknown" if elem_type is None else onnx.TensorProto.DataType.Name(elem_type)
        return f"its element type is {kind}, not FLOAT or FLOAT16"
    if not site.consumers:
        return "the site names no consumer"
    strangers = sorted(set(site.consumers) - set(model.consumers[site.tensor]))
    return f"node '{strangers[0].node}' does not read it at input {strangers[0].input}" if strangers else None


class PairMaker:
    """Makes the pairs of one model. Names depend on model and site only, never on other sites."""

    def __init__(
        self,
        model: Model,
        numbers: QuantSource,
        *,
        integer_weights: bool,
        floating: frozenset[Site] = frozenset(),
        store: WeightStore | None = None,
    ) -> None:
        self._model = model
        self._store = store
        self._numbers = numbers
        self._integer_weights = integer_weights
        self._floating = floating
        self._taken = frozenset(_all_names(model.proto))
        self._private = frozenset(model.constants) - frozenset(model.outputs) - model.subgraph_reads

    def is_private(self, tensor: str) -> bool:
        """Whether nobody but nodes of the main graph can see this constant."""
        return tensor in self._private

    def stores_integers(self, site: Site) -> bool:
        """Whether the site becomes a stored integer weight."""
        if site.format == BIAS_FORMAT:
            return site.weight
        return site.weight and self._integer_weights and site not in self._floating

    def make(self, site: Site) -> Pair:
        """The pair of a site. Raises `PlacementError` naming tensor and model where it does not fit."""
        self._check(site)
        real, opset = _REALS[self._model.elem_type(site.tensor) or 0]
        params = self._numbers.params(site)
        scale, zero_point = self._constants(site, params, real)
        source, output = self._ends(site)
        attributes = {} if params.axis is None else {"axis": params.axis}
        integer = None
        quantized = gs.Variable(self._name(site, "_quantized"))
        nodes = []
        if self.stores_integers(site):
            quantized = gs.Constant(quantized.name, self._integers(site, params))
            integer = quantized
        else:
            nodes.append(
                self._node("QuantizeLinear", site, attributes, [source, scale, zero_point], quantized)
            )
        nodes.append(self._node("DequantizeLinear", site, attributes, [quantized, scale, zero_point], output))
        pair = _exported(nodes, site.tensor, integer, max(opset, _opset(params)))
        if pair.integer is not None and self._store is not None:
            return replace(pair, integer=self._store.externalize(pair.integer))
        return pair

    def _check(self, site: Site) -> None:
        why = misfit(self._model, site)
        if why is not None:
            raise PlacementError(
                f"tensor '{site.tensor}' cannot be quantized: {why}",
                where=self._model.where,
                cure="make the placement for this very model",
            )

    def _constants(
        self, site: Site, params: QuantParams, real: type[np.floating]
    ) -> tuple[gs.Constant, gs.Constant]:
        shape = () if params.axis is None else (-1,)
        # The smallest positive number stands in where a scale vanishes in float16: a scale of 0 divides by 0.
        scale = np.maximum(params.scale.reshape(shape).astype(real), np.finfo(real).smallest_subnormal)
        zero_point = params.zero_point.reshape(shape).astype(params.format.dtype)
        return (
            gs.Constant(self._name(site, "_scale"), np.asarray(scale, real)),
            gs.Constant(self._name(site, "_zero_point"), zero_point),
        )

    def _integers(self, site: Site, params: QuantParams) -> npt.NDArray[np.generic]:
        values = self._numbers.integer_weight(site)
        return np.ascontiguousarray(values, dtype=params.format.dtype)

    def _ends(self, site: Site) -> tuple[gs.Variable, gs.Variable]:
        """The tensor before the pair and the one after it.

        A stored integer weight that everybody reads takes over the weight's name, so that its consumers,
        and who looks for the weight later, find it where it was.
        """
        if self.stores_integers(site) and self.is_private(site.tensor) and self._covers_all(site):
            return gs.Variable(site.tensor), gs.Variable(site.tensor)
        return gs.Variable(site.tensor), gs.Variable(self._name(site, "_dequantized"))

    def _node(
        self,
        op_type: str,
        site: Site,
        attributes: dict[str, int],
        inputs: list[gs.Tensor],
        output: gs.Tensor,
    ) -> gs.Node:
        return gs.Node(op_type, self._name(site, f"_{op_type}"), attributes, inputs=inputs, outputs=[output])

    def _name(self, site: Site, kind: str) -> str:
        """``x_scale``; ``x_scale.2`` where only the third consumer on is meant; ``x_scale~1`` if taken.

        No two sites of a placement can get the same name: they differ in tensor or in first consumer, and
        neither ending can be mistaken for the other.
        """
        part = ""
        if not self._covers_all(site):
            part = f".{self._model.consumers[site.tensor].index(site.consumers[0])}"
        name = first = f"{site.tensor}{kind}{part}"
        count = 0
        while name in self._taken:
            count += 1
            name = f"{first}~{count}"
        return name

    def _covers_all(self, site: Site) -> bool:
        return len(set(site.consumers)) == len(self._model.consumers[site.tensor])


def _opset(params: QuantParams) -> int:
    return params.format.opset if params.axis is None else params.format.opset_per_channel


def _exported(nodes: list[gs.Node], tensor: str, integer: gs.Constant | None, opset: int) -> Pair:
    graph = gs.export_onnx(gs.Graph(nodes=nodes, inputs=[], outputs=[]), do_type_check=False).graph
    for node in graph.node:
        node.metadata_props.add(key=MARK, value=tensor)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    return Pair(
        nodes=tuple(graph.node),
        constants=tuple(t for name, t in constants.items() if integer is None or name != integer.name),
        integer=None if integer is None else constants[integer.name],
        output=nodes[-1].outputs[0].name,
        opset=opset,
    )


def _all_names(proto: onnx.ModelProto) -> Iterator[str]:
    """Every name of a tensor or node, in bodies too."""
    for graph in all_graphs(proto.graph):
        for named in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
            yield named.name
        for node in graph.node:
            yield node.name
            yield from node.input
            yield from node.output
