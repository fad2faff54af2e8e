"""Linear layers as matrices: a weight as rows by columns, and its input as rows by channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

from qdqspec._core.arrays import Array, Feed, Floats, Floats32
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import is_default, weight_input
from qdqspec.types import Site

# The values of tensors in a run on each feed.
Observe: TypeAlias = Callable[[Sequence[str], Iterable[Feed]], Iterator[Mapping[str, Array]]]


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

    def rows(self, value: Array) -> Floats32 | None:
        """Inputs as (row, group, channel), at each position of a convolution; ``None`` for another shape."""
        data = value.astype(np.float32, copy=False)
        if self.node.op_type == "Conv":
            if data.ndim != len(self.shape) or data.shape[1] != self.shape[1] * self.groups:
                return None
            return np.moveaxis(data, 1, -1).reshape(-1, self.groups, self.shape[1])
        return data.reshape(-1, 1, self.columns) if data.shape[-1:] == (self.columns,) else None

    def window_means(self, value: Floats32) -> Floats | None:
        """The means of a convolution's input over all windows, (group, column); ``None`` for another shape."""
        kernel, attributes, rank = self.shape[2:], self.node.attributes, len(self.shape) - 2
        if value.ndim != rank + 2 or value.shape[1] != self.shape[1] * self.groups:
            return None
        strides, dilations = (
            cast("list[int]", attributes.get(n, [1] * rank)) for n in ("strides", "dilations")
        )
        spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True)]
        pads = list(cast("list[int]", attributes.get("pads", [0] * 2 * rank)))
        if (auto_pad := attributes.get("auto_pad", b"NOTSET")) != b"NOTSET":
            sizes = zip(value.shape[2:], strides, spans, strict=True)
            total = [max((-(-size // step) - 1) * step + span - size, 0) for size, step, span in sizes]
            less, more = [n // 2 for n in total], [n - n // 2 for n in total]
            pads = less + more if auto_pad == b"SAME_UPPER" else more + less
            pads = [0] * 2 * rank if auto_pad == b"VALID" else pads
        padded = np.pad(value, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
        if any(span > size for span, size in zip(spans, padded.shape[2:], strict=True)):
            return None
        places = tuple(range(2, rank + 2))
        windows = np.lib.stride_tricks.sliding_window_view(padded, spans, places)
        seen = windows[:, :, *(slice(None, None, step) for step in strides)]
        means = [
            seen[..., *np.multiply(at, dilations)].mean(axis=(0, *places), dtype=np.float64)
            for at in np.ndindex(*kernel)
        ]
        by_group: Floats = np.stack(means).reshape(-1, self.groups, self.shape[1])
        return by_group.transpose(1, 0, 2).reshape(self.groups, -1)

    @property
    def _is_transposed(self) -> bool:
        return self.node.op_type == "Gemm" and bool(self.node.attributes.get("transB", 0))


def find_layers(model: Model, sites: Iterable[Site]) -> dict[str, LinearLayer]:
    """The linear layers of the main graph whose weights these sites quantize, by weight.

    Omitted are weights with several consumers, and nodes in a body, whose inputs cannot be observed in shape.
    """
    found: dict[str, LinearLayer] = {}
    for site in sites:
        readers = model.consumers.get(site.tensor, ()) if site.weight else ()
        if len(readers) != 1 or not is_default(node := model.by_name[readers[0].node]):
            continue
        is_recurrent = node.op_type == "LSTM"
        layer = _recurrent(model, node, readers[0].input) if is_recurrent else _layer(model, node)
        if layer is not None and layer.weight == site.tensor:
            found[site.tensor] = layer
    return found


def _layer(model: Model, node: Node) -> LinearLayer | None:
    index = weight_input(model, node)
    if not index or node.scope or node.op_type not in ("Conv", "Gemm", "MatMul"):
        return None
    shape = tuple(model.constants[node.inputs[index]].dims)
    if node.op_type != "Conv" and (len(shape) != 2 or node.attributes.get("transA", 0)):
        return None
    if 0 in shape or len(shape) < 2 or node.inputs[0] in model.constants:
        return None
    groups = node.number("group", 1) if node.op_type == "Conv" else 1
    return LinearLayer(
        node=node, weight=node.inputs[index], shape=shape, source=node.inputs[0], groups=groups
    )


def _recurrent(model: Model, node: Node, index: int) -> LinearLayer | None:
    """A weight of an LSTM as a layer, one group for each direction. Hidden states are seen as outputs."""
    weight = node.inputs[index]
    shape = tuple(model.constants[weight].dims) if weight in model.constants else ()
    if index not in (1, 2) or len(shape) != 3 or 0 in shape:
        return None
    source = node.inputs[0] if index == 1 else node.outputs[0]
    return LinearLayer(node=node, weight=weight, shape=shape, source=source, groups=shape[0])
