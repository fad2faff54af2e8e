"""Nodes of a model as a model of their own, with the pairs that a placement gives them.

May import floors 0 to 2, numpy and onnx. The cut itself is onnx's; what is ours are the ends: inputs get the
shapes of values that were observed, and a result is read by a node that stands for all readers outside, so
that a pair on it has a consumer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.utils import Extractor

from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, Node
from qdqspec.types import Consumer, Placement

Array = npt.NDArray[np.generic]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A part of a model. ``inputs`` must be fed; ``readers`` stands, by result, for who reads it outside."""

    model: Model
    nodes: frozenset[str]
    inputs: tuple[str, ...]
    readers: Mapping[str, Consumer]

    def restricted(self, placement: Placement) -> Placement:
        """What of a placement of the whole model stands in this part."""
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

    ``path`` is where parts will be written, for references to external data.
    """

    def __init__(self, model: Model, shapes: Mapping[str, Shape], path: Path) -> None:
        self._model = model
        self._path = path
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        for node, named in zip(proto.graph.node, model.nodes, strict=True):
            node.name = named.name  # unnamed nodes would be numbered anew
        for given in proto.graph.input:
            if given.name in shapes:
                kind = given.type.tensor_type.elem_type
                given.CopyFrom(helper.make_tensor_value_info(given.name, kind, shapes[given.name]))
        del proto.graph.quantization_annotation[:]  # notes for other tools, which the cut refuses
        self._static = Model(proto).types
        self._extractor = Extractor(proto)

    def inputs(self, nodes: Collection[str]) -> tuple[str, ...]:
        """The activations that these nodes read and do not make, in the order of reading."""
        found: dict[str, None] = {}
        for node in self._in_order(nodes):
            found.update(dict.fromkeys([*node.inputs, *sorted(node.body_reads)]))
        made = {out for node in self._in_order(nodes) for out in node.outputs}
        known = {*self._model.producer, *self._model.inputs} - self._model.constants.keys() - made
        return tuple(tensor for tensor in found if tensor in known)

    def type_of(self, tensor: str) -> tuple[np.dtype[np.generic], Shape] | None:
        """Element type and shape of a tensor, where both are known."""
        known = self._static.get(tensor)
        if known is None or known.shape is None or None in known.shape:
            return None
        return helper.tensor_dtype_to_np_dtype(known.elem_type), tuple(dim or 0 for dim in known.shape)

    def cut(self, nodes: Collection[str], values: Mapping[str, Array]) -> Excerpt:
        """The part of these nodes, for inputs with types and shapes as in ``values``.

        What looks like a computed shape (a few integers) is fixed. Raises `PlacementError` where no model comes of it.
        """
        inputs = self.inputs(nodes)
        results = self._results(nodes)
        fixed = {name for name in inputs if values[name].ndim < 2 and values[name].dtype.kind in "iub"}
        for name in inputs:
            kind = helper.np_dtype_to_tensor_dtype(values[name].dtype)
            self._extractor.value_infos[name] = helper.make_tensor_value_info(name, kind, values[name].shape)
        for name in results:
            self._extractor.value_infos[name] = self._info(name)
        try:
            proto = self._extractor.extract_model(list(inputs), list(results))
        except ValueError as error:
            raise PlacementError(f"these nodes cannot be cut out: {error}", where=self._model.where) from None
        _fix(proto, {name: values[name] for name in fixed})
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

    def _in_order(self, nodes: Collection[str]) -> list[Node]:
        return sorted((self._model.by_name[name] for name in nodes), key=lambda node: node.index)

    def _info(self, tensor: str) -> onnx.ValueInfoProto:
        known = self._static.get(tensor)
        if known is None:
            return onnx.ValueInfoProto(name=tensor)
        return helper.make_tensor_value_info(tensor, known.elem_type, known.shape)


def _fix(proto: onnx.ModelProto, values: Mapping[str, Array]) -> None:
    """Make constants of inputs."""
    kept = [given for given in proto.graph.input if given.name not in values]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())


def _read_outside(proto: onnx.ModelProto, index: int) -> Consumer:
    """Put a node behind a result, which becomes the output in its place."""
    output = proto.graph.output[index]
    name = f"{output.name}:outside"
    proto.graph.node.append(helper.make_node("Identity", [output.name], [name], name=name))
    if output.type.tensor_type.elem_type != TensorProto.UNDEFINED:
        proto.graph.value_info.append(output)  # it is inside now, and pairs ask for its type
    output.name = name
    return Consumer(name, 0)
