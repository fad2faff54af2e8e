"""Converts a model with bodies to one flat graph and back, so that graph changes apply to the nodes of all bodies.

In the flat form the nodes of a body come before the node that owns the body, between two marker nodes.
`Enter` makes the inputs of the body and one more tensor, which `Leave` reads after the outputs of the body;
`Leave` makes another one, which the owner reads after its own inputs. So dependencies, order and readers are
those of an ordinary graph. Names are the unique ones of `qdqspec.graph.scopes`. The markers hold the data to
restore the original names and the fields of the body, so that the flat form of an unchanged model gives the
same model, and that of a changed one differs in the changes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx
from onnx import helper

from qdqspec.graph.protos import copied, copy_fields, copy_model, names_read_inside, refill, rename_tensors
from qdqspec.graph.scopes import (
    QDQ_OPS,
    Scope,
    bodies_of,
    find_scopes,
    free_name,
    has_bodies,
    unique_node_names,
)

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

    Initializers that were added to the flat form go to the graph of those that they have ``replaced`` (by the
    new name), or else to the innermost graph that contains all their readers.
    """
    proto = copy_model(flat, but=_MOVED)
    _Closing(flat.graph, dict(replaced or {})).write(proto.graph)
    return proto


def path_of(enter: onnx.NodeProto) -> str:
    """The path of the graph that begins with this marker."""
    found = _attribute(enter, "path")
    return "" if found is None else str(found.s.decode())


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
        renamed = [(name, _name_text(node)) for name, node in nodes if name != prefix + node.name]
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
            nodes=_listed(renamed),
            tensors=_listed(tensors),
            initializers=_listed([(scope.unique(t.name), t.name) for t in scope.graph.initializer]),
            value_info=_listed([(scope.unique(v.name), v.name) for v in scope.graph.value_info]),
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
        flat.attribute.extend(_without_body(a) if a.name in inside else a for a in node.attribute)
    else:
        flat.CopyFrom(node)
    flat.name = name
    reads = {*node.input, *node.output, *names_read_inside(flat)}
    names = {local: unique for local in reads if local and (unique := scope.unique(local)) != local}
    if names:
        rename_tensors(flat, lambda local: names.get(local, local))
    flat.input.extend(inside.values())
    return flat


def _without_body(attribute: onnx.AttributeProto) -> onnx.AttributeProto:
    """An attribute in place of a body: the operators in it except pairs, as text."""
    kinds = (node.op_type for node in attribute.g.node if node.op_type not in QDQ_OPS)
    return helper.make_attribute(attribute.name, ",".join(kinds))


def _name_text(node: onnx.NodeProto) -> str:
    """The name of a node with ``=`` in front; empty if it has none, which differs from an empty name."""
    return f"={node.name}" if node.HasField("name") else ""


def _listed(pairs: Iterable[tuple[str, str]]) -> onnx.TensorProto:
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
        found = _attribute(self.enter, name)
        texts = [] if found is None else [text.decode() for text in found.t.string_data]
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
        self._local = self._restored()
        self._initializers = self._sorted(flat.initializer, self._homes("initializers"))
        self._infos = self._sorted(flat.value_info, self._homes("value_info"))

    def write(self, main: onnx.GraphProto) -> None:
        """Build all graphs; ``main`` becomes the main graph."""
        for body in self._bodies:
            if body.leave is None:
                self._fill(main, body)
                continue
            attributes = {attribute.name: attribute for attribute in body.leave.attribute}
            graph = onnx.GraphProto()
            graph.MergeFromString(attributes["body"].s)
            for value, name in zip(graph.output, body.leave.input, strict=False):
                value.name = self._now(name)
            self._fill(graph, body)
            self._finished[body.leave.output[0]] = attributes["attribute"].s.decode(), graph

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
                self._readers[name] = _common(self._readers[name], body) if name in self._readers else body
            if node.domain == MARKERS:
                body.leave = node
                self._bodies.append(body)
                body = body.parent or main
            else:
                body.nodes.append(node)
        for value in self._flat.output:
            self._readers[value.name] = main
        self._bodies.append(main)

    def _restored(self) -> dict[str, str]:
        """Original names of tensors by their unique ones, unless only one graph defines the name now."""
        local = {unique: name for body in self._bodies for unique, name in body.listed("tensors").items()}
        made = {name for node in self._flat.node for name in node.output}
        made.update(tensor.name for tensor in self._flat.initializer)
        made.update(value.name for value in self._flat.input)
        times = Counter(local.get(name, name) for name in made)
        return {unique: name for unique, name in local.items() if times[name] > 1}

    def _homes(self, kind: str) -> dict[str, _Body]:
        return {unique: body for body in self._bodies for unique in body.listed(kind)}

    def _sorted(self, messages: Iterable[_Named], homes: Mapping[str, _Body]) -> dict[int, list[_Named]]:
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
        for node, name in zip(graph.node, self._names(body), strict=True):
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

    def _names(self, body: _Body) -> list[str | None]:
        """Original names of the nodes of a graph; ``None`` where numbering gives the name of the flat form."""
        original = body.listed("nodes")
        unique = [node.name.removeprefix(body.prefix) for node in body.nodes]
        own = [original.get(node.name, f"={name}") for node, name in zip(body.nodes, unique, strict=True)]
        kinds = (node.op_type for node in body.nodes)
        bare = [onnx.NodeProto(name=n[1:], op_type=kind) for n, kind in zip(own, kinds, strict=True)]
        found = zip(own, unique_node_names(bare), unique, strict=True)
        return [(name[1:] if name else None) if now == wanted else wanted for name, now, wanted in found]


_Named: TypeAlias = onnx.TensorProto | onnx.ValueInfoProto


def _common(one: _Body, other: _Body) -> _Body:
    """The innermost graph around both."""
    around = {id(body) for body in one.chain()}
    return next(body for body in other.chain() if id(body) in around)


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)
