"""Folding that never changes Q/DQ: of constants, and of what prepares a model for quantization.

Shape arithmetic and weight preparation are computed once, by onnx's reference implementation, one operator at a time.
Exporters write weights and biases that are computed from constants. They become constants: weights that several
operators share (Transpose of an embedding), weights of a weight normalization or an LSTM, float16 weights behind a
Cast.
BatchNormalization is folded into the convolution before it. Runtimes do that themselves for float weights,
but not for an integer weight with a DequantizeLinear, so it must be done before pairs are inserted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from qdqspec._core.arrays import Array
from qdqspec._core.units import list_text
from qdqspec.graph.flat import free_name
from qdqspec.graph.model import QDQ_OPS, Model, Node
from qdqspec.graph.ops import RANDOM, is_default
from qdqspec.graph.protos import copied, copy_model, graphs_inside, refill, size_of
from qdqspec.graph.trt import is_pair_op

LIMIT_BYTES = 2**20  # limit for a result that is larger than its inputs


# Never folded, and nothing after them is constant: the runtime that reads the model fuses them.
QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_KEPT = QUANTIZING | RANDOM | {"Dropout"}

# Results whose size depends on values, but exceeds the inputs' by at most a factor of their rank.
_BOUNDED = frozenset({"Compress", "NonZero", "Unique"})

_LOOKED_INTO = 1024  # elements: larger inputs cannot be shapes, axes or repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A smaller model, and names of nodes that it lacks.

    ``folded`` became constants, ``unused`` had no use, ``removed`` are part of their producer now.
    """

    model: Model
    folded: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def computed(self) -> tuple[str, ...]:
        """The names of the nodes that constants replace."""
        return (*self.folded, *self.unused)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of all nodes that the model lacks."""
        return (*self.removed, *self.computed)

    @property
    def note(self) -> str:
        """A note on nodes that `fold_weights` folded."""
        found = [f"{len(self.removed)} BatchNormalization folded"] if self.removed else []
        found += [f"weights computed, {len(self.computed)} nodes less"] if self.computed else []
        return f"{', '.join(found)}, as tuning does" if found else ""


def fold_constants(
    model: Model, *, limit_bytes: int = LIMIT_BYTES, only: Collection[str] | None = None
) -> Folded:
    """Compute nodes that depend on constants only, and remove unused nodes and initializers.

    QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear and each operator outside ONNX's own domain stay,
    even with constant inputs, and so do all nodes that depend on them. So do random operators, If, Loop and
    Scan, nodes that make an output of a graph, and results that are larger than ``limit_bytes`` and than
    their inputs. Tensors keep their names. With ``only`` these tensors are computed, and the rest is unchanged; a
    QuantizeLinear is computed then if no DequantizeLinear reads it.
    """
    now, folded, unused = model, list[str](), list[str]()
    while True:  # new constants may determine further shapes
        work = _Folding(now, limit_bytes, None if only is None else _find_ancestors(now, only))
        if not work.removed and not work.unread:
            notes = []
            if work.too_large:  # constant nodes that stay
                names = list_text([f"'{name}'" for name in work.too_large], 3)
                what = f"because their result would be larger than {limit_bytes} bytes"
                notes.append(f"left as they are, {what}: {names}")
            return Folded(model=now, folded=tuple(folded), unused=tuple(unused), notes=tuple(notes))
        computed = {node.index for node in work.folded}
        folded += [_name_in(model, node) for node in work.folded]
        unused += [_name_in(model, node) for node in now.nodes if node.index in work.removed - computed]
        now = Model(work.smaller(), path=model.path)


def with_constant_numbers(model: Model) -> Model:
    """The model with scales, zero points and stored integers of Q and DQ as constants where constants determine them.

    So are the integers of a weight behind a Q if other operators, such as a Clip, change them before the DQ. This
    decides for all readers of pairs what is constant: see `fold_constants`. All nodes keep their names.
    """
    computed: set[str] = set()
    for node in model.nodes:
        if node.op_type in QDQ_OPS and (is_default(node) or is_pair_op(node.proto)):
            first = 0 if node.op_type == "DequantizeLinear" else 1
            computed.update(name for name in node.inputs[first:] if name)
    computed -= model.constants.keys()
    makers = [model.producer[name] for name in computed if name in model.producer]
    if all(maker.op_type in QUANTIZING or not is_default(maker) for maker in makers):
        return model
    folded = fold_constants(model, only=computed).model
    if folded is model:
        return model
    named = {out: node.name for node in model.nodes for out in node.outputs if out}
    found = Model(folded.flat, path=model.path)
    found.nodes = tuple(replace(n, name=named[next(filter(None, n.outputs))]) for n in found.nodes)
    return found


def _find_ancestors(model: Model, tensors: Collection[str]) -> frozenset[int]:
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


class _Folding:
    """One pass over a model: ``values`` of tensors that become constants, and nodes and initializers without a use.

    Only nodes whose index is ``within`` are computed or removed; all for ``None``.
    """

    def __init__(self, model: Model, limit_bytes: int, within: Collection[int] | None) -> None:
        self.values: dict[str, Array] = {}
        self.folded: list[Node] = []
        self.too_large: list[str] = []
        self.removed: set[int] = set()
        self.unread: set[str] = set()  # initializers
        self._model = model
        self._limit = limit_bytes
        self._is_partial = within is not None
        self._within = range(len(model.nodes)) if within is None else within
        returned = (t for node in model.nodes if node.is_marker for t in node.inputs if t)
        self._results = {*model.outputs, *returned}  # of the model and of bodies
        functions = {(f.domain, f.name) for f in model.proto.functions}
        for node in model.nodes:  # in graph order
            if not self._may(node) or (node.domain, node.op_type) in functions:
                continue
            if (made := self._evaluate(node)) is not None:
                self.values.update(made)
                self.folded.append(node)
                self.removed.add(node.index)
        self._remove_unused()
        if within is None or self.removed:
            read = {t for node in model.nodes if node.index not in self.removed for t in node.inputs}
            read |= {*model.outputs, *model.subgraph_reads}
            self.unread = {*(model.fixed_constants & model.initializers.keys()) - read}

    def _may(self, node: Node) -> bool:
        """Whether a node may become a constant: plain ONNX, deterministic, inside the graph, on constants."""
        return (
            node.index in self._within
            and is_default(node)
            and (node.op_type not in _KEPT or self._is_changed_later(node))
            and node.outputs[0] not in self._model.constants  # a Constant node already is a constant
            and not any(True for _ in graphs_inside(node.proto))
            and node.name not in self._model.bodies
            and self._results.isdisjoint(node.outputs)
            and (
                self._static_shape(node) is not None
                or all(
                    name in self.values or name in self._model.fixed_constants for name in node.inputs if name
                )
            )
        )

    def _is_changed_later(self, node: Node) -> bool:
        """Whether a Q makes integers that only other operators read, such as a Clip before the DQ of a weight."""
        if not self._is_partial or node.op_type != "QuantizeLinear":
            return False
        return all(reader.op_type not in QDQ_OPS for reader in self._model.readers(node.outputs[0]))

    def _static_shape(self, node: Node) -> tuple[int, ...] | None:
        """The shape of the tensor that a Shape or Size node reads, if it is static."""
        if node.op_type not in ("Shape", "Size"):
            return None
        shape = self._model.shape(node.inputs[0])
        if shape is None or any(size is None for size in shape):
            return None
        return tuple(size for size in shape if size is not None)

    def _evaluate(self, node: Node) -> dict[str, Array] | None:
        """The results of a node; ``None`` if they are too large, or the reference cannot compute them."""
        shape = self._static_shape(node)
        if shape is not None:
            start, end = node.number("start", 0), node.number("end", len(shape))
            value = prod(shape) if node.op_type == "Size" else shape[start:end]
            return {node.outputs[0]: np.array(value, np.int64)}
        inputs = {
            name: self.values[name] if name in self.values else self._model.array(name)
            for name in dict.fromkeys(node.inputs)
            if name
        }
        proto = _isolate(self._model, node, inputs)
        inferred = onnx.ModelProto()
        with suppress(Exception):  # inference raises various classes: then the size is unknown
            inferred = shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
        size = sum(map(_measure, inferred.graph.output)) if inferred.graph.output else math.nan
        allowed = max(self._limit, sum(value.nbytes for value in inputs.values()))
        if size > allowed or (math.isnan(size) and node.op_type not in _BOUNDED):
            self.too_large.append(node.name)
            return None
        from onnx.reference import ReferenceEvaluator  # imported late: it takes as long as all of onnx

        names = [output.name for output in proto.graph.output]
        try:
            with np.errstate(all="ignore"):
                results = ReferenceEvaluator(proto).run(
                    None, {i.name: inputs[i.name] for i in proto.graph.input}
                )
        except Exception:  # noqa: BLE001 - an operator that it cannot compute is kept
            return None
        if not all(isinstance(result, np.ndarray | np.generic) for result in results):
            return None
        found = {name: np.asarray(result) for name, result in zip(names, results, strict=True)}
        fits = all(_is_of_type(found[output.name], output.type) for output in inferred.graph.output)
        return found if fits else None

    def _remove_unused(self) -> None:
        """Add the nodes whose results only removed nodes read. Q/DQ is never removed."""
        readers = {name: len(ends) for name, ends in self._model.consumers.items()}
        seen = {*self._model.outputs, *self._model.subgraph_reads}

        def release(node: Node) -> None:
            for name in filter(None, node.inputs):
                readers[name] -= 1

        for index in self.removed:
            release(self._model.nodes[index])
        for node in reversed(self._model.nodes):  # consumers come after their producers
            is_read = any(readers.get(name) or name in seen for name in node.outputs if name)
            if node.index in self.removed or node.index not in self._within or is_read:
                continue
            if is_default(node) and node.op_type not in QUANTIZING:
                for each in (node, *self._model.nodes_inside.get(node.name, ())):
                    if each.index not in self.removed:
                        self.removed.add(each.index)
                        release(each)

    def smaller(self) -> onnx.ModelProto:
        """The model with constants in place of the folded nodes."""
        flat = self._model.flat
        proto = copy_model(flat, but={"node", "initializer", "value_info", "input"})
        graph = proto.graph
        kept = [node for node in self._model.nodes if node.index not in self.removed]
        graph.node.extend(node.proto for node in kept)
        graph.initializer.extend(t for t in flat.graph.initializer if t.name not in self.unread)
        graph.input.extend(i for i in flat.graph.input if i.name not in self.unread)
        read = {name for node in kept for name in node.inputs} | self._model.subgraph_reads
        made = [numpy_helper.from_array(value, name) for name, value in self.values.items() if name in read]
        graph.initializer.extend(made)
        if proto.ir_version < 4:  # until then each initializer is a graph input as well
            graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in made)
        lost = {name for index in self.removed for name in self._model.nodes[index].outputs}
        graph.value_info.extend(v for v in flat.graph.value_info if v.name not in lost)
        return proto


def _isolate(model: Model, node: Node, inputs: Mapping[str, Array]) -> onnx.ModelProto:
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


def _measure(output: onnx.ValueInfoProto) -> float:
    """Bytes of a tensor before it is computed; NaN if inference cannot determine them."""
    kind = output.type.tensor_type
    dims = kind.shape.dim
    if not kind.elem_type or not kind.HasField("shape") or not all(d.HasField("dim_value") for d in dims):
        return math.nan
    return size_of(TensorProto(data_type=kind.elem_type, dims=[dim.dim_value for dim in dims]))


def _is_of_type(value: Array, wanted: onnx.TypeProto) -> bool:
    kind = wanted.tensor_type
    if value.dtype == object or helper.np_dtype_to_tensor_dtype(value.dtype) != kind.elem_type:
        return False
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    return not kind.HasField("shape") or None in dims or list(value.shape) == dims


# Inputs of operators that may be weights, or biases.
_WEIGHTS = {"Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2), "LSTM": (1, 2), "MatMul": (0, 1)}
_MOST_BYTES = 1 << 30  # of a computed weight


def fold_weights(model: Model) -> Folded:
    """Compute weights and biases that depend on constants only, and fold BatchNormalization."""
    made, needed = set[str](), set[str]()
    for node in model.nodes:  # in graph order
        names = [name for name in node.inputs if name]
        is_plain = is_default(node) and node.op_type not in _KEPT and not node.is_marker
        if is_plain and names and all(name in made or name in model.constants for name in names):
            made.update(node.outputs)
        elif is_plain and node.op_type in _WEIGHTS:
            read = (node.input_at(index) for index in _WEIGHTS[node.op_type])
            needed.update(name for name in read if name in made)
    weights = Folded(model=model)
    if needed:
        weights = fold_constants(model, only=needed, limit_bytes=_MOST_BYTES)
    folded = fold_batchnorm(weights.model)
    if weights.model is model:
        return folded
    nodes = weights.model.by_name
    removed = tuple(model.producer[nodes[name].outputs[0]].name for name in folded.removed)
    return replace(weights, model=folded.model, removed=removed)


def folded_like(model: Model, other: Model) -> Folded | None:
    """The model as `fold_weights` makes it, if that removes nodes and ``other`` has none of these; else ``None``.

    Those on integers of a weight do not count: without the pair after them, their result is a weight.
    """
    folded = fold_weights(model)
    same = (other.by_name[name] for name in folded.missing if name in other.by_name)
    narrow = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)
    is_kept = any(other.elem_type(node.outputs[0]) not in narrow for node in same)
    return folded if folded.missing and not is_kept else None


def fold_batchnorm(model: Model) -> Folded:
    """Fold each inference-mode BatchNormalization into the Conv or ConvTranspose that it is the only consumer of.

    Weights and biases are computed in float64 and stored in the weight's type. The convolution then makes the
    output tensor of the normalization. Its old parameters are removed, and all nodes keep their names.
    """
    folds = list(_find_normalizations(model))
    if not folds:
        return Folded(model=model)
    convs, removed = {conv.index for conv, _ in folds}, {norm.index for _, norm in folds}
    read = {*model.outputs, *model.subgraph_reads}
    for node in model.nodes:
        if node.index not in removed:
            read.update(node.inputs[:1] if node.index in convs else node.inputs)
    # the old parameters that have no reader any more
    unread = {name for conv, norm in folds for name in (*conv.inputs[1:], *norm.inputs[1:])} - read
    removed |= {model.producer[name].index for name in unread & model.producer.keys()}  # Constant nodes
    taken = {*model.types, *model.consumers, *model.subgraph_reads}
    proto = copy_model(model.flat, but={"node", "initializer", "input"})
    proto.graph.initializer.extend(t for t in model.flat.graph.initializer if t.name not in unread)
    proto.graph.input.extend(i for i in model.flat.graph.input if i.name not in unread)
    rewritten: dict[int, onnx.NodeProto] = {}
    for conv, norm in folds:  # one weight at a time limits memory to the results and one computation
        names = [free_name(f"{norm.outputs[0]}/{what}", taken) for what in ("weight", "bias")]
        for name, values in zip(names, _fold_values(model, conv, norm), strict=True):
            proto.graph.initializer.append(numpy_helper.from_array(values, name))
        node = rewritten[conv.index] = copied(conv.proto)
        refill(node.input, [conv.inputs[0], *names])
        node.output[0] = norm.outputs[0]
    for kept in (node for node in model.nodes if node.index not in removed):
        proto.graph.node.append(rewritten.get(kept.index, kept.proto))
        proto.graph.node[-1].name = kept.name  # unnamed nodes are numbered, and the numbers would change
    return Folded(model=Model(proto, path=model.path), removed=tuple(norm.name for _, norm in folds))


def _find_normalizations(model: Model) -> Iterator[tuple[Node, Node]]:
    """Each convolution with the normalization to fold into it."""
    for norm in model.nodes:
        if norm.op_type != "BatchNormalization" or not is_default(norm):
            continue
        tensor = norm.inputs[0]
        conv = model.producer.get(tensor)
        if conv is None or conv.op_type not in ("Conv", "ConvTranspose") or not is_default(conv):
            continue
        alone = len(model.consumers[tensor]) == 1 and tensor not in {*model.outputs, *model.captured}
        if (
            alone
            and all(name in model.constants for name in (*conv.inputs[1:], *norm.inputs[1:]) if name)
            and not norm.attributes.get("training_mode", 0)
            and norm.attributes.get("spatial", 1)  # opset 7 also had statistics for each single activation
            and len([name for name in norm.outputs if name]) == 1
        ):
            yield conv, norm


def _fold_values(model: Model, conv: Node, norm: Node) -> tuple[Array, Array]:
    """The weight, whose output channels are multiplied, and the bias.

    Output channels are axis 0 of Conv [M, C/g, ...], and groups by axis 1 of ConvTranspose [C, M/g, ...].
    """
    gamma, beta, mean, variance = (model.array(name).astype(np.float64) for name in norm.inputs[1:5])
    factor = gamma / np.sqrt(variance + norm.number("epsilon", 1e-5))
    weight = model.array(conv.inputs[1])
    had = conv.input_at(2)
    bias = model.array(had).astype(np.float64) if had else np.zeros_like(mean)
    rest = (1,) * (weight.ndim - 2)
    if conv.op_type == "Conv":
        scaled = weight.astype(np.float64) * factor.reshape(-1, 1, *rest)
    else:
        groups = conv.number("group", 1)
        split = weight.astype(np.float64).reshape(groups, -1, *weight.shape[1:])
        scaled = (split * factor.reshape(groups, 1, -1, *rest)).reshape(weight.shape)
    return scaled.astype(weight.dtype), ((bias - mean) * factor + beta).astype(weight.dtype)
