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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqspec._core.arrays import Array, allows
from qdqspec._core.units import list_text
from qdqspec.graph.model import Model, Node, TensorType
from qdqspec.graph.ops import OF_PAIRS, QDQ_OPS, RANDOM, is_default
from qdqspec.graph.protos import (
    IR_WITH_FREE_INITIALIZERS,
    copied,
    free_name,
    graphs_inside,
    refill,
    size_of,
    without_unread,
)

LIMIT_BYTES = 2**20  # limit for a result that is larger than its inputs


# Never folded, and nothing after operators of pairs is constant: the runtime that reads the model fuses them.
_KEPT = OF_PAIRS | RANDOM | {"Dropout"}

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
        work = _Folding(now, limit_bytes, only)
        smaller = work.smaller()
        left = {node.name for node in smaller.nodes}
        if len(left) == len(now.nodes) and smaller.initializers.keys() == now.initializers.keys():
            notes = []
            if work.too_large:  # constant nodes that stay
                names = list_text([f"'{name}'" for name in work.too_large], 3)
                what = f"because their result would be larger than {limit_bytes} bytes"
                notes.append(f"left as they are, {what}: {names}")
            return Folded(model=now, folded=tuple(folded), unused=tuple(unused), notes=tuple(notes))
        folded += work.folded.values()
        unused += [n.name for n in now.nodes if n.name not in left and n.index not in work.folded]
        now = smaller


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


class _Folding:
    """One pass over a model: ``values`` of tensors that become constants, and the nodes that these replace.

    With ``only`` these tensors are computed, else all.
    """

    def __init__(self, model: Model, limit_bytes: int, only: Collection[str] | None) -> None:
        self.values: dict[str, Array] = {}
        self.folded: dict[int, str] = {}  # names by index
        self.too_large: list[str] = []
        self._model = model
        self._limit = limit_bytes
        self._is_partial = only is not None
        self._within = range(len(model.nodes)) if only is None else _find_ancestors(model, only)
        returned = (t for node in model.nodes if node.is_marker for t in node.inputs if t)
        self._results = {*model.outputs, *returned}  # of the model and of bodies
        functions = {(f.domain, f.name) for f in model.proto.functions}
        for node in model.nodes:  # in graph order
            if not self._may(node) or (node.domain, node.op_type) in functions:
                continue
            if (made := self._evaluate(node)) is not None:
                self.values.update(made)
                self.folded[node.index] = node.name

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
        if shape is None or any(size is None or size < 0 for size in shape):  # some exporters write -1
            return None
        return tuple(size for size in shape if size is not None)

    def _evaluate(self, node: Node) -> dict[str, Array] | None:
        """The results of a node; ``None`` if they are too large, or the reference cannot compute them."""
        inputs: dict[str, Array] = {}
        if (shape := self._static_shape(node)) is not None:
            inputs = {node.inputs[0]: np.broadcast_to(np.float32(0), shape)}  # values do not matter
        else:
            inputs = {
                name: self.values[name] if name in self.values else self._model.array(name)
                for name in dict.fromkeys(filter(None, node.inputs))
            }
        names = [name for name in node.outputs if name]
        alone = _isolate(self._model, node, inputs, names)
        types = [alone.types.get(name, TensorType(0, None)) for name in names]
        allowed = max(self._limit, sum(value.nbytes for value in inputs.values()))
        if not sum(map(_measure, types)) <= allowed and node.op_type not in _BOUNDED:
            self.too_large.append(node.name)
            return None
        from onnx.reference import ReferenceEvaluator  # imported late: it takes as long as all of onnx

        try:
            with np.errstate(all="ignore"):
                results = ReferenceEvaluator(alone.proto).run(None, inputs)
        except Exception:  # noqa: BLE001 - an operator that it cannot compute is kept
            return None
        fits = all(_is_of_type(result, known) for result, known in zip(results, types, strict=True))
        return {n: np.asarray(r) for n, r in zip(names, results, strict=True)} if fits else None

    def smaller(self) -> Model:
        """The model with constants in place of the folded nodes, without what nothing reads; Q/DQ stays."""
        model = self._model
        nodes = [node for node in model.nodes if node.index not in self.folded]
        unread = {name for index in self.folded for name in model.nodes[index].inputs}
        read = set[str]()
        for node in nodes if not self._is_partial else ():
            stays = node.op_type in OF_PAIRS or not is_default(node)
            (read if stays and not node.scope else unread).update(node.outputs)
        unread |= set() if self._is_partial else model.fixed_constants & model.initializers.keys()
        proto = without_unread(model.flat, [node.proto for node in nodes], unread - {""}, read)
        if proto.ir_version < IR_WITH_FREE_INITIALIZERS:
            proto.ir_version = IR_WITH_FREE_INITIALIZERS
            refill(proto.graph.input, [port for port in proto.graph.input if port.name in model.inputs])
        used = {n for node in nodes for n in node.inputs} | model.subgraph_reads
        made = (numpy_helper.from_array(value, name) for name, value in self.values.items() if name in used)
        proto.graph.initializer.extend(made)
        refill(proto.graph.value_info, [v for v in proto.graph.value_info if v.name not in self.values])
        if len(proto.graph.node) < len(model.nodes):
            _keep_names(proto, model)
        return Model(proto, path=model.path)


def _isolate(model: Model, node: Node, inputs: Mapping[str, Array], names: Sequence[str]) -> Model:
    """A model of this node only: types of the whole one may be those that it declares, or depend on data elsewhere.

    Small inputs are initializers, because the result's shape may depend on them.
    """
    small = [numpy_helper.from_array(v, n) for n, v in inputs.items() if v.size <= _LOOKED_INTO]
    read = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in inputs.items()
        if v.size > _LOOKED_INTO
    ]
    made = [onnx.ValueInfoProto(name=name) for name in names]
    graph = helper.make_graph([node.proto], "alone", read, made, small)
    return Model(helper.make_model(graph, opset_imports=list(model.proto.opset_import)))


def _measure(known: TensorType) -> float:
    """Bytes of a tensor before it is computed; NaN if its size is not known."""
    if not known.elem_type or known.shape is None or None in known.shape:
        return math.nan
    return size_of(TensorProto(data_type=known.elem_type, dims=[dim or 0 for dim in known.shape]))


def _is_of_type(value: object, known: TensorType) -> bool:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype == object:
        return False
    fits = known.shape is None or allows(known.shape, value.shape)
    return fits and helper.np_dtype_to_tensor_dtype(value.dtype) == known.elem_type


# Inputs of operators that may be weights, biases or statistics.
_WEIGHTS = {
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "LSTM": (1, 2),
    "MatMul": (0, 1),
}
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
    return replace(weights, model=folded.model, removed=folded.removed)


def fold_batchnorm(model: Model) -> Folded:
    """Fold each inference-mode BatchNormalization into the Conv or ConvTranspose that it is the only consumer of.

    Weights and biases are computed in float64 and stored in the weight's type. The convolution then makes the
    output tensor of the normalization. Its old parameters are removed, and all nodes keep their names.
    """
    folds = list(_find_normalizations(model))
    if not folds:
        return Folded(model=model)
    taken = {*model.types, *model.consumers, *model.subgraph_reads}
    made, rewritten = list[TensorProto](), dict[int, list[onnx.NodeProto]]()
    for conv, norm in folds:
        names = [free_name(f"{norm.outputs[0]}/{what}", taken) for what in ("weight", "bias")]
        made += map(numpy_helper.from_array, _fold_values(model, conv, norm), names)
        rewritten |= {norm.index: [], conv.index: [copied(conv.proto)]}
        refill(rewritten[conv.index][0].input, [conv.inputs[0], *names])
        rewritten[conv.index][0].output[0] = norm.outputs[0]
    old = {name for conv, norm in folds for name in (*conv.inputs[1:], *norm.inputs[1:]) if name}
    nodes = [new for node in model.nodes for new in rewritten.get(node.index, [node.proto])]
    proto = without_unread(model.flat, nodes, old)
    old -= {tensor.name for tensor in proto.graph.initializer}
    refill(proto.graph.input, [port for port in proto.graph.input if port.name not in old])
    proto.graph.initializer.extend(made)
    _keep_names(proto, model, {norm.outputs[0]: conv.name for conv, norm in folds})
    return Folded(model=Model(proto, path=model.path), removed=tuple(norm.name for _, norm in folds))


def _keep_names(proto: onnx.ModelProto, model: Model, moved: dict[str, str] | None = None) -> None:
    """Name the nodes as in the ``model``, by a tensor that they make: the numbers of unnamed ones would change."""
    names = {name: node.name for node in model.nodes for name in node.outputs if name} | (moved or {})
    for node in proto.graph.node:
        node.name = names.get(next(filter(None, node.output), ""), node.name)


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
