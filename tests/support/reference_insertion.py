"""Which pairs follow from the sites of a placement, in the most obvious way: the measure of `Inserter`.

Each pair of `PairMaker` is before the first node that reads it; one that only a graph output reads is at the end.
The order of nodes and initializers is not compared (`unordered`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import onnx
from onnx import TensorProto
from random_models import by_graph

from qdqspec.graph.dynamic_kernels import with_kernels
from qdqspec.graph.flat import closed, flat_form
from qdqspec.graph.model import Model
from qdqspec.graph.protos import copied, graphs_inside, refill, rename_tensors, with_value
from qdqspec.graph.trt import DOMAIN, VERSION
from qdqspec.qdq.formats import RUN_TIME
from qdqspec.qdq.insert import RaisedInputs, raised
from qdqspec.qdq.pairs import PairMaker, QuantSource, makes_output
from qdqspec.types import Placement, Site


def insert_by_reference(
    model: Model, placement: Placement, numbers: QuantSource, floating: Collection[Site]
) -> onnx.ModelProto:
    """The model with the pairs of a placement."""
    maker = PairMaker(model, numbers, floating=frozenset(floating))
    floats = {s.tensor: maker.float_name(s.tensor) for s in placement.sites if makes_output(s)}
    pairs = [
        (site, part, maker.make(part, source=floats.get(site.tensor, ""), whole=site))
        for site in placement.ordered
        for part in (replace(site, consumers=ends) for ends in by_graph(model, site.consumers))
    ]
    opset = max([model.opset, *(pair.opset for _, _, pair in pairs)])
    is_raised = opset > model.opset or model.proto.ir_version < 4
    before = flat_form(raised(model.proto, opset)) if is_raised else model.flat
    inputs = RaisedInputs(model, before.graph.node, is_raised=is_raised)
    proto = copied(before)
    nodes = list(proto.graph.node)
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    constants = {node.output[0]: node for node in nodes if node.op_type == "Constant"}
    replace_constant = partial(_replace_constant, initializers, constants)
    for node in nodes:
        rename_tensors(node, lambda name: floats.get(name, name))
    readers = {}
    for _, site, pair in pairs:
        ends = [end for end in site.consumers if not end.is_output]
        readers[pair.output] = {
            place for end in ends for place in inputs.of(site.tensor, end, site.consumers, "", "")
        }
        for index, number in readers[pair.output]:
            nodes[index].input[number] = pair.output
    pairs.sort(key=lambda one: min(readers[one[2].output], default=(len(nodes), 0)))
    for _, _, pair in pairs:
        initializers |= {tensor.name: tensor for tensor in pair.constants}
        if pair.bias is not None and pair.bias.is_added:
            initializers[pair.bias.value.name] = pair.bias.value
            nodes[min(readers[pair.output])[0]].input.append(pair.bias.value.name)
        elif pair.bias is not None:
            replace_constant(pair.bias.value.name, pair.bias.value)
    stored = [(site, pair.integer) for _, site, pair in pairs if pair.integer is not None]
    for tensor in {site.tensor for site, _ in stored}:
        integers = [integer for site, integer in stored if site.tensor == tensor]
        covered = {end for site, _ in stored if site.tensor == tensor for end in site.consumers}
        if maker.is_private(tensor) and covered == set(model.consumers[tensor]):
            replace_constant(tensor, integers.pop(0))
            refill(proto.graph.input, [value for value in proto.graph.input if value.name != tensor])
        initializers |= {integer.name: integer for integer in integers}
    anchors = [min(readers[pair.output], default=(len(nodes), 0))[0] for _, _, pair in pairs]
    added = [(index, 0, pair.nodes) for index, (_, _, pair) in zip(anchors, pairs, strict=True)]
    given = [(index, 1, (node,)) for index, node in enumerate(map(copied, nodes))]
    refill(
        proto.graph.node,
        [node for _, _, some in sorted(added + given, key=lambda one: one[:2]) for node in some],
    )
    refill(proto.graph.initializer, initializers.values())
    domains = {node.domain for node in proto.graph.node} - {opset.domain for opset in proto.opset_import}
    if DOMAIN in domains:
        proto.opset_import.add(domain=DOMAIN, version=VERSION)
    if any(site.format == RUN_TIME for site in placement.sites):
        proto = with_kernels(proto)
    instead = {pair.integer.name: site.tensor for _, site, pair in pairs if pair.integer is not None}
    return closed(proto, instead) if model.has_bodies else proto


def _replace_constant(
    initializers: dict[str, TensorProto], constants: dict[str, onnx.NodeProto], name: str, value: TensorProto
) -> None:
    if name in initializers:
        initializers[name] = value
    else:
        constants[name].CopyFrom(with_value(constants[name], value))
        constants[name].output[0] = value.name


def unordered(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes and initializers of all its graphs in the order of their bytes."""
    sorted_model = copied(proto)
    _sort(sorted_model.graph)
    return sorted_model


def _sort(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for body in graphs_inside(node):
            _sort(body)
    for field in (graph.node, graph.initializer):
        refill(field, sorted(map(copied, field), key=lambda one: one.SerializeToString(deterministic=True)))
