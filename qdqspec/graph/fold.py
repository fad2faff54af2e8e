"""Folding that prepares a model for quantization without touching any Q or DQ.

May import floor 0, onnx, numpy and the model view. Today: BatchNormalization into the convolution before
it. Runtimes do that themselves for float weights, but cannot once an integer weight with a DequantizeLinear
stands there, so it must be done before pairs are placed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from qdqspec.graph.model import Model, Node

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Folded:
    """The prepared model, and the names of the nodes that were folded into their producer."""

    model: Model
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Fold:
    conv: Node
    norm: Node
    weight: Array
    bias: Array


def fold_batchnorm(model: Model) -> Folded:
    """Fold each inference-mode BatchNormalization into the Conv or ConvTranspose that alone feeds it.

    Weights and biases are computed in float64 and stored in the weight's type. The convolution then makes
    the tensor that the normalization made, under that name; all else stays as it was. A model with nothing
    to fold is returned as it is.
    """
    folds = list(_find(model))
    if not folds:
        return Folded(model, ())
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    gone = {fold.norm.index for fold in folds}
    for fold in folds:
        _rewrite(proto.graph, fold)
    kept = [node for index, node in enumerate(proto.graph.node) if index not in gone]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    _drop_unread(
        proto.graph, {name for fold in folds for name in (*fold.norm.inputs[1:], *fold.conv.inputs[1:])}
    )
    return Folded(Model(proto, path=model.path), tuple(fold.norm.name for fold in folds))


def _find(model: Model) -> Iterator[_Fold]:
    for norm in model.nodes:
        if norm.op_type != "BatchNormalization" or norm.domain not in ("", "ai.onnx"):
            continue
        conv = model.producer.get(norm.inputs[0])
        if conv is not None and _foldable(model, conv, norm):
            weight, bias = _folded_values(model, conv, norm)
            yield _Fold(conv, norm, weight, bias)


def _foldable(model: Model, conv: Node, norm: Node) -> bool:
    tensor = norm.inputs[0]
    alone = len(model.consumers[tensor]) == 1 and tensor not in {*model.outputs, *model.subgraph_reads}
    parameters = [*conv.inputs[1:], *norm.inputs[1:]]
    return (
        conv.op_type in ("Conv", "ConvTranspose")
        and alone
        and all(name in model.constants for name in parameters if name)
        and not norm.attributes.get("training_mode", 0)
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


def _rewrite(graph: onnx.GraphProto, fold: _Fold) -> None:
    node = graph.node[fold.conv.index]
    weight, bias = f"{fold.norm.outputs[0]}/weight", f"{fold.norm.outputs[0]}/bias"
    del node.input[1:]
    node.input.extend([weight, bias])
    node.output[0] = fold.norm.outputs[0]
    graph.initializer.append(numpy_helper.from_array(fold.weight, weight))
    graph.initializer.append(numpy_helper.from_array(fold.bias, bias))


def _drop_unread(graph: onnx.GraphProto, candidates: set[str]) -> None:
    """Remove the old parameters that nothing reads any more, also where they are listed as graph inputs."""
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    read |= Model(onnx.ModelProto(graph=graph)).subgraph_reads
    for entries in (graph.initializer, graph.input):
        kept = [entry for entry in entries if entry.name not in candidates or entry.name in read]
        del entries[:]
        entries.extend(kept)
