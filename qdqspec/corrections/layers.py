"""Linear layers as matrices: a weight as rows by columns, and its input as rows with the same columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array, Floats32
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_default
from qdqspec.placement.space.units import weight_input
from qdqspec.types import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """A Conv, Gemm or MatMul with a constant weight. Columns are in the order (kernel position, input channel).

    A weight of an LSTM is one too, with a group for each direction, where only its matrix is needed.
    """

    node: Node
    weight: str
    shape: tuple[int, ...]
    source: str  # the input tensor
    groups: int = 1

    @property
    def columns(self) -> int:
        """The number of products in each output."""
        if self.node.op_type == "Conv":
            return int(np.prod(self.shape[1:]))
        return self.shape[-1] if self.node.op_type == "LSTM" else self.shape[self._is_transposed]

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one input and one output channel."""
        return self.groups > 1 and self.shape[:2] == (self.groups, 1)

    def matrix(self, weight: Array) -> Array:
        """A weight as (group, output channel, column)."""
        if self.node.op_type == "Conv":
            last = np.moveaxis(weight, 1, -1)
            return last.reshape(self.groups, self.shape[0] // self.groups, -1)
        if self.node.op_type == "LSTM":
            return weight
        return (weight if self._is_transposed else weight.T)[None]

    def patches(self, value: Array, most: int) -> Floats32 | None:
        """Inputs of outputs as (row, kernel position, channel), at most ``most`` rows, evenly spaced.

        ``None`` for another shape.
        """
        data = value.astype(np.float32, copy=False)
        if self.node.op_type == "Conv":
            return self._windows(data, most)
        if data.ndim < 2 or data.shape[-1] != self.columns:
            return None
        rows = data.reshape(-1, 1, data.shape[-1])
        return rows[_evenly(len(rows), most)]

    def grouped(self, patches: Floats32) -> Floats32:
        """Patches as (group, row, column)."""
        rows, positions, _ = patches.shape
        by_group = patches.reshape(rows, positions, self.groups, -1)
        return np.ascontiguousarray(by_group.transpose(2, 0, 1, 3).reshape(self.groups, rows, -1))

    def _windows(self, data: Floats32, most: int) -> Floats32 | None:
        """The input windows of a convolution at some of its output positions."""
        kernel, attributes = self.shape[2:], self.node.attributes
        rank = len(kernel)
        if data.ndim != rank + 2 or data.shape[1] != self.shape[1] * self.groups:
            return None
        strides = _numbers(attributes.get("strides"), rank)
        dilations = _numbers(attributes.get("dilations"), rank)
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        pads = [(0, 0), *self._pads(data.shape[2:], spans, strides), (0, 0)]
        padded = np.pad(np.moveaxis(data, 1, -1), pads)
        sizes = [size - span for size, span in zip(padded.shape[1:-1], spans, strict=True)]
        if min(sizes, default=0) < 0:
            return None
        positions = len(padded), *(size // stride + 1 for size, stride in zip(sizes, strides, strict=True))
        sample, *chosen = np.unravel_index(_evenly(int(np.prod(positions)), most), positions)
        inside = np.unravel_index(np.arange(int(np.prod(kernel))), kernel)  # of the window
        steps = zip(chosen, strides, inside, dilations, strict=True)
        at = [index[:, None] * stride + own * dilation for index, stride, own, dilation in steps]
        found: Floats32 = padded[(sample[:, None], *at)]
        return found

    def _pads(
        self, sizes: tuple[int, ...], spans: list[int], strides: list[int]
    ) -> Iterator[tuple[int, int]]:
        attributes, rank = self.node.attributes, len(spans)
        auto = attributes.get("auto_pad", b"NOTSET")
        if auto in (b"NOTSET", b"VALID"):
            given = _numbers(attributes.get("pads"), 2 * rank, 0) if auto == b"NOTSET" else [0] * 2 * rank
            yield from ((given[i], given[i + rank]) for i in range(rank))
            return
        for size, span, stride in zip(sizes, spans, strides, strict=True):
            total = max((-(-size // stride) - 1) * stride + span - size, 0)
            less, more = total // 2, total - total // 2
            yield (less, more) if auto == b"SAME_UPPER" else (more, less)

    @property
    def _is_transposed(self) -> bool:
        return self.node.op_type == "Gemm" and bool(self.node.attributes.get("transB", 0))


def find_layers(model: Model, sites: Iterable[Site]) -> dict[str, LinearLayer]:
    """The linear layers of the main graph whose weights these sites quantize, by weight.

    Omitted are weights with several consumers, and nodes in a body, whose inputs cannot be observed in shape.
    """
    found: dict[str, LinearLayer] = {}
    for site in sites:
        if not site.weight or len(model.consumers.get(site.tensor, ())) != 1:
            continue
        end = model.consumers[site.tensor][0]
        layer = _layer(model, model.by_name[end.node])
        if layer is not None and layer.weight == site.tensor and layer.source not in model.constants:
            found[site.tensor] = layer
    return found


def _layer(model: Model, node: Node) -> LinearLayer | None:
    index = weight_input(model, node) if is_default(node) else None
    if index is None or index == 0 or node.scope or node.op_type not in ("Conv", "Gemm", "MatMul"):
        return None
    shape = tuple(model.constants[node.inputs[index]].dims)
    if node.op_type != "Conv" and (len(shape) != 2 or node.attributes.get("transA", 0)):
        return None
    groups = int(cast("int", node.attributes.get("group", 1))) if node.op_type == "Conv" else 1
    if 0 in shape or len(shape) < 2:
        return None
    return LinearLayer(
        node=node, weight=node.inputs[index], shape=shape, source=node.inputs[0], groups=groups
    )


def _numbers(value: object, count: int, otherwise: int = 1) -> list[int]:
    return [int(one) for one in cast("list[int]", value)] if value is not None else [otherwise] * count


def _evenly(count: int, most: int) -> npt.NDArray[np.int64]:
    """Indices below ``count``, at most ``most``, evenly spaced."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)
