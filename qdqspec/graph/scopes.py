"""Unique names for the nodes and tensors of all graphs of a model: the main graph and bodies of If, Loop and Scan.

A scope is one graph of the model, identified by its path: the main graph is ``""``, a body
``If_0/then_branch``, a body inside that one ``If_0/then_branch/Loop_2/body``; ``~`` is appended if a node has
that name. A node of a body is named ``<path>/<node>``. A tensor keeps its own name if no other graph of the
model defines the same name, and in the main graph always; otherwise it is named ``<path>/<tensor>``. Bodies
of other operators, such as SequenceMap, are not scopes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx

from qdqspec.graph.protos import DEFAULT_DOMAINS
from qdqspec.graph.trt import PAIR_OPS

QDQ_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", *PAIR_OPS})
_OF_PAIRS = QDQ_OPS | {"DynamicQuantizeLinear"}
_OWNERS = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scope:
    """One graph of a model. ``names`` are the unique names of its nodes, in their order.

    ``tensors`` are the unique names of the tensors that it defines, by their own names. ``owner`` is the unique
    name of the node that has it as ``attribute``; the main graph has none, and no ``parent``.
    """

    path: str
    graph: onnx.GraphProto
    names: tuple[str, ...]
    tensors: Mapping[str, str]
    parent: Scope | None = None
    owner: str = ""
    attribute: str = ""

    @property
    def chain(self) -> tuple[Scope, ...]:
        """The main graph, then the bodies around this one, then itself."""
        return (*(() if self.parent is None else self.parent.chain), self)

    def unique(self, tensor: str) -> str:
        """The unique name of a tensor that a node of this graph reads or makes; an undefined one keeps its name."""
        scope: Scope | None = self
        while scope is not None:
            if tensor in scope.tensors:
                return scope.tensors[tensor]
            scope = scope.parent
        return tensor


@dataclass(frozen=True, eq=False)
class Scopes:
    """The graphs of a model, each one before the bodies inside it, in graph order."""

    all: tuple[Scope, ...]

    @property
    def main(self) -> Scope:
        """The main graph."""
        return self.all[0]

    @property
    def bodies(self) -> tuple[Scope, ...]:
        """The graphs below the main graph."""
        return self.all[1:]

    @cached_property
    def of_tensor(self) -> Mapping[str, tuple[Scope, str]]:
        """The graph that defines a tensor, and the tensor's name there, by its unique name."""
        return {unique: (s, local) for s in self.all for local, unique in s.tensors.items()}

    @cached_property
    def of_node(self) -> Mapping[str, tuple[Scope, int]]:
        """The graph of a node, and the node's index there, by its unique name."""
        return {name: (s, index) for s in self.all for index, name in enumerate(s.names)}


def find_scopes(proto: onnx.ModelProto) -> Scopes:
    """All graphs of a model with unique names for their nodes and tensors, in one pass over the nodes."""
    names = tuple(unique_node_names(proto.graph.node))
    inside = [(index, body) for index, node in enumerate(proto.graph.node) for body in bodies_of(node)]
    if not inside:
        return Scopes((Scope(path="", graph=proto.graph, names=names, tensors=_OwnNames(proto.graph)),))
    return Scopes(tuple(_Namer(proto.graph, names).scopes()))


def has_bodies(proto: onnx.ModelProto) -> bool:
    """Whether a model has a graph below the main graph."""
    owners = (node for node in proto.graph.node if node.op_type in _OWNERS)
    return any(True for node in owners for _ in bodies_of(node))


def bodies_of(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The bodies of an If, Loop or Scan, by attribute."""
    if node.op_type in _OWNERS and node.domain in DEFAULT_DOMAINS:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.name, attribute.g


def unique_node_names(protos: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """A unique name for each node of one graph: its own, or ``OpType#number`` if it has none or a repeated one.

    The number counts nodes that are not Q or DQ, so that inserting and stripping pairs keeps the names of all
    other nodes. Q and DQ nodes are counted separately.
    """
    seen: set[str] = set()
    plain = pairs = 0
    for proto in protos:
        op_type, name = proto.op_type, proto.name
        is_pair = op_type in _OF_PAIRS
        if not name or name in seen:
            name = f"{op_type}#{pairs if is_pair else plain}"
        seen.add(name)
        yield name
        if is_pair:
            pairs += 1
        else:
            plain += 1


def defined_in(graph: onnx.GraphProto) -> Iterator[str]:
    """The tensors that a graph defines, each once: inputs, initializers, results of its nodes."""
    made = (output for node in graph.node for output in node.output if output)
    sparse = (tensor.values.name for tensor in graph.sparse_initializer)
    given = (value.name for value in (*graph.input, *graph.initializer))
    yield from dict.fromkeys((*given, *sparse, *made))


class _OwnNames(Mapping[str, str]):
    """The tensors of a model without bodies, which keep their names; computed on first use."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph

    @cached_property
    def _names(self) -> dict[str, str]:
        return {name: name for name in defined_in(self._graph)}

    def __getitem__(self, name: str) -> str:
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Namer:
    """Names the graphs of a model that has bodies."""

    def __init__(self, graph: onnx.GraphProto, names: tuple[str, ...]) -> None:
        self._main = Scope(path="", graph=graph, names=names, tensors={n: n for n in defined_in(graph)})
        self._times = Counter(self._main.tensors.keys())
        for body in _below(graph):
            self._times.update(defined_in(body))
        self._tensors = set(self._times)  # unique names assigned, and all own names
        self._paths: set[str] = set()
        self._take(names)

    def scopes(self) -> Iterator[Scope]:
        pending = [self._main]
        while pending:
            scope = pending.pop()
            yield scope
            inside = [
                self._body(scope, name, attribute, graph)
                for name, node in zip(scope.names, scope.graph.node, strict=True)
                for attribute, graph in bodies_of(node)
            ]
            pending.extend(reversed(inside))

    def _body(self, outer: Scope, owner: str, attribute: str, graph: onnx.GraphProto) -> Scope:
        path = free_name(f"{owner}/{attribute}", self._paths)
        names = tuple(f"{path}/{name}" for name in unique_node_names(graph.node))
        self._take(names)
        tensors = {
            name: name if self._times[name] == 1 else free_name(f"{path}/{name}", self._tensors)
            for name in defined_in(graph)
        }
        return Scope(
            path=path,
            graph=graph,
            names=names,
            tensors=tensors,
            parent=outer,
            owner=owner,
            attribute=attribute,
        )

    def _take(self, names: Iterable[str]) -> None:
        """Reserve names, so that no body's path is a node's name or a prefix of one."""
        for name in names:
            parts = name.split("/")
            self._paths.update("/".join(parts[:i]) for i in range(1, len(parts) + 1))


def _below(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for _, body in bodies_of(node):
            yield body
            yield from _below(body)


def free_name(wanted: str, taken: set[str]) -> str:
    """The name, or a variant that is not in ``taken``; it is added to the set."""
    while wanted in taken:
        wanted += "~"
    taken.add(wanted)
    return wanted
