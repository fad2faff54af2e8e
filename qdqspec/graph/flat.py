"""Converts a model with bodies to one flat graph and back, so that graph changes apply to the nodes of all bodies.

In the flat form the nodes of a body come before the node that owns the body, between two marker nodes.
`Enter` makes the inputs of the body and one more tensor, which `Leave` reads after the outputs of the body;
`Leave` makes another one, which the owner reads after its own inputs. So dependencies, order and readers are
those of an ordinary graph. The markers hold the data to restore the original names and the fields of the body, so
that the flat form of an unchanged model gives the same model, and that of a changed one differs in the changes only.

Nodes and tensors have unique names. A scope is one graph of the model, identified by its path: the main graph is
``""``, a body ``If_0/then_branch``, a body inside that one ``If_0/then_branch/Loop_2/body``; ``~1`` is appended if a
node has that name. A node of a body is named ``<path>/<node>``. A tensor keeps its own name if no other graph of the
model defines the same name, and in the main graph always; otherwise it is named ``<path>/<tensor>``. Bodies of other
operators, such as SequenceMap, are not scopes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import TypeAlias

import onnx
from onnx import helper

from qdqspec.graph.protos import (
    DEFAULT_DOMAINS,
    attribute_of,
    copied,
    copy_fields,
    copy_model,
    names_read_inside,
    refill,
    rename_tensors,
)
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
        own = {name: name for name in defined_in(proto.graph)}
        return Scopes((Scope(path="", graph=proto.graph, names=names, tensors=own),))
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


class _Namer:
    """Names the graphs of a model that has bodies."""

    def __init__(self, graph: onnx.GraphProto, names: tuple[str, ...]) -> None:
        self._main = Scope(path="", graph=graph, names=names, tensors={n: n for n in defined_in(graph)})
        self._times = Counter(self._main.tensors.keys())
        for body in _list_bodies_below(graph):
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


def _list_bodies_below(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for _, body in bodies_of(node):
            yield body
            yield from _list_bodies_below(body)


def numbered_name(first: str, taken: Container[str]) -> str:
    """The name, or if it is in ``taken`` with the first free number: ``x~1``."""
    variants = chain([first], (f"{first}~{number}" for number in count(1)))
    return next(name for name in variants if name not in taken)


def free_name(first: str, taken: set[str]) -> str:
    """The name of `numbered_name`, which is added to ``taken``."""
    name = numbered_name(first, taken)
    taken.add(name)
    return name


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Each name of a tensor or node of a graph, without those of its bodies."""
    ports = (*graph.input, *graph.initializer, *graph.output, *graph.value_info)
    inside = (name for node in graph.node for name in (node.name, *node.input, *node.output))
    return {*inside, *(named.name for named in ports)}


MARKERS = "qdqspec.bodies"  # the domain of the markers
ENTER, LEAVE = "Enter", "Leave"
_MOVED = ("node", "initializer", "value_info")  # fields of graphs that are in the flat graph


def flat_form(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The flat form of a model with bodies; a model without bodies is returned unchanged."""
    return opened(proto) if has_bodies(proto) else proto


def scopes_of(flat: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """The path of the graph that each node of a flat form is in; for markers, that of their body."""
    inside = [""]
    for node in flat:
        if node.domain == MARKERS and node.op_type == ENTER:
            inside.append(path_of(node))
        yield inside[-1]
        if node.domain == MARKERS and node.op_type == LEAVE:
            inside.pop()


def is_flat(proto: onnx.ModelProto) -> bool:
    """Whether a model is the flat form of a model with bodies."""
    return any(node.domain == MARKERS for node in proto.graph.node)


def opened(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The flat form of a model, in which each node has a name."""
    flat = copy_model(proto, but=_MOVED)
    scopes = find_scopes(proto)
    inside = {(scope.owner, scope.attribute): scope for scope in scopes.bodies}
    taken = {name for scope in scopes.all for name in (*scope.names, *scope.tensors.values(), scope.path)}
    _Opening(flat.graph, inside, taken).write(scopes.main)
    return flat


def closed(flat: onnx.ModelProto, replaced: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """The model of a flat form.

    An initializer that was added to the flat form goes to the graph of the initializer that it replaces: ``replaced``
    maps the new name to the old one. Without an entry, it goes to the innermost graph that contains all its readers.
    """
    proto = copy_model(flat, but=_MOVED)
    _Closing(flat.graph, dict(replaced or {})).write(proto.graph)
    return proto


def path_of(enter: onnx.NodeProto) -> str:
    """The path of the graph that begins with this marker."""
    return attribute_of(enter, "path", b"").decode()


# ---- to the flat form ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Opening:
    graph: onnx.GraphProto
    scopes: Mapping[tuple[str, str], Scope]
    taken: set[str]  # names of nodes and tensors

    def write(self, scope: Scope) -> str:
        """Append a graph; return the tensor that its owner reads."""
        self.graph.node.append(self._enter(scope))
        begin = self.graph.node[-1].output[-1]
        for tensor in scope.graph.initializer:
            self.graph.initializer.add().CopyFrom(tensor)
            self.graph.initializer[-1].name = scope.unique(tensor.name)
        for value in scope.graph.value_info:
            self.graph.value_info.add().CopyFrom(value)
            self.graph.value_info[-1].name = scope.unique(value.name)
        for name, node in zip(scope.names, scope.graph.node, strict=True):
            inside = {body: self.write(self.scopes[name, body]) for body, _ in bodies_of(node)}
            self.graph.node.append(_flat_node(node, name, scope, inside))
        return self._leave(scope, begin) if scope.parent is not None else ""

    def _enter(self, scope: Scope) -> onnx.NodeProto:
        prefix = f"{scope.path}/" if scope.path else ""
        nodes = zip(scope.names, scope.graph.node, strict=True)
        # own names with ``=`` in front; a node without a name differs from one with an empty name
        own = ((name, node, f"={node.name}" if node.HasField("name") else "") for name, node in nodes)
        renamed = [(name, text) for name, node, text in own if name != prefix + node.name]
        tensors = [(unique, local) for local, unique in scope.tensors.items() if unique != local]
        inputs = scope.graph.input if scope.parent is not None else ()
        name = free_name(f"{prefix}inputs", self.taken)
        return helper.make_node(
            ENTER,
            [],
            [*(scope.unique(value.name) for value in inputs), name],  # at least one output
            name=name,
            domain=MARKERS,
            path=scope.path,
            nodes=_write_names(renamed),
            tensors=_write_names(tensors),
            initializers=_write_names([(scope.unique(t.name), t.name) for t in scope.graph.initializer]),
            value_info=_write_names([(scope.unique(v.name), v.name) for v in scope.graph.value_info]),
        )

    def _leave(self, scope: Scope, begin: str) -> str:
        skeleton = onnx.GraphProto()
        copy_fields(scope.graph, skeleton, but=_MOVED)
        token = free_name(f"{scope.path}/outputs", self.taken)
        leave = helper.make_node(
            LEAVE,
            [*(scope.unique(value.name) for value in scope.graph.output), begin],
            [token],
            name=scope.path,
            domain=MARKERS,
            attribute=scope.attribute,
            body=skeleton.SerializeToString(
                deterministic=True
            ),  # stored as bytes, so that it is not seen as a body
        )
        self.graph.node.append(leave)
        return token


def _flat_node(node: onnx.NodeProto, name: str, scope: Scope, inside: Mapping[str, str]) -> onnx.NodeProto:
    flat = onnx.NodeProto()
    if inside:
        copy_fields(node, flat, but={"attribute"})
        flat.attribute.extend(_replace_body(a) if a.name in inside else a for a in node.attribute)
    else:
        flat.CopyFrom(node)
    flat.name = name
    reads = {*node.input, *node.output, *names_read_inside(flat)}
    names = {local: unique for local in reads if local and (unique := scope.unique(local)) != local}
    if names:
        rename_tensors(flat, lambda local: names.get(local, local))
    flat.input.extend(inside.values())
    return flat


def _replace_body(attribute: onnx.AttributeProto) -> onnx.AttributeProto:
    """An attribute in place of a body: the operators in it except pairs, as text."""
    kinds = (node.op_type for node in attribute.g.node if node.op_type not in QDQ_OPS)
    return helper.make_attribute(attribute.name, ",".join(kinds))


def _write_names(pairs: Iterable[tuple[str, str]]) -> onnx.TensorProto:
    """Pairs of names as an attribute; a tensor, because an empty list has no type."""
    texts = [text.encode() for pair in pairs for text in pair]
    return onnx.TensorProto(data_type=onnx.TensorProto.STRING, dims=[len(texts)], string_data=texts)


# ---- and back ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Body:
    """One graph of the flat form: its markers, and the nodes between them without those of inner bodies."""

    enter: onnx.NodeProto
    parent: _Body | None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    leave: onnx.NodeProto | None = None

    @property
    def prefix(self) -> str:
        """The prefix of the names of its nodes."""
        path = path_of(self.enter)
        return f"{path}/" if path else ""

    def listed(self, name: str) -> dict[str, str]:
        """Pairs of names that the marker has as an attribute."""
        texts = [text.decode() for text in attribute_of(self.enter, name, onnx.TensorProto()).string_data]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def chain(self) -> Iterator[_Body]:
        """This graph and those around it, innermost first."""
        body: _Body | None = self
        while body is not None:
            yield body
            body = body.parent


class _Closing:
    def __init__(self, flat: onnx.GraphProto, replaced: dict[str, str]) -> None:
        self._flat = flat
        self._replaced = replaced
        self._bodies: list[_Body] = []  # in the order of their ends: inner ones first
        self._finished: dict[str, tuple[str, onnx.GraphProto]] = {}  # by the tensor that represents a body
        self._readers: dict[str, _Body] = {}  # the innermost graph that contains all readers, by tensor
        self._read()
        self._local = self._restore_names()
        self._initializers = self._sort_by_home(flat.initializer, self._find_homes("initializers"))
        self._infos = self._sort_by_home(flat.value_info, self._find_homes("value_info"))

    def write(self, main: onnx.GraphProto) -> None:
        """Build all graphs; ``main`` becomes the main graph."""
        for body in self._bodies:
            if body.leave is None:
                self._fill(main, body)
                continue
            graph = onnx.GraphProto()
            graph.MergeFromString(attribute_of(body.leave, "body", b""))
            for value, name in zip(graph.output, body.leave.input, strict=False):
                value.name = self._now(name)
            self._fill(graph, body)
            self._finished[body.leave.output[0]] = attribute_of(body.leave, "attribute", b"").decode(), graph

    def _read(self) -> None:
        body = main = _Body(onnx.NodeProto(), None)
        for node in self._flat.node:
            if node.domain == MARKERS and node.op_type == ENTER:
                if path_of(node):
                    body = _Body(node, body)
                else:
                    main.enter = node  # a part of a model has none
                continue
            for name in {*node.input, *names_read_inside(node)}:
                self._readers[name] = (
                    _find_common_body(self._readers[name], body) if name in self._readers else body
                )
            if node.domain == MARKERS:
                body.leave = node
                self._bodies.append(body)
                body = body.parent or main
            else:
                body.nodes.append(node)
        for value in self._flat.output:
            self._readers[value.name] = main
        self._bodies.append(main)

    def _restore_names(self) -> dict[str, str]:
        """Original names of tensors by their unique ones, unless only one graph defines the name now."""
        local = {unique: name for body in self._bodies for unique, name in body.listed("tensors").items()}
        made = {name for node in self._flat.node for name in node.output}
        made.update(tensor.name for tensor in self._flat.initializer)
        made.update(value.name for value in self._flat.input)
        times = Counter(local.get(name, name) for name in made)
        return {unique: name for unique, name in local.items() if times[name] > 1}

    def _find_homes(self, kind: str) -> dict[str, _Body]:
        return {unique: body for body in self._bodies for unique in body.listed(kind)}

    def _sort_by_home(
        self, messages: Iterable[_Named], homes: Mapping[str, _Body]
    ) -> dict[int, list[_Named]]:
        """Tensors or types by the graph that they belong to; only the first of each name."""
        found: dict[int, list[_Named]] = {id(body): [] for body in self._bodies}
        main = self._bodies[-1]
        seen: set[str] = set()
        for message in messages:
            if message.name in seen:
                continue
            seen.add(message.name)
            before = self._replaced.get(message.name, message.name)
            home = homes.get(before) or self._readers.get(message.name, main)
            found[id(home)].append(message)
        return found

    def _fill(self, graph: onnx.GraphProto, body: _Body) -> None:
        graph.node.extend(map(self._node, body.nodes))
        for node, name in zip(graph.node, self._restore_node_names(body), strict=True):
            if name is None:
                node.ClearField("name")
            else:
                node.name = name
        for field_of, messages in ((graph.initializer, self._initializers), (graph.value_info, self._infos)):
            for message in messages[id(body)]:
                field_of.add().CopyFrom(message)
                field_of[-1].name = self._now(message.name)

    def _now(self, name: str) -> str:
        return self._local.get(name, name)

    def _node(self, flat: onnx.NodeProto) -> onnx.NodeProto:
        node = copied(flat)
        inside = {
            name: graph
            for token in flat.input
            if token in self._finished
            for name, graph in [self._finished[token]]
        }
        if inside:
            refill(node.input, [name for name in flat.input if name not in self._finished])
        if not self._local.keys().isdisjoint({*node.input, *node.output, *names_read_inside(node)}):
            rename_tensors(node, self._now)
        for attribute in node.attribute:
            if attribute.name in inside:
                name = attribute.name
                attribute.Clear()
                attribute.name, attribute.type = name, onnx.AttributeProto.GRAPH
                attribute.g.CopyFrom(inside[name])
        return node

    def _restore_node_names(self, body: _Body) -> list[str | None]:
        """Original names of the nodes of a graph; ``None`` where numbering gives the name of the flat form."""
        original = body.listed("nodes")
        unique = [node.name.removeprefix(body.prefix) for node in body.nodes]
        own = [original.get(node.name, f"={name}") for node, name in zip(body.nodes, unique, strict=True)]
        kinds = (node.op_type for node in body.nodes)
        bare = [onnx.NodeProto(name=n[1:], op_type=kind) for n, kind in zip(own, kinds, strict=True)]
        found = zip(own, unique_node_names(bare), unique, strict=True)
        return [(name[1:] if name else None) if now == wanted else wanted for name, now, wanted in found]


_Named: TypeAlias = onnx.TensorProto | onnx.ValueInfoProto


def _find_common_body(one: _Body, other: _Body) -> _Body:
    """The innermost graph around both."""
    around = {id(body) for body in one.chain()}
    return next(body for body in other.chain() if id(body) in around)
