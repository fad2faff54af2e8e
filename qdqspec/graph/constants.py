"""Constant folding that never changes Q/DQ: shape arithmetic and weight preparation are computed once.

Values are computed by onnx's reference implementation, one operator at a time. `qdqspec.graph.fold` folds
BatchNormalization.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from qdqspec.arrays import Array
from qdqspec.graph.model import Model, Node
from qdqspec.graph.protos import DEFAULT_DOMAINS, copy_model, graphs_inside, size_of
from qdqspec.units import list_text

LIMIT_BYTES = 2**20  # limit for a result that is larger than its inputs


# Never folded, and nothing after them is constant: the runtime that reads the model fuses them.
QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})

_RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)  # fmt: skip

# Results whose size depends on values, but exceeds the inputs' by at most a factor of their rank.
_BOUNDED = frozenset({"Compress", "NonZero", "Unique"})

_LOOKED_INTO = 1024  # elements: larger inputs cannot be shapes, axes or repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedConstants:
    """The smaller model; names of the nodes that became constants, and of those that became unused."""

    model: Model
    folded: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def fold_constants(
    model: Model, *, limit_bytes: int = LIMIT_BYTES, only: Collection[str] | None = None
) -> FoldedConstants:
    """Compute nodes that depend on constants only, and remove unused nodes and initializers.

    QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear and each operator outside ONNX's own domain stay,
    even with constant inputs, and so do all nodes that depend on them. So do random operators, If, Loop and
    Scan, nodes that make an output of a graph, and results that are larger than ``limit_bytes`` and than
    their inputs. Tensors keep their names. If nothing changes, the same model object is returned. Folding is
    idempotent. With ``only`` these tensors are computed, and nodes and initializers that nothing else reads are
    removed; the rest of the model is unchanged.
    """
    now, folded, unused = model, list[str](), list[str]()
    while True:  # new constants may determine further shapes
        work = _Folding(now, limit_bytes, within=None if only is None else _ancestors(now, only))
        work.fold()
        removed = work.unused()
        if not removed and not work.unread():
            return FoldedConstants(
                model=now, folded=tuple(folded), unused=tuple(unused), notes=tuple(work.notes())
            )
        computed = {node.index for node in work.folded}
        folded += [_name_in(model, node) for node in work.folded]
        unused += [_name_in(model, node) for node in now.nodes if node.index in removed - computed]
        now = Model(work.build(removed), path=model.path)


def _ancestors(model: Model, tensors: Collection[str]) -> frozenset[int]:
    """The indexes of the nodes that these tensors are computed from, Constant nodes included."""
    found: set[int] = set()
    left = [*tensors]
    while left:
        maker = model.producer.get(left.pop())
        if maker is not None and maker.index not in found:
            found.add(maker.index)
            left.extend(name for name in maker.inputs if name)
    return frozenset(found)


def _name_in(model: Model, node: Node) -> str:
    """The node's name in the original model: unnamed nodes are renumbered in a smaller one."""
    return model.producer[next(name for name in node.outputs if name)].name


@dataclass(slots=True)
class _Folding:
    """The state of one folding."""

    model: Model
    limit: int
    values: dict[str, Array] = field(default_factory=dict)  # computed values, by tensor
    folded: list[Node] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)
    removed: set[int] = field(default_factory=set)
    within: frozenset[int] | None = (
        None  # indexes of the nodes that may be computed or removed; all for ``None``
    )
    _fixed: frozenset[str] = frozenset()

    def fold(self) -> None:
        """Compute each node whose inputs are constant, in graph order."""
        self._fixed = _fixed_constants(self.model)
        functions = {(f.domain, f.name) for f in self.model.proto.functions}
        for node in self.model.nodes:
            if not self._may(node) or (node.domain, node.op_type) in functions:
                continue
            made = self._evaluate(node)
            if made is not None:
                self.values.update(made)
                self.folded.append(node)
                self.removed.add(node.index)

    def _may(self, node: Node) -> bool:
        """Whether a node may become a constant: plain ONNX, deterministic, inside the graph, on constants."""
        return (
            (self.within is None or node.index in self.within)
            and node.domain in DEFAULT_DOMAINS
            and node.op_type not in QUANTIZING | _RANDOM
            and node.outputs[0] not in self.model.constants  # a Constant node already is a constant
            and not any(True for _ in graphs_inside(node.proto))
            and node.name not in self.model.bodies
            and not any(map(self._is_result, node.outputs))
            and (self._static_shape(node) is not None or self._on_constants(node))
        )

    def _is_result(self, tensor: str) -> bool:
        """Whether a tensor is an output of the model or of a body."""
        ends = self.model.consumers.get(tensor, ())
        return tensor in self.model.outputs or any(self.model.by_name[end.node].is_marker for end in ends)

    def _on_constants(self, node: Node) -> bool:
        return all(name in self.values or name in self._fixed for name in node.inputs if name)

    def _static_shape(self, node: Node) -> tuple[int, ...] | None:
        """The shape of the tensor that a Shape or Size node reads, if it is static."""
        if node.op_type not in ("Shape", "Size"):
            return None
        shape = self.model.shape(node.inputs[0])
        if shape is None or any(size is None for size in shape):
            return None
        return tuple(size for size in shape if size is not None)

    def _evaluate(self, node: Node) -> dict[str, Array] | None:
        shape = self._static_shape(node)
        if shape is not None:
            return {node.outputs[0]: _shape_value(node, shape)}
        inputs = {name: self._value(name) for name in dict.fromkeys(node.inputs) if name}
        proto = _alone(self.model, node, inputs)
        size = _size_of_outputs(proto)
        allowed = max(self.limit, sum(value.nbytes for value in inputs.values()))
        if (size is None and node.op_type not in _BOUNDED) or (size or 0) > allowed:
            self.too_large.append(node.name)
            return None
        return _computed(proto, inputs)

    def _value(self, tensor: str) -> Array:
        return self.values[tensor] if tensor in self.values else self.model.array(tensor)

    def unused(self) -> set[int]:
        """The nodes to remove: folded ones, and those read only by removed nodes. Q/DQ is never removed."""
        readers = {name: len(ends) for name, ends in self.model.consumers.items()}
        seen = {*self.model.outputs, *self.model.subgraph_reads}
        work = list(self.removed)
        for index in work:
            self._release(self.model.nodes[index], readers)
        for node in reversed(self.model.nodes):  # consumers come after their producers
            is_read = any(readers.get(name) or name in seen for name in node.outputs if name)
            if node.index not in self.removed and not is_read and self._is_removable(node):
                for each in (node, *self.model.nodes_inside.get(node.name, ())):
                    if each.index not in self.removed:
                        self.removed.add(each.index)
                        self._release(each, readers)
        return self.removed

    def _is_removable(self, node: Node) -> bool:
        inside = self.within is None or node.index in self.within
        return inside and node.domain in DEFAULT_DOMAINS and node.op_type not in QUANTIZING

    def _release(self, node: Node, readers: dict[str, int]) -> None:
        for name in node.inputs:
            if name:
                readers[name] -= 1

    def unread(self) -> set[str]:
        """Initializers that become unused when these nodes are removed; those that a caller may feed stay."""
        if self.within is not None and not self.removed:
            return set()
        read = {name for node in self.model.nodes if node.index not in self.removed for name in node.inputs}
        read |= {*self.model.outputs, *self.model.subgraph_reads}
        return {name for name in self._fixed & self.model.initializers.keys() if name not in read}

    def build(self, removed: set[int]) -> onnx.ModelProto:
        """The model with constants in place of the folded nodes."""
        unread = self.unread()
        proto = copy_model(self.model.flat, but={"node", "initializer", "value_info", "input"})
        graph = proto.graph
        graph.node.extend(node.proto for node in self.model.nodes if node.index not in removed)
        graph.initializer.extend(t for t in self.model.flat.graph.initializer if t.name not in unread)
        graph.input.extend(i for i in self.model.flat.graph.input if i.name not in unread)
        made = [numpy_helper.from_array(self.values[name], name) for name in self._needed(removed)]
        graph.initializer.extend(made)
        if proto.ir_version < 4:  # until then each initializer is a graph input as well
            graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in made)
        lost = {name for index in removed for name in self.model.nodes[index].outputs}
        graph.value_info.extend(v for v in self.model.flat.graph.value_info if v.name not in lost)
        return proto

    def _needed(self, removed: set[int]) -> Iterator[str]:
        read = {name for node in self.model.nodes if node.index not in removed for name in node.inputs}
        read |= self.model.subgraph_reads
        yield from (name for name in self.values if name in read)

    def notes(self) -> Iterator[str]:
        """Notes about constant nodes that stay."""
        if self.too_large:
            names = list_text([f"'{name}'" for name in self.too_large], 3)
            yield f"left as they are, because their result would be larger than {self.limit} bytes: {names}"


def _fixed_constants(model: Model) -> frozenset[str]:
    """Constants that no caller can replace: from IR version 4 on, an input may override its initializer."""
    if model.proto.ir_version < 4:
        return frozenset(model.constants)
    return frozenset(model.constants) - {i.name for i in model.flat.graph.input}


def _shape_value(node: Node, shape: tuple[int, ...]) -> Array:
    if node.op_type == "Size":
        return np.array(prod(shape), np.int64)
    bounds = {a.name: int(a.i) for a in node.proto.attribute}
    return np.array(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], np.int64)


def _alone(model: Model, node: Node, inputs: Mapping[str, Array]) -> onnx.ModelProto:
    """A model of this node only. Small inputs are initializers, because the result's shape may depend on them."""
    small = [numpy_helper.from_array(v, n) for n, v in inputs.items() if v.size <= _LOOKED_INTO]
    large = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in inputs.items()
        if v.size > _LOOKED_INTO
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.outputs if name]
    graph = helper.make_graph([node.proto], "alone", large, outputs, small)
    return helper.make_model(graph, opset_imports=list(model.proto.opset_import), ir_version=10)


def _size_of_outputs(proto: onnx.ModelProto) -> int | None:
    """Bytes of all results, before any is computed; ``None`` if inference cannot determine them."""
    try:
        inferred = shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except Exception:  # noqa: BLE001 - inference raises various classes: then the size is unknown
        return None
    total = 0
    for info in inferred.graph.output:
        kind = info.type.tensor_type
        if not kind.elem_type or not kind.HasField("shape"):
            return None
        if not all(dim.HasField("dim_value") for dim in kind.shape.dim):
            return None
        dims = [dim.dim_value for dim in kind.shape.dim]
        total += size_of(TensorProto(data_type=kind.elem_type, dims=dims))
    return total


def _computed(proto: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array] | None:
    """The results of the reference implementation; ``None`` if it fails or gives another type."""
    from onnx.reference import ReferenceEvaluator  # imported late: it takes as long as all of onnx

    feeds = {i.name: inputs[i.name] for i in proto.graph.input}
    names = [o.name for o in proto.graph.output]
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(proto).run(None, feeds)
    except Exception:  # noqa: BLE001 - an operator that it cannot compute is kept
        return None
    if not all(isinstance(result, np.ndarray | np.generic) for result in results):
        return None
    arrays = {name: np.asarray(result) for name, result in zip(names, results, strict=True)}
    return arrays if all(_is_as_inferred(proto, name, value) for name, value in arrays.items()) else None


def _is_as_inferred(proto: onnx.ModelProto, name: str, value: Array) -> bool:
    inferred = shape_inference.infer_shapes(proto, data_prop=True)
    kind = next(o.type.tensor_type for o in inferred.graph.output if o.name == name)
    if value.dtype == object or helper.np_dtype_to_tensor_dtype(value.dtype) != kind.elem_type:
        return False
    dims = kind.shape.dim if kind.HasField("shape") else ()
    known = [dim.dim_value for dim in dims if dim.HasField("dim_value")]
    return len(known) != len(dims) or list(value.shape) == known or not kind.HasField("shape")
