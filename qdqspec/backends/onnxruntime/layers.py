"""Reads an optimized graph and its profile, and maps the kernels back to the nodes of the given model.

ONNX Runtime fuses, renames and changes layouts. These properties are used (seen with 1.31.1, on all models tried):
a fused kernel keeps the name of one node it replaced, with ``_token_N`` appended if a graph pass made it; a
blocked-layout kernel (NCHWc) is named after its *output tensor* with ``_nchwc`` appended; remaining tensors keep their
names; inserted conversion nodes have generated names. Kernels of the main graph run in the order of the written
optimized graph, while unnamed ones are named by an index that the file does not contain. An event is written when a
kernel ends, so those of a body precede that of the node that owns it: for an If those of a branch, for a Loop or Scan
those of each iteration.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
from onnx import external_data_helper

from qdqspec.backends._source import Origin, Source
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import CONTROL, OF_PAIRS
from qdqspec.qdq import with_pairs
from qdqspec.types import LayerTime

_TOKEN = re.compile(r"_token_\d+$")
_KERNEL_PREFIXES = ("QLinear", "Nhwc", "Fused", "DynamicQuantize")
_KERNEL_OPS = {
    "QGemm": ("Gemm", "MatMul"),
    "MatMulIntegerToFloat": ("MatMul", "Gemm"),
    "ConvInteger": ("Conv",),
}
_REORDERS = frozenset({"ReorderInput", "ReorderOutput"})
_CONVERSIONS = frozenset({"Transpose", "Reshape", "Cast", "Squeeze", "Unsqueeze"})  # where they were inserted


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
                self._parent[self._root(node.output[0])] = self._root(node.input[0])
        for tensor in (name for node in graph.node for name in (*node.input, *node.output)):
            if tensor in source.tensors:
                self._place(tensor, source.base(tensor))
        self._named = [self._find_node(node) for node in graph.node]
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for tensor in node.input:
                self._readers.setdefault(tensor, []).append(node)
        # Tensors between kernels of a blocked layout have generated names: they are mapped by what their reader reads.
        for node, known in zip(reversed(graph.node), reversed(self._named), strict=True):
            tensor = node.name.removesuffix("_nchwc")
            known = source.fused_start(known, tensor, _source_ops(node.op_type))
            if known is None:
                continue
            # an integer kernel has scales between
            alike = len(known.inputs) if node.op_type == known.op_type else 1
            for tensor, base in zip(node.input, map(source.base, known.inputs[:alike]), strict=False):
                if tensor and not self._at(tensor) and base not in source.constants:
                    self._place(tensor, base)

    def origins(self) -> Iterator[Origin]:
        """The origins of all kernels. A node belongs to the first kernel that reaches it."""
        made = {t for places in self._places.values() for t in places}
        taken: set[str] = set()
        # by outputs of kernels: the source nodes of the kernel, or of the next one
        behind: dict[str, tuple[str, ...]] = {}
        for node, known in zip(reversed(self._graph.node), reversed(self._named), strict=True):
            own = self._source.slice(self._made(node), made) or ((known.name,) if known else ())
            if self._converts(node) or not own:  # a part of a function that ONNX Runtime has inlined
                read = (
                    behind.get(reader.output[0])
                    for out in node.output
                    for reader in self._readers.get(out, ())
                )
                own = self._source.in_order(next(filter(None, read), ()))[:1]
            behind.update(dict.fromkeys(node.output, own))
        for node in self._graph.node:
            tensors = self._made(node)
            if self._converts(node):
                yield Origin((), tensors or self._nearest(node))
                continue
            reached = behind[node.output[0]]
            nodes = tuple(name for name in reached if name not in taken) or reached[:1]
            taken.update(nodes)
            yield Origin(self._source.in_order(nodes), tensors if nodes else self._nearest(node))

    def _find_node(self, node: onnx.NodeProto) -> Node | None:
        """The source node that a kernel is named after or uniquely matches; also maps its output."""
        if self._converts(node):
            return None
        blocked = node.name.removesuffix("_nchwc")
        if blocked != node.name and blocked in self._source.tensors:
            self._place(node.output[0], self._source.fused_end(self._source.base(blocked), node))
        found = self._source.nodes.get(node.name) or self._source.nodes.get(plain_name(node.name))
        if found is None:
            # the reader of the same tensors with a similar operator; weights distinguish siblings
            wanted = _source_ops(node.op_type)
            inputs = [place for tensor in node.input if tensor for place in self._at(tensor)]
            readers = [[n for n in self._source.readers.get(t, ()) if n.op_type in wanted] for t in inputs]
            single = [nodes[0] for nodes in readers if len(nodes) == 1]
            found = single[-1] if single else None
        if found and node.output and not self._at(node.output[0]):
            self._place(node.output[0], self._source.chain_end(found))
        return found

    def _made(self, node: onnx.NodeProto) -> tuple[str, ...]:
        """The tensors of the source that a kernel computes."""
        return tuple(dict.fromkeys(t for out in node.output for t in self._at(out)))

    def _nearest(self, node: onnx.NodeProto) -> tuple[str, ...]:
        """The positions of a kernel's inputs, or of its consumers' outputs if it converts a generated constant."""
        before = dict.fromkeys(place for tensor in node.input if tensor for place in self._at(tensor))
        readers = (reader for tensor in node.output for reader in self._readers.get(tensor, ()))
        behind = dict.fromkeys(p for reader in readers for t in reader.output for p in self._at(t))
        return tuple(before or behind)

    def _converts(self, node: onnx.NodeProto) -> bool:
        if node.op_type in OF_PAIRS or node.op_type in _REORDERS:
            return True
        inserted = bool(node.name) and not {node.name, plain_name(node.name)} & self._source.nodes.keys()
        return node.op_type in _CONVERSIONS and inserted

    def _at(self, tensor: str) -> tuple[str, ...]:
        return tuple(self._places.get(self._root(tensor), ()))

    def _place(self, tensor: str, source: str) -> None:
        self._places.setdefault(self._root(tensor), {})[source] = None

    def _root(self, tensor: str) -> str:
        while tensor in self._parent:
            tensor = self._parent[tensor]
        return tensor


def _source_ops(kernel: str) -> tuple[str, ...]:
    for prefix in _KERNEL_PREFIXES:
        kernel = kernel.removeprefix(prefix)
    return _KERNEL_OPS.get(kernel, (kernel,))


# ---- times of kernels, from a profile -----------------------------------------------------------

_SUFFIX = "_kernel_time"
_INTEGER_OPS = ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "DynamicQuantize")
_INTEGER_TYPES = frozenset({"uint8", "int8"})


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One execution of one kernel. ``dtype`` is the type of its first input."""

    name: str
    op_type: str
    microseconds: int
    dtype: str


NamedEvent: TypeAlias = tuple[str, KernelEvent]  # with the unique name of the node
_Nodes: TypeAlias = list[tuple[str, onnx.NodeProto]]  # with their unique names


def parse_profile(text: str) -> tuple[KernelEvent, ...]:
    """Kernel executions in the order they ended, over all runs, from the text of a profile."""
    found = []
    for event in json.loads(text):
        if event.get("cat") != "Node" or not str(event.get("name", "")).endswith(_SUFFIX):
            continue
        arguments = event["args"]
        inputs = arguments.get("input_type_shape") or [{}]
        found.append(
            KernelEvent(
                name=event["name"].removesuffix(_SUFFIX),
                op_type=arguments.get("op_name", ""),
                microseconds=int(event["dur"]),
                dtype=next(iter(inputs[0]), ""),
            )
        )
    return tuple(found)


def layer_times(
    optimized: Model,
    origins: Sequence[Origin],
    events: Sequence[KernelEvent],
    *,
    runs: int,
    total_ms: float,
) -> tuple[LayerTime, ...]:
    """One `LayerTime` for each kernel that ran in the last ``runs`` runs; their sum is ``total_ms``.

    ``origins`` are those of the nodes. Empty if the profile does not match the graph, so that no time is assigned to
    the wrong node. Kernels in a branch that is not executed have no time; those of iterations are added.
    """
    found = runs_of(optimized, events)
    if found is None or len(found) < runs:
        return ()
    spent: list[Counter[str]] = []  # microseconds of each kernel in one run, without those of its bodies
    executed = Counter[str]()  # in all of them
    sample: dict[str, KernelEvent] = {}
    for run in found[-runs:]:
        whole = Counter[str]()
        for name, event in run:
            whole[name] += event.microseconds
            executed[name] += 1
            sample.setdefault(name, event)
        spent.append(whole.copy())
        for scope in optimized.scopes[1:]:
            left = spent[-1][scope.owner] - sum(whole[name] for name in scope.names)
            spent[-1][scope.owner] = max(left, 0)
    ran = [(n, o) for n, o in zip(optimized.nodes, origins, strict=True) if n.name in sample]

    def trimmed_mean(name: str) -> float:
        """Without the lowest and highest fifth: a finer resolution than the profile's whole microseconds."""
        cut = len(spent) // 5
        return statistics.fmean(sorted(run[name] for run in spent)[cut : len(spent) - cut])

    def is_integer(event: KernelEvent) -> bool:
        reads_integers = event.dtype in _INTEGER_TYPES and event.op_type != "Cast"
        return event.op_type.startswith(_INTEGER_OPS) or reads_integers

    times = without_overhead(
        [trimmed_mean(node.name) for node, _ in ran],
        [executed[node.name] / runs for node, _ in ran],
        [node.op_type in CONTROL for node, _ in ran],
        total_ms * 1e3,
    )
    return tuple(
        LayerTime(
            name=plain_name(node.proto.name) or node.op_type,
            op_type=node.op_type,
            milliseconds=time / 1e3,
            nodes=origin.nodes,
            tensors=origin.tensors,
            boundary=not origin.nodes,
            integer=bool(origin.nodes) and is_integer(sample[node.name]),
        )
        for (node, origin), time in zip(ran, times, strict=True)
    )


def without_overhead(
    times: Sequence[float], executed: Sequence[float], have_bodies: Sequence[bool], total: float
) -> list[float]:
    """The time of each kernel without that of the profiler, scaled to a sum of ``total``; the unit is the same.

    ``executed`` is the number of executions that a time is the sum of. The profiler takes time in each of them, about
    2 microseconds, which is most of the time of a small kernel. The time of the shortest kernel is its
    upper bound. Operators with bodies have that of all kernels inside. Times that add up to ``total`` have none.
    """
    left, excess = np.array(times, np.float64), sum(times) - total
    owners, number = np.array(have_bodies, np.bool_), np.array(executed, np.float64)
    if excess > 0 and left[owners].any():
        cut = min(excess, left[owners].sum())
        left[owners] *= 1 - cut / left[owners].sum()
        excess -= cut
    if excess > 0 and not owners.all():
        kernels = ~owners & (number > 0)
        most = (left[kernels] / number[kernels]).min()
        left[kernels] -= number[kernels] * min(most, excess / number[kernels].sum())
        left = left.clip(0)  # the shortest may be rounded below zero
    shares = left / left.sum() if left.any() else left
    return [float(share) * total for share in shares]


def runs_of(optimized: Model, events: Sequence[KernelEvent]) -> list[list[NamedEvent]] | None:
    """The kernels executed in each run of a model; ``None`` if the events do not match it.

    Events between those of two nodes of the main graph are of the bodies of the second one.
    """
    # the nodes of each body and of the bodies inside, by owner and attribute
    inside: dict[str, dict[str, _Nodes]] = {}
    for scope in optimized.scopes[:0:-1]:
        nodes = [*zip(scope.names, scope.graph.node, strict=True)]
        nodes += [each for name in scope.names for deeper in inside.get(name, {}).values() for each in deeper]
        inside.setdefault(scope.owner, {})[scope.attribute] = nodes
    main = optimized.scopes[0]
    runs: list[list[NamedEvent]] = []
    at = 0
    while at < len(events):
        runs.append([])
        for name, node in zip(main.names, main.graph.node, strict=True):
            end = next((index for index in range(at, len(events)) if _fits(events[index], node)), None)
            if end is None:
                return None
            runs[-1] += _matched(events[at:end], inside.get(name, {}).values())
            runs[-1].append((name, events[end]))
            at = end + 1
    return runs


def _matched(events: Sequence[KernelEvent], bodies: Iterable[_Nodes]) -> list[NamedEvent]:
    """The events of the body that was executed, any number of times, with its nodes; empty if none matches."""
    for nodes in bodies:
        alike: dict[str, _Nodes] = {}  # by operator
        for name, node in nodes:
            alike.setdefault(node.op_type, []).append((name, node))
        found: list[NamedEvent] = []
        used = Counter[str]()
        for event in events:
            fitting = [
                (node.name != event.name, used[name], name)
                for name, node in alike.get(event.op_type, ())
                if _fits(event, node)
            ]
            if not fitting:
                break
            found.append((min(fitting)[2], event))
            used[found[-1][0]] += 1
        else:
            return found
    return []


def _fits(event: KernelEvent, node: onnx.NodeProto) -> bool:
    return event.op_type == node.op_type and node.name in ("", event.name)


# ---- hash of an optimized graph -----------------------------------------------------------------


def graph_hash(graph: onnx.GraphProto, folder: Path, outer: Mapping[str, str] | None = None) -> str:
    """Hash the computation of a graph: operators, attributes, constants and connections, without names.

    Node and tensor names inside are excluded, because ONNX Runtime numbers generated names anew in
    every build; names of graph inputs and outputs count. Independent of node order: every tensor
    has the hash of the node that makes it (a Merkle tree), and the graph's hash covers all nodes and outputs.
    ``outer`` are the hashes of tensors that a body may read; ``folder`` has the external weights.
    """
    known = dict(outer or {})
    known.update((i.name, _digest("input", i.name)) for i in graph.input)
    for tensor in graph.initializer:
        digest = hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)} ".encode())
        if external_data_helper.uses_external_data(tensor):
            info = external_data_helper.ExternalDataInfo(tensor)
            if length := int(info.length or 0):
                weights = np.memmap(folder / info.location, np.uint8, "r", int(info.offset or 0), length)
                digest.update(weights.data)
        elif tensor.HasField("raw_data"):
            digest.update(tensor.raw_data)
        else:
            digest.update(onnx.numpy_helper.to_array(tensor).tobytes())
        known[tensor.name] = digest.hexdigest()
    nodes = []
    for node in graph.node:  # ONNX requires topological order, so every input is known by now
        attributes = sorted(
            _digest(a.name, graph_hash(a.g, folder, known))
            if a.HasField("g")
            else _digest(a.name, a.SerializeToString(deterministic=True).hex())
            for a in node.attribute
        )
        inputs = (known.get(name, "") for name in node.input)
        digest_of_node = _digest(node.domain, node.op_type, len(node.output), *attributes, "|", *inputs)
        nodes.append(digest_of_node)
        known.update((name, _digest(digest_of_node, index)) for index, name in enumerate(node.output) if name)
    outputs = (f"{o.name}={known.get(o.name, '')}" for o in graph.output)
    return _digest(*sorted(nodes), "|", *outputs)


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
