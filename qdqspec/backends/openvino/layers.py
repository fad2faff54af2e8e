"""Reads OpenVINO's runtime graph and maps its kernels to the nodes of the ONNX model, with their times.

A kernel lists the operators that it computes by name. Properties of these names (2026.4.1): the last operation of a
converted ONNX node has the node's name, earlier ones have it with ``/`` and a suffix, or a generated name; a graph
output has the name of its tensor; copies made for quantization end in ``_original``, ``.N`` or ``_N``. An operator that
the quantization after it replaces (Relu, Clip) or that is folded (BatchNormalization) is not listed: it belongs to the
kernel that makes the next listed tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qdqspec.backends._source import Origin, Source
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import QDQ_OPS
from qdqspec.types import LayerTime

_INPUT, _CONSTANT, _OUTPUT = "Input", "Const", "Output"
_NARROW = frozenset({"u8", "i8", "u4", "i4"})
# OpenVINO's names of element types, in the names that reports use
_TYPES = {
    "f32": "fp32", "f16": "fp16", "bf16": "bf16", "u8": "uint8", "i8": "int8", "i32": "int32", "i64": "int64",
    "boolean": "bool", "u4": "uint4", "i4": "int4",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A node of the runtime graph.

    ``sources`` is OpenVINO's comma-separated list of the operators that it computes. ``inputs`` are indexes of other
    kernels in the order of execution. ``static`` kernels depend on constants only and run once, when the model is
    compiled.
    """

    name: str
    layer_type: str
    primitive: str
    sources: str
    takes: str  # element type of the first input
    makes: str  # element types of the outputs, comma-separated
    details: str  # layouts and shapes
    inputs: tuple[int, ...]
    static: bool

    @property
    def is_computed(self) -> bool:
        """Whether it may run in an inference."""
        return not self.static and self.layer_type not in (_INPUT, _OUTPUT)

    @property
    def integer(self) -> bool:
        """Whether it reads 8-bit integers."""
        return self.takes in _NARROW

    @property
    def made(self) -> str:
        """The element type of the first output."""
        return self.makes.split(",")[0]


def read_kernels(runtime_model: Any) -> tuple[Kernel, ...]:
    """The kernels in order of execution."""
    nodes = list(runtime_model.get_ordered_ops())
    index = {node.get_friendly_name(): i for i, node in enumerate(nodes)}
    kernels: list[Kernel] = []
    for node in nodes:
        inputs = tuple(index[value.get_node().get_friendly_name()] for value in node.input_values())
        told = node.get_rt_info().items()
        facts = {name: text if isinstance(text, str) else str(text.astype(str)) for name, text in told}
        made, layer_type = facts.get("outputPrecisions", ""), facts.get("layerType", "")
        shapes = " ".join(str(output.get_partial_shape()) for output in node.outputs())
        kernel = Kernel(
            name=node.get_friendly_name(),
            layer_type=layer_type,
            primitive=facts.get("primitiveType", ""),
            sources=facts.get("originalLayersNames", ""),
            takes=kernels[inputs[0]].made if inputs else made,
            makes=made,
            details=f"{facts.get('outputLayouts', '')} {shapes}",
            inputs=inputs,
            static=all(kernels[i].static for i in inputs) if inputs else layer_type == _CONSTANT,
        )
        kernels.append(kernel)
    return tuple(kernels)


def graph_hash(kernels: Sequence[Kernel], model: Model) -> str:
    """Hash the kernels with their types, layouts, shapes, connections and the ONNX nodes that each computes.

    These nodes are those that a kernel's list names, without pairs. Names that OpenVINO numbers anew in every build are
    excluded. So are values of weights and scales, which the runtime graph does not contain: engines with equal hashes
    run the same kernels and take the same time.
    """
    known, names = list[str](), _Names(model)
    for kernel in kernels:
        nodes = names.read(kernel.sources).nodes
        ends = (kernel.name,) if kernel.layer_type in (_INPUT, _OUTPUT) else ()
        parts = (kernel.layer_type, kernel.primitive, kernel.makes, kernel.details, *ends, "|", *nodes, "|")
        known.append(_digest(*parts, *(known[i] for i in kernel.inputs)))
    return _digest(*sorted(known))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# ---- origins of kernels -------------------------------------------------------------------------

# These may do nothing but convert. Other kernels compute, whatever they are named after.
_MAY_CONVERT = frozenset({"Convert", "Eltwise", "FakeQuantize", "Reorder", "Subgraph"})
_IN_PLACE = "Reorder"
_ENDING = re.compile(r"(_original|\.\d+|_\d+|/[^/,]*)$")


@dataclass(frozen=True, slots=True)
class _Named:
    """The names in a kernel's list of operators: nodes of the float model, and tensors that it quantizes."""

    nodes: tuple[str, ...]
    quantized: tuple[str, ...]
    tensors: tuple[str, ...]  # of any pair


def layer_times(
    kernels: Sequence[Kernel], model: Model, times: dict[str, float], total_ms: float
) -> tuple[LayerTime, ...]:
    """The kernels of an inference, with ``times`` by kernel name scaled to a sum of ``total_ms``.

    A change of layout that took no time was not executed: OpenVINO makes it in place where it can.
    """
    both = zip(kernels, _Mapping(kernels, _Names(model)).origins(), strict=True)
    found = [(k, o) for k, o in both if k.is_computed and (o.nodes or o.tensors)]
    ran = [(k, o) for k, o in found if o.nodes or k.layer_type != _IN_PLACE or times.get(k.name)]
    spent = sum(times.get(kernel.name, 0.0) for kernel, _ in ran)
    scale = total_ms / spent if spent else 0.0
    layers = []
    for kernel, origin in ran:
        op_type = kernel.layer_type
        if not origin.nodes and not kernel.integer and kernel.made in _NARROW:
            op_type = "QuantizeLinear"
        elif not origin.nodes and kernel.integer and kernel.made.startswith("f"):
            op_type = "DequantizeLinear"
        types = (_TYPES.get(name, name) for name in (kernel.takes, kernel.made))
        layer = LayerTime(
            name=kernel.name,
            op_type=op_type,
            milliseconds=times.get(kernel.name, 0.0) * scale,
            nodes=origin.nodes,
            tensors=() if origin.nodes else origin.tensors,
            boundary=not origin.nodes,
            integer=bool(origin.nodes) and kernel.integer,
            precision=" > ".join(dict.fromkeys(types)),
        )
        layers.append(layer)
    return tuple(layers)


class _Names:
    """Finds nodes of the ONNX model by OpenVINO's names."""

    def __init__(self, model: Model) -> None:
        self.source = Source(model)
        self._known = {tensor: node for node in model.nodes for tensor in node.outputs if tensor}
        self._known |= {node.name: node for node in model.nodes}
        # a graph output has its tensor's name, even if a node is called the same
        self._known |= {t: model.producer[t] for t in model.outputs if t in model.producer}
        self._most_parts = 1 + max((name.count(",") for name in self._known), default=0)

    def read(self, text: str) -> _Named:
        """The nodes in a comma-separated list of names, with commas of their own and endings that OpenVINO appends."""
        found = {node.name: node for node in self._find_all(text.split(","))}.values()
        others = (node.name for node in found if node.name in self.source.nodes)
        pairs = [(n.op_type, self.source.base(n.inputs[0])) for n in found if n.op_type in QDQ_OPS]
        return _Named(
            nodes=self.source.in_order(others),
            quantized=tuple(dict.fromkeys(tensor for op, tensor in pairs if op == "QuantizeLinear")),
            tensors=tuple(dict.fromkeys(tensor for _, tensor in pairs)),
        )

    def _find_all(self, parts: list[str]) -> Iterator[Node]:
        while parts:
            ends = range(min(len(parts), self._most_parts), 0, -1)
            found = ((end, self._find(",".join(parts[:end]))) for end in ends)
            end, node = next((each for each in found if each[1] is not None), (1, None))
            if node is not None:
                yield node
            parts = parts[end:]

    def _find(self, name: str) -> Node | None:
        while name and name not in self._known:
            shorter = _ENDING.sub("", name)
            name = "" if shorter == name else shorter
        return self._known.get(name)


class _Mapping:
    """Divides the nodes of the model between the kernels."""

    def __init__(self, kernels: Sequence[Kernel], names: _Names) -> None:
        self._kernels = kernels
        self._source = names.source
        self._named = [names.read(kernel.sources if kernel.is_computed else "") for kernel in kernels]
        self._readers: dict[int, list[int]] = {}
        for index, kernel in enumerate(kernels):
            for maker in kernel.inputs:
                self._readers.setdefault(maker, []).append(index)
        # of a node: the first kernel that names it, and is no mere conversion
        self._owner: dict[str, int] = {}
        for index in sorted(range(len(kernels)), key=lambda i: (kernels[i].layer_type in _MAY_CONVERT, i)):
            for node in self._named[index].nodes:
                self._owner.setdefault(node, index)
        self._ends = [tuple(self._made_by(i)) for i in range(len(kernels))]
        self._made = {tensor for ends in self._ends for tensor in ends}

    def origins(self) -> Iterator[Origin]:
        """The origins of all kernels, without nodes and tensors for those that run no operator of the model."""
        taken = dict(self._owner)
        for index, kernel in enumerate(self._kernels):
            if not kernel.is_computed:
                yield Origin((), ())
                continue
            named, computes = self._named[index], kernel.layer_type not in _MAY_CONVERT
            # the nodes that lead to its tensors, back to tensors of others
            ends = self._ends[index]
            nodes = self._source.slice(ends, self._made - {*ends}) or named.nodes
            if computes and not nodes:  # it is named after the pair behind it only, or reads it
                nodes = self._source.slice(named.tensors[:1], self._made)
                nodes = tuple(node for node in nodes if node not in self._owner)
            own = [node for node in nodes if taken.setdefault(node, index) == index]
            if computes and not own:
                own = [*nodes]
                if not own:  # an unnamed kernel is a part of the next one that has a node
                    behind = _reached(index, lambda i: self._readers.get(i, ()))
                    owner = next((reader for reader in behind if self._ends[reader]), None)
                    own = [] if owner is None else [*self._named[owner].nodes[:1]]
            yield Origin(self._source.in_order(own), self._tensors(index))

    def _made_by(self, index: int) -> Iterator[str]:
        """The tensors that a kernel computes: outputs of its nodes, and the tensor that it quantizes after them."""
        named, converts = self._named[index], self._kernels[index].layer_type in _MAY_CONVERT
        own = [node for node in named.nodes if self._owner[node] == index]
        others = {t for node, i in self._owner.items() if i != index for t in self._outputs(node)}
        for tensor in named.quantized:
            reached = self._source.slice([tensor], others)
            if set(reached) & set(own) if own else reached and not converts:
                yield tensor
        for node in own:
            yield from self._outputs(node)

    def _tensors(self, index: int) -> tuple[str, ...]:
        """The tensors that a kernel converts: of pairs in its list, else those of the nearest kernels around it."""
        if self._named[index].tensors:
            return self._named[index].tensors
        for maker in _reached(index, lambda i: self._kernels[i].inputs):
            if self._ends[maker]:
                return self._ends[maker][-1:]
            if self._named[maker].tensors:
                return self._named[maker].tensors
            if not self._kernels[maker].inputs and not self._kernels[maker].static:
                return (self._kernels[maker].name,)  # a graph input
        return ()

    def _outputs(self, node: str) -> tuple[str, ...]:
        return tuple(tensor for tensor in self._source.nodes[node].outputs if tensor)


def _reached(start: int, following: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """The indexes that can be reached, nearest first, without ``start``."""
    waiting, seen = deque(following(start)), {start}
    while waiting:
        index = waiting.popleft()
        if index not in seen:
            seen.add(index)
            yield index
            waiting.extend(following(index))
