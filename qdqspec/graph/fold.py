"""Folding that prepares a model for quantization without changing any Q or DQ.

The weights of an LSTM that are computed from constants, as exporters write them, become constants.
BatchNormalization is folded into the convolution before it. Runtimes do that themselves for float weights,
but not for an integer weight with a DequantizeLinear, so it must be done before pairs are inserted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from qdqspec.arrays import Array
from qdqspec.graph.constants import FoldedConstants, fold_constants
from qdqspec.graph.model import Model, Node
from qdqspec.graph.protos import DEFAULT_DOMAINS, copied, copy_model

_LSTM_WEIGHTS = (1, 2)  # inputs W and R
_MOST_BYTES = 1 << 30  # of a computed weight


@dataclass(frozen=True, slots=True)
class Folded:
    """The prepared model; the names of the nodes folded into their producer, and of those that computed weights."""

    model: Model
    removed: tuple[str, ...]
    computed: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of all nodes that the prepared model lacks."""
        return (*self.removed, *self.computed)

    @property
    def note(self) -> str:
        """A note on the folded nodes."""
        found = []
        if self.removed:
            found.append(f"{len(self.removed)} BatchNormalization folded")
        if self.computed:
            found.append(f"weights of LSTM computed, {len(self.computed)} nodes less")
        return f"{', '.join(found)}, as tuning does" if found else ""


def fold_weights(model: Model) -> Folded:
    """Compute the weights of LSTM nodes that depend on constants only, and fold BatchNormalization."""
    needed = {
        node.inputs[index]
        for node in model.nodes
        if node.op_type == "LSTM" and node.domain in DEFAULT_DOMAINS
        for index in _LSTM_WEIGHTS
        if node.inputs[index] not in model.constants
    }
    weights = (
        fold_constants(model, only=needed, limit_bytes=_MOST_BYTES)
        if needed
        else FoldedConstants(model=model)
    )
    folded = fold_batchnorm(weights.model)
    if weights.model is model:
        return folded
    nodes = weights.model.by_name
    removed = tuple(model.producer[nodes[name].outputs[0]].name for name in folded.removed)
    return Folded(folded.model, removed, (*weights.folded, *weights.unused))


def fold_batchnorm(model: Model) -> Folded:
    """Fold each inference-mode BatchNormalization into the Conv or ConvTranspose that it is the only consumer of.

    Weights and biases are computed in float64 and stored in the weight's type. The convolution then makes the
    output tensor of the normalization, under that name. Its old parameters are removed, Constant nodes among them;
    the rest of the model is unchanged, and all nodes keep their names. A model with nothing to fold is returned
    unchanged.
    """
    folds = list(_find(model))
    if not folds:
        return Folded(model, ())
    removed = {norm.index for _, norm in folds}
    unread = _unread(model, folds)
    removed |= {model.producer[name].index for name in unread & model.producer.keys()}  # Constant nodes
    taken = {*model.types, *model.consumers, *model.subgraph_reads}
    proto = copy_model(model.flat, but={"node", "initializer", "input"})
    proto.graph.initializer.extend(t for t in model.flat.graph.initializer if t.name not in unread)
    proto.graph.input.extend(i for i in model.flat.graph.input if i.name not in unread)
    rewritten: dict[int, onnx.NodeProto] = {}
    for conv, norm in folds:  # one weight at a time limits memory to the results and one computation
        names = [_free_name(f"{norm.outputs[0]}/{what}", taken) for what in ("weight", "bias")]
        for name, values in zip(names, _folded_values(model, conv, norm), strict=True):
            proto.graph.initializer.append(numpy_helper.from_array(values, name))
        rewritten[conv.index] = _rewritten(conv, norm, names)
    proto.graph.node.extend(
        _named(rewritten.get(n.index, n.proto), n.name) for n in model.nodes if n.index not in removed
    )
    return Folded(Model(proto, path=model.path), tuple(norm.name for _, norm in folds))


def _find(model: Model) -> Iterator[tuple[Node, Node]]:
    """Each convolution with the normalization to fold into it."""
    for norm in model.nodes:
        if norm.op_type != "BatchNormalization" or norm.domain not in DEFAULT_DOMAINS:
            continue
        conv = model.producer.get(norm.inputs[0])
        if conv is not None and _foldable(model, conv, norm):
            yield conv, norm


def _foldable(model: Model, conv: Node, norm: Node) -> bool:
    tensor = norm.inputs[0]
    alone = len(model.consumers[tensor]) == 1 and tensor not in {*model.outputs, *model.captured}
    parameters = [*conv.inputs[1:], *norm.inputs[1:]]
    return (
        conv.op_type in ("Conv", "ConvTranspose")
        and conv.domain in DEFAULT_DOMAINS
        and alone
        and all(name in model.constants for name in parameters if name)
        and not norm.attributes.get("training_mode", 0)
        and bool(norm.attributes.get("spatial", 1))  # opset 7 also had statistics for each single activation
        and len([name for name in norm.outputs if name]) == 1
    )


def _folded_values(model: Model, conv: Node, norm: Node) -> tuple[Array, Array]:
    gamma, beta, mean, variance = (model.array(name).astype(np.float64) for name in norm.inputs[1:5])
    factor = gamma / np.sqrt(variance + float(norm.attributes.get("epsilon", 1e-5)))  # type: ignore[arg-type] # a float attribute
    weight = model.array(conv.inputs[1])
    had_bias = len(conv.inputs) > 2 and conv.inputs[2]
    bias = model.array(conv.inputs[2]).astype(np.float64) if had_bias else np.zeros_like(mean)
    scaled = _scale_channels(weight.astype(np.float64), factor, conv)
    return scaled.astype(weight.dtype), ((bias - mean) * factor + beta).astype(weight.dtype)


def _scale_channels(weight: npt.NDArray[np.float64], factor: npt.NDArray[np.float64], conv: Node) -> Array:
    """Multiply each output channel: axis 0 of Conv [M, C/g, ...], groups by axis 1 of ConvTranspose [C, M/g, ...]."""
    rest = (1,) * (weight.ndim - 2)
    if conv.op_type == "Conv":
        return weight * factor.reshape(-1, 1, *rest)
    groups = int(conv.attributes.get("group", 1))  # type: ignore[call-overload] # an int attribute
    split = weight.reshape(groups, -1, *weight.shape[1:])
    return (split * factor.reshape(groups, 1, -1, *rest)).reshape(weight.shape)


def _rewritten(conv: Node, norm: Node, parameters: list[str]) -> onnx.NodeProto:
    """The convolution with its new parameters and the output of the normalization."""
    node = copied(conv.proto)
    del node.input[1:]
    node.input.extend(parameters)
    node.output[0] = norm.outputs[0]
    return node


def _named(proto: onnx.NodeProto, name: str) -> onnx.NodeProto:
    """The node with its unique name stored: unnamed nodes are numbered, and the numbers would change."""
    if proto.name == name:
        return proto
    named = copied(proto)
    named.name = name
    return named


def _free_name(wanted: str, taken: set[str]) -> str:
    """The name, or a variant that the model does not use; it is added to the set."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


def _unread(model: Model, folds: Sequence[tuple[Node, Node]]) -> set[str]:
    """The old parameters that have no reader any more."""
    old = {name for conv, norm in folds for name in (*conv.inputs[1:], *norm.inputs[1:])}
    convs = {conv.index for conv, _ in folds}
    removed = {norm.index for _, norm in folds}
    read = {*model.outputs, *model.subgraph_reads}
    for node in model.nodes:
        if node.index not in removed:
            read.update(node.inputs[:1] if node.index in convs else node.inputs)
    return old - read
