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
from qdqspec.graph import Model, Node
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
        part = self._in_order(nodes)
        read = dict.fromkeys(name for node in part for name in (*node.inputs, *sorted(node.body_reads)))
        made = {out for node in part for out in node.outputs}
        known = {*self._model.producer, *self._model.inputs} - self._model.constants.keys() - made
        return tuple(tensor for tensor in read if tensor in known)

    def cut(self, nodes: Collection[str], values: Mapping[str, Array]) -> Excerpt:
        """The part of these nodes, for inputs with the types and shapes of ``values``.

        Values that look like computed shapes (a few integers) are fixed. Raises `PlacementError` if no model
        can be built.
        """
        model, part, inputs = self._model, self._in_order(nodes), self.inputs(nodes)
        inside = {node.name for node in part}
        outside = {*model.outputs}
        for node in model.nodes:
            if node.name not in inside:
                outside.update(node.inputs, node.body_reads)
        made = (out for node in part for out in node.outputs)
        results = [out for out in made if out in outside and out not in model.constants]
        for name in inputs:
            kind = helper.np_dtype_to_tensor_dtype(values[name].dtype)
            self._extractor.value_infos[name] = helper.make_tensor_value_info(name, kind, values[name].shape)
        for name in results:
            known, info = self._static.get(name), onnx.ValueInfoProto(name=name)
            if known is not None:
                info = helper.make_tensor_value_info(name, known.elem_type, known.shape)
            self._extractor.value_infos[name] = info
        try:
            proto = self._extractor.extract_model(list(inputs), results)
        except ValueError as error:
            raise PlacementError(f"these nodes cannot be cut out: {error}", where=model.where) from None
        fixed = {name for name in inputs if values[name].ndim < 2 and values[name].dtype.kind in "iub"}
        refill(proto.graph.input, [given for given in proto.graph.input if given.name not in fixed])
        proto.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in sorted(fixed))
        readers = {}
        for output in proto.graph.output:  # a node after each result becomes the output in its place
            name = f"{output.name}:outside"
            readers[output.name] = Consumer(name, 0)
            proto.graph.node.append(helper.make_node("Identity", [output.name], [name], name=name))
            if output.type.tensor_type.elem_type != TensorProto.UNDEFINED:
                # the tensor is an inner one now, and its type is needed for pairs
                proto.graph.value_info.append(output)
            output.name = name
        return Excerpt(
            model=Model(proto, path=self._path),
            nodes=frozenset(inside),
            inputs=tuple(name for name in inputs if name not in fixed),
            readers=readers,
        )

    def _in_order(self, nodes: Collection[str]) -> list[Node]:
        """The nodes, and the nodes of their bodies, in graph order."""
        owned = self._model.nodes_inside if self._model.has_bodies else {}
        every = {*nodes, *(inner.name for name in nodes for inner in owned.get(name, ()))}
        return sorted((self._model.by_name[name] for name in every), key=lambda node: node.index)
