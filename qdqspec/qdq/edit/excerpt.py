"""Cuts nodes out of a model as a separate model, with the pairs that a placement gives them.

onnx does the cut; this module adds the boundary. Inputs get the shapes of observed values, and a result is read by a
node that represents all outside readers, so that a pair on it has a consumer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.utils import Extractor

from qdqspec._core.arrays import Array, Shape
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.protos import copied, refill
from qdqspec.types import Consumer, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A part of a model. ``inputs`` must be fed; ``readers`` are the consumers of results in place of outside ones."""

    model: Model
    nodes: frozenset[str]
    inputs: tuple[str, ...]
    readers: Mapping[str, Consumer]

    def restricted(self, placement: Placement) -> Placement:
        """The sites of a placement of the whole model that lie in this part."""
        sites = set()
        for site in placement.ordered:
            ends = [end for end in site.consumers if end.node in self.nodes]
            if len(ends) < len(site.consumers) and site.tensor in self.readers:
                ends.append(self.readers[site.tensor])
            if ends:
                sites.add(replace(site, consumers=tuple(ends)))
        return Placement(sites=frozenset(sites))


class Excerpts:
    """Cuts parts out of one model, whose inputs have these shapes. Weights are shared with it until they are written.

    ``path`` is the file of the parts, for references to external data.
    """

    def __init__(self, model: Model, shapes: Mapping[str, Shape], path: Path) -> None:
        self._model = model
        self._path = path
        proto = copied(model.flat)
        for node, named in zip(proto.graph.node, model.nodes, strict=True):
            node.name = named.name  # unnamed nodes would be renumbered
        del proto.graph.quantization_annotation[:]  # annotations for other tools, which the cut rejects
        typed = copied(proto)
        for given in typed.graph.input:
            if given.name in shapes:
                kind = given.type.tensor_type.elem_type
                given.CopyFrom(helper.make_tensor_value_info(given.name, kind, shapes[given.name]))
        self._static = Model(typed).types
        self._extractor = Extractor(proto)

    def inputs(self, nodes: Collection[str]) -> tuple[str, ...]:
        """The activations that these nodes read and do not make, in the order of reading."""
        found: dict[str, None] = {}
        nodes = self._with_bodies(nodes)
        for node in self._in_order(nodes):
            found.update(dict.fromkeys([*node.inputs, *sorted(node.body_reads)]))
        made = {out for node in self._in_order(nodes) for out in node.outputs}
        known = {*self._model.producer, *self._model.inputs} - self._model.constants.keys() - made
        return tuple(tensor for tensor in found if tensor in known)

    def cut(self, nodes: Collection[str], values: Mapping[str, Array]) -> Excerpt:
        """The part of these nodes, for inputs with the types and shapes of ``values``.

        Values that look like computed shapes (a few integers) are fixed. Raises `PlacementError` if no model
        can be built.
        """
        nodes = self._with_bodies(nodes)
        inputs = self.inputs(nodes)
        results = self._results(nodes)
        fixed = {name for name in inputs if _looks_like_shape(values[name])}
        for name in inputs:
            kind = helper.np_dtype_to_tensor_dtype(values[name].dtype)
            self._extractor.value_infos[name] = helper.make_tensor_value_info(name, kind, values[name].shape)
        for name in results:
            self._extractor.value_infos[name] = self._info(name)
        try:
            proto = self._extractor.extract_model(list(inputs), list(results))
        except ValueError as error:
            raise PlacementError(f"these nodes cannot be cut out: {error}", where=self._model.where) from None
        refill(proto.graph.input, [given for given in proto.graph.input if given.name not in fixed])
        proto.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in sorted(fixed))
        readers = {name: _read_outside(proto, index) for index, name in enumerate(results)}
        return Excerpt(
            model=Model(proto, path=self._path),
            nodes=frozenset(nodes),
            inputs=tuple(name for name in inputs if name not in fixed),
            readers=readers,
        )

    def _results(self, nodes: Collection[str]) -> tuple[str, ...]:
        model, inside = self._model, set(nodes)
        outside = {*model.outputs}
        for node in model.nodes:
            if node.name not in inside:
                outside.update(node.inputs, node.body_reads)
        made = (out for node in self._in_order(nodes) for out in node.outputs)
        return tuple(out for out in made if out in outside and out not in model.constants)

    def _with_bodies(self, nodes: Collection[str]) -> Collection[str]:
        """The nodes, and the nodes of their bodies."""
        if not self._model.has_bodies:
            return nodes
        owned = self._model.nodes_inside
        return {*nodes, *(inner.name for name in nodes for inner in owned.get(name, ()))}

    def _in_order(self, nodes: Collection[str]) -> list[Node]:
        return sorted((self._model.by_name[name] for name in nodes), key=lambda node: node.index)

    def _info(self, tensor: str) -> onnx.ValueInfoProto:
        known = self._static.get(tensor)
        if known is None:
            return onnx.ValueInfoProto(name=tensor)
        return helper.make_tensor_value_info(tensor, known.elem_type, known.shape)


def _looks_like_shape(value: Array) -> bool:
    """Whether a value seems to be a computed shape: a few integers."""
    return value.ndim < 2 and value.dtype.kind in "iub"


def _read_outside(proto: onnx.ModelProto, index: int) -> Consumer:
    """Add a node after a result, which becomes the output in its place."""
    output = proto.graph.output[index]
    name = f"{output.name}:outside"
    proto.graph.node.append(helper.make_node("Identity", [output.name], [name], name=name))
    if output.type.tensor_type.elem_type != TensorProto.UNDEFINED:
        # the tensor is an inner one now, and its type is needed for pairs
        proto.graph.value_info.append(output)
    output.name = name
    return Consumer(name, 0)
