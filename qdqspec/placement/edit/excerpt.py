"""Cuts nodes out of a model as a separate model, with the pairs that a placement gives them.

onnx does the cut; this module adds the boundary. Inputs get the shapes of observed values, or the ranges they
have at the profiles of the whole model, and a result is read by a node that represents all outside readers,
so that a pair on it has a consumer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.utils import Extractor

from qdqspec.arrays import Array, Shape
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model, Node, TensorType
from qdqspec.graph.protos import copied, refill
from qdqspec.types import Consumer, InputShape, Placement

Spans = Mapping[str, InputShape]  # by tensor


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
        self._types_at: dict[tuple[tuple[str, Shape], ...], Mapping[str, TensorType]] = {}
        self._proto = proto
        self._static = self._types(shapes)
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

    def type_of(self, tensor: str) -> tuple[np.dtype[np.generic], Shape] | None:
        """Element type and shape of a tensor, if both are known."""
        known, shape = self._static.get(tensor), _static_shape(self._static.get(tensor))
        if known is None or shape is None:
            return None
        return helper.tensor_dtype_to_np_dtype(known.elem_type), shape

    def spans(self, nodes: Collection[str], ranges: Sequence[Mapping[str, InputShape]]) -> tuple[Spans, ...]:
        """Smallest, usual and largest shape of these nodes' inputs and results, at each profile of the model.

        ``ranges`` are those of the model's inputs, by profile. Empty if nothing varies, and if some shape
        cannot be inferred from the shapes of the inputs.
        """
        tensors = (*self.inputs(nodes), *self._results(nodes))
        found = [{tensor: self._span(tensor, own) for tensor in tensors} for own in ranges]
        known = tuple({t: span for t, span in own.items() if span is not None} for own in found)
        if any(len(own) < len(tensors) for own in known):
            return ()
        varies = any(
            len({s for own in known for s in _extreme_shapes(own[tensor])}) > 1 for tensor in tensors
        )
        return known if varies else ()

    def cut(
        self, nodes: Collection[str], values: Mapping[str, Array], spans: Sequence[Spans] = ()
    ) -> Excerpt:
        """The part of these nodes, for inputs with the types and shapes of ``values``, or the ranges of ``spans``.

        Values that look like computed shapes (a few integers) are fixed. Raises `PlacementError` if no model
        can be built.
        """
        nodes = self._with_bodies(nodes)
        inputs = self.inputs(nodes)
        results = self._results(nodes)
        fixed = {name for name in inputs if looks_like_shape(values[name])}
        for name in inputs:
            kind = helper.np_dtype_to_tensor_dtype(values[name].dtype)
            dims = _open_dims(name, spans) if spans else values[name].shape
            self._extractor.value_infos[name] = helper.make_tensor_value_info(name, kind, dims)
        for name in results:
            self._extractor.value_infos[name] = self._info(name, spans)
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
        nodes = self._with_bodies(nodes)
        model, inside = self._model, set(nodes)
        outside = {*model.outputs}
        for node in model.nodes:
            if node.name not in inside:
                outside.update(node.inputs, node.body_reads)
        made = (out for node in self._in_order(nodes) for out in node.outputs)
        return tuple(out for out in made if out in outside and out not in model.constants)

    def _with_bodies(self, nodes: Collection[str]) -> Collection[str]:
        """These nodes, and those of their bodies."""
        if not self._model.has_bodies:
            return nodes
        owned = self._model.nodes_inside
        return {*nodes, *(inner.name for name in nodes for inner in owned.get(name, ()))}

    def _in_order(self, nodes: Collection[str]) -> list[Node]:
        return sorted((self._model.by_name[name] for name in nodes), key=lambda node: node.index)

    def _info(self, tensor: str, spans: Sequence[Spans]) -> onnx.ValueInfoProto:
        known = self._static.get(tensor)
        if known is None:
            return onnx.ValueInfoProto(name=tensor)
        dims = _open_dims(tensor, spans) if spans else known.shape
        return helper.make_tensor_value_info(tensor, known.elem_type, dims)

    def _span(self, tensor: str, ranges: Mapping[str, InputShape]) -> InputShape | None:
        corners = {}
        for which in ("min", "opt", "max"):
            shapes = {name: getattr(span, which) for name, span in ranges.items()}
            shape = shapes[tensor] if tensor in shapes else _static_shape(self._types(shapes).get(tensor))
            if shape is None:
                return None
            corners[which] = shape
        return InputShape(**corners)

    def _types(self, shapes: Mapping[str, Shape]) -> Mapping[str, TensorType]:
        """Types of all tensors for these input shapes; inferred once for each set of them."""
        key = tuple(sorted(shapes.items()))
        if key not in self._types_at:
            proto = copied(self._proto)
            for given in proto.graph.input:
                if given.name in shapes:
                    kind = given.type.tensor_type.elem_type
                    given.CopyFrom(helper.make_tensor_value_info(given.name, kind, shapes[given.name]))
            self._types_at[key] = Model(proto).types
        return self._types_at[key]


def _static_shape(known: TensorType | None) -> Shape | None:
    """The shape of a tensor if all of its dimensions are known."""
    if known is None or known.shape is None or None in known.shape:
        return None
    return tuple(dim or 0 for dim in known.shape)


def looks_like_shape(value: Array) -> bool:
    """Whether a value seems to be a computed shape: a few integers."""
    return value.ndim < 2 and value.dtype.kind in "iub"


def _extreme_shapes(span: InputShape) -> tuple[Shape, ...]:
    return span.min, span.opt, span.max


def _open_dims(tensor: str, spans: Sequence[Spans]) -> list[int | str]:
    """The dimensions of a tensor; those that vary are named."""
    columns = zip(*(shape for own in spans for shape in _extreme_shapes(own[tensor])), strict=True)
    return [sizes[0] if len(set(sizes)) == 1 else f"{tensor}:{axis}" for axis, sizes in enumerate(columns)]


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
