"""Maps the kernels of an optimized graph back to the nodes of the model it was made from.

ONNX Runtime fuses, renames and changes layouts. These properties are used (seen with 1.31.1, on all models tried):
a fused kernel keeps the name of one node it replaced, with ``_token_N`` appended if a graph pass made
it; a blocked-layout kernel (NCHWc) is named after its *output tensor* with ``_nchwc`` appended; remaining tensors
keep their names; inserted conversion nodes have generated names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from qdqspec.backends._source import PAIRS, Source
from qdqspec.graph.dynamic_pairs import with_pairs
from qdqspec.graph.model import Model, Node

_TOKEN = re.compile(r"_token_\d+$")
_KERNEL_PREFIXES = ("QLinear", "Nhwc", "Fused", "DynamicQuantize")
_KERNEL_OPS = {
    "QGemm": ("Gemm", "MatMul"),
    "MatMulIntegerToFloat": ("MatMul", "Gemm"),
    "ConvInteger": ("Conv",),
}
_REORDERS = frozenset({"ReorderInput", "ReorderOutput"})
_CONVERSIONS = frozenset({"Transpose", "Reshape", "Cast", "Squeeze", "Unsqueeze"})  # where they were inserted


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a kernel: node names of the model without Q/DQ, or the tensors it converts."""

    name: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    boundary: bool


def map_kernels(graph: onnx.GraphProto, model: Model) -> tuple[Origin, ...]:
    """The origin of every node of an optimized graph, in its order."""
    return tuple(_Mapping(graph, Source(with_pairs(model))).origins())


def plain_name(name: str) -> str:
    """A kernel's name without the numbers that ONNX Runtime changes in every build."""
    return _TOKEN.sub("", name)


class _Mapping:
    """Maps every tensor of the optimized graph to the source, then divides the source between them.

    Tensors connected by a conversion node hold the same values and form one class.
    """

    def __init__(self, graph: onnx.GraphProto, source: Source) -> None:
        self._graph = graph
        self._source = source
        self._parent: dict[str, str] = {}
        self._places: dict[str, dict[str, None]] = {}  # class -> source tensors, in order of discovery
        for node in graph.node:
            if self._converts(node):
                self._join(node.input[0], node.output[0])
        for tensor in self._tensors():
            if tensor in source.tensors:
                self._place(tensor, source.base(tensor))
        self._named = [self._find_node(node) for node in graph.node]
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for tensor in node.input:
                self._readers.setdefault(tensor, []).append(node)

    def origins(self) -> Iterator[Origin]:
        """The origins of all kernels. A node belongs to the first kernel that reaches it."""
        made = {t for places in self._places.values() for t in places}
        taken: set[str] = set()
        for node, known in zip(self._graph.node, self._named, strict=True):
            tensors = tuple(dict.fromkeys(t for out in node.output for t in self._at(out)))
            name = plain_name(node.name) or node.op_type
            if self._converts(node):
                yield Origin(name, (), tensors or self._nearest(node), boundary=True)
                continue
            reached = self._source.slice(tensors, made) or ((known.name,) if known else ())
            nodes = tuple(name for name in reached if name not in taken) or reached[:1]
            taken.update(nodes)
            if nodes:
                yield Origin(name, self._source.in_order(nodes), tensors, boundary=False)
            else:
                yield Origin(name, (), self._nearest(node), boundary=True)

    def _find_node(self, node: onnx.NodeProto) -> Node | None:
        """The source node that a kernel is named after or uniquely matches; also maps its output."""
        if self._converts(node):
            return None
        blocked = node.name.removesuffix("_nchwc")
        if blocked != node.name and blocked in self._source.tensors:
            self._place(node.output[0], self._source.fused_end(self._source.base(blocked), node))
        found = self._source.nodes.get(node.name) or self._source.nodes.get(plain_name(node.name))
        found = found or self._by_inputs(node)
        if found and node.output and not self._at(node.output[0]):
            self._place(node.output[0], self._source.chain_end(found))
        return found

    def _by_inputs(self, node: onnx.NodeProto) -> Node | None:
        """The consumer of the same tensors with a similar operator; weights distinguish siblings."""
        wanted = _source_ops(node.op_type)
        inputs = [place for tensor in node.input if tensor for place in self._at(tensor)]
        readers = [[n for n in self._source.readers.get(t, ()) if n.op_type in wanted] for t in inputs]
        single = [found[0] for found in readers if len(found) == 1]
        return single[-1] if single else None

    def _nearest(self, node: onnx.NodeProto) -> tuple[str, ...]:
        """The positions of a kernel's inputs, or of its consumers' outputs if it converts a generated constant."""
        before = dict.fromkeys(place for tensor in node.input if tensor for place in self._at(tensor))
        readers = (reader for tensor in node.output for reader in self._readers.get(tensor, ()))
        return tuple(before) or tuple(
            dict.fromkeys(p for reader in readers for t in reader.output for p in self._at(t))
        )

    def _converts(self, node: onnx.NodeProto) -> bool:
        if node.op_type in PAIRS or node.op_type in _REORDERS:
            return True
        inserted = bool(node.name) and not {node.name, plain_name(node.name)} & self._source.nodes.keys()
        return node.op_type in _CONVERSIONS and inserted

    def _tensors(self) -> Iterator[str]:
        for node in self._graph.node:
            yield from (t for t in (*node.input, *node.output) if t)

    def _at(self, tensor: str) -> tuple[str, ...]:
        return tuple(self._places.get(self._root(tensor), ()))

    def _place(self, tensor: str, source: str) -> None:
        self._places.setdefault(self._root(tensor), {})[source] = None

    def _join(self, left: str, right: str) -> None:
        self._parent[self._root(right)] = self._root(left)

    def _root(self, tensor: str) -> str:
        while tensor in self._parent:
            tensor = self._parent[tensor]
        return tensor


def _source_ops(kernel: str) -> tuple[str, ...]:
    for prefix in _KERNEL_PREFIXES:
        kernel = kernel.removeprefix(prefix)
    return _KERNEL_OPS.get(kernel, (kernel,))
