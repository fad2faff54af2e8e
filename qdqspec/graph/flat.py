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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx
from onnx import helper

from qdqspec.graph.ops import OF_PAIRS
from qdqspec.graph.protos import (
    DEFAULT_DOMAINS,
    attribute_of,
    copied,
    copy_fields,
    copy_model,
    free_name,
    names_read_inside,
    refill,
    rename_tensors,
)

_OWNERS = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True, slots=True, eq=False)
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

    def unique(self, tensor: str) -> str:
        """The unique name of a tensor that a node of this graph reads or makes; an undefined one keeps its name."""
        scope: Scope | None = self
        while scope is not None:
            if tensor in scope.tensors:
                return scope.tensors[tensor]
            scope = scope.parent
        return tensor


def find_scopes(proto: onnx.ModelProto) -> tuple[Scope, ...]:
    """All graphs of a model, each before its bodies, with unique names for nodes and tensors, in one pass."""
    tensors_of_main = {name: name for name in defined_in(proto.graph)}
    main = Scope("", proto.graph, tuple(unique_node_names(proto.graph.node)), tensors_of_main)
    bodies = [*_list_bodies_below(proto.graph)]
    times = Counter(main.tensors.keys())
    for body in bodies:
        times.update(defined_in(body))
    tensors = set(times)  # unique names assigned, and all own names
    paths: set[str] = set()  # with all prefixes of names of nodes, so that no body's path is one

    def reserve(names: Iterable[str]) -> None:
        for name in names:
            parts = name.split("/")
            paths.update("/".join(parts[:i]) for i in range(1, len(parts) + 1))

    if bodies:
        reserve(main.names)
    found: list[Scope] = []
    pending = [main]
    while pending:
        outer = pending.pop()
        found.append(outer)
        inside: list[Scope] = []
        for owner, node in zip(outer.names, outer.graph.node, strict=True):
            for attribute, graph in bodies_of(node):
                path = free_name(f"{owner}/{attribute}", paths)
                names = tuple(f"{path}/{name}" for name in unique_node_names(graph.node))
                reserve(names)
                unique = {
                    name: name if times[name] == 1 else free_name(f"{path}/{name}", tensors)
                    for name in defined_in(graph)
                }
                inside.append(Scope(path, graph, names, unique, outer, owner, attribute))
        pending.extend(reversed(inside))
    return tuple(found)


def _list_bodies_below(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for _, body in bodies_of(node):
            yield body
            yield from _list_bodies_below(body)


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
        is_pair = op_type in OF_PAIRS
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


MARKERS = "qdqspec.bodies"  # the domain of the markers
ENTER, LEAVE = "Enter", "Leave"
_MOVED = ("node", "initializer", "value_info")  # fields of graphs that are in the flat graph


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


def path_of(enter: onnx.NodeProto) -> str:
    """The path of the graph that begins with this marker."""
    return attribute_of(enter, "path", b"").decode()


# ---- to the flat form ----------------------------------------------------------------------------


def flat_form(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The flat form of a model, in which each node has a name; a model without bodies is returned unchanged."""
    if next(_list_bodies_below(proto.graph), None) is None:
        return proto
    flat = copy_model(proto, but=_MOVED)
    graph = flat.graph
    scopes = find_scopes(proto)
    inside = {(scope.owner, scope.attribute): scope for scope in scopes[1:]}
    taken = {name for scope in scopes for name in (*scope.names, *scope.tensors.values(), scope.path)}

    def write(scope: Scope) -> str:
        """Append a graph; return the tensor that its owner reads."""
        enter = _make_enter(scope, taken)
        graph.node.append(enter)
        for tensor in scope.graph.initializer:
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = scope.unique(tensor.name)
        for value in scope.graph.value_info:
            graph.value_info.add().CopyFrom(value)
            graph.value_info[-1].name = scope.unique(value.name)
        for name, node in zip(scope.names, scope.graph.node, strict=True):
            tokens = {attribute: write(inside[name, attribute]) for attribute, _ in bodies_of(node)}
            graph.node.append(_flat_node(node, name, scope, tokens))
        if scope.parent is None:
            return ""
        skeleton = onnx.GraphProto()
        copy_fields(scope.graph, skeleton, but=_MOVED)
        token = free_name(f"{scope.path}/outputs", taken)
        results = [*(scope.unique(value.name) for value in scope.graph.output), enter.output[-1]]
        leave = helper.make_node(LEAVE, results, [token], name=scope.path, domain=MARKERS)
        # stored as bytes, so that it is not seen as a body
        body = skeleton.SerializeToString(deterministic=True)
        leave.attribute.append(helper.make_attribute("attribute", scope.attribute))
        leave.attribute.append(helper.make_attribute("body", body))
        graph.node.append(leave)
        return token

    write(scopes[0])
    return flat


def _make_enter(scope: Scope, taken: set[str]) -> onnx.NodeProto:
    """The marker that begins a graph, with the names that the flat form changes."""
    prefix = f"{scope.path}/" if scope.path else ""
    nodes = zip(scope.names, scope.graph.node, strict=True)
    # own names with ``=`` in front; a node without a name differs from one with an empty name
    own = ((name, node, f"={node.name}" if node.HasField("name") else "") for name, node in nodes)
    renamed = [(name, text) for name, node, text in own if name != prefix + node.name]
    tensors = [(unique, local) for local, unique in scope.tensors.items() if unique != local]
    inputs = scope.graph.input if scope.parent is not None else ()
    name = free_name(f"{prefix}inputs", taken)
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


def _flat_node(node: onnx.NodeProto, name: str, scope: Scope, inside: Mapping[str, str]) -> onnx.NodeProto:
    flat = onnx.NodeProto()
    if inside:
        copy_fields(node, flat, but={"attribute"})
        for attribute in node.attribute:
            if (
                attribute.name in inside
            ):  # in place of a body: its operators except pairs and constants, as text
                left_out = OF_PAIRS | {"Constant"}
                kinds = (inner.op_type for inner in attribute.g.node if inner.op_type not in left_out)
                flat.attribute.append(helper.make_attribute(attribute.name, ",".join(kinds)))
            else:
                flat.attribute.append(attribute)
    else:
        flat.CopyFrom(node)
    flat.name = name
    reads = {*node.input, *node.output, *names_read_inside(flat)}
    names = {local: unique for local in reads if local and (unique := scope.unique(local)) != local}
    if names:
        rename_tensors(flat, lambda local: names.get(local, local))
    flat.input.extend(inside.values())
    return flat


def _write_names(pairs: Iterable[tuple[str, str]]) -> onnx.TensorProto:
    """Pairs of names as an attribute; a tensor, because an empty list has no type."""
    texts = [text.encode() for pair in pairs for text in pair]
    return onnx.TensorProto(data_type=onnx.TensorProto.STRING, dims=[len(texts)], string_data=texts)


# ---- and back ------------------------------------------------------------------------------------


def closed(flat: onnx.ModelProto, replaced: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """The model of a flat form.

    An initializer that was added to the flat form goes to the graph of the initializer that it replaces: ``replaced``
    maps the new name to the old one. Without an entry, it goes to the innermost graph that contains all its readers.
    """
    proto = copy_model(flat, but=_MOVED)
    _Closing(flat.graph, dict(replaced or {})).write(proto.graph)
    return proto


@dataclass(slots=True, eq=False)
class _Body:
    """One graph of the flat form: its markers, and the nodes between them without those of inner bodies."""

    enter: onnx.NodeProto
    parent: _Body | None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    leave: onnx.NodeProto | None = None

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
        # original names of tensors by their unique ones, unless only one graph defines the name now
        local = {unique: name for body in self._bodies for unique, name in body.listed("tensors").items()}
        made = {name for node in flat.node for name in node.output}
        made.update(named.name for named in (*flat.initializer, *flat.input))
        times = Counter(local.get(name, name) for name in made)
        self._local = {unique: name for unique, name in local.items() if times[name] > 1}
        self._initializers = self._sort_by_home(flat.initializer, "initializers")
        self._infos = self._sort_by_home(flat.value_info, "value_info")

    def write(self, main: onnx.GraphProto) -> None:
        """Build all graphs; ``main`` becomes the main graph."""
        for body in self._bodies:
            if body.leave is None:
                self._fill(main, body)
                continue
            graph = onnx.GraphProto()
            graph.MergeFromString(attribute_of(body.leave, "body", b""))
            unique = {local: name for name, local in body.listed("tensors").items()}
            for named in (*graph.input, *(tensor.values for tensor in graph.sparse_initializer)):
                named.name = self._now(unique.get(named.name, named.name))
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
                around = {*self._readers.get(name, body).chain()}
                self._readers[name] = next(one for one in body.chain() if one in around)
            if node.domain == MARKERS:
                body.leave = node
                self._bodies.append(body)
                body = body.parent or main
            else:
                body.nodes.append(node)
        for value in self._flat.output:
            self._readers[value.name] = main
        self._bodies.append(main)

    def _sort_by_home(self, messages: Iterable[_Named], kind: str) -> dict[_Body, list[_Named]]:
        """Tensors or types by the graph that they belong to; only the first of each name."""
        homes = {unique: body for body in self._bodies for unique in body.listed(kind)}
        found: dict[_Body, list[_Named]] = {body: [] for body in self._bodies}
        first: dict[str, _Named] = {}
        for message in messages:
            first.setdefault(message.name, message)
        for name, message in first.items():
            home = homes.get(self._replaced.get(name, name)) or self._readers.get(name, self._bodies[-1])
            found[home].append(message)
        return found

    def _fill(self, graph: onnx.GraphProto, body: _Body) -> None:
        graph.node.extend(map(self._node, body.nodes))
        # original names of nodes, with ``=`` in front; none where numbering gives the name of the flat form
        original = body.listed("nodes")
        prefix = f"{path}/" if (path := path_of(body.enter)) else ""
        unique = [node.name.removeprefix(prefix) for node in body.nodes]
        own = [original.get(node.name, f"={name}") for node, name in zip(body.nodes, unique, strict=True)]
        kinds = (node.op_type for node in body.nodes)
        bare = [onnx.NodeProto(name=name[1:], op_type=kind) for name, kind in zip(own, kinds, strict=True)]
        numbered = unique_node_names(bare)
        for node, name, now, wanted in zip(graph.node, own, numbered, unique, strict=True):
            node.name = name[1:] if now == wanted else wanted
            if now == wanted and not name:
                node.ClearField("name")
        for field_of, messages in ((graph.initializer, self._initializers), (graph.value_info, self._infos)):
            for message in messages[body]:
                field_of.add().CopyFrom(message)
                field_of[-1].name = self._now(message.name)

    def _now(self, name: str) -> str:
        return self._local.get(name, name)

    def _node(self, flat: onnx.NodeProto) -> onnx.NodeProto:
        node = copied(flat)
        inside = dict(self._finished[token] for token in flat.input if token in self._finished)
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


_Named: TypeAlias = onnx.TensorProto | onnx.ValueInfoProto
