"""The data flow of a model's graphs, in an order that depends on structure alone, and the dominators of a graph.

``Constant`` nodes count as initializers and do not appear. Each body of an If, Loop or Scan is a separate
graph: tensors that it reads from outside are inputs of its nodes, and also of the node that owns the body.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import onnx

from qdqspec.graph.model import Model
from qdqspec.graph.ops import ANCHORS, SHAPE_SOURCES, is_constant_node
from qdqspec.graph.protos import copied

_FEW = 4  # most nodes that compute a side input
BODIES = frozenset({onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Producers and consumers of each node.

    Lists are indexed by `Node.index`; entries of ``Constant`` nodes are empty. ``order`` is a topological
    order of all other nodes that does not change when nodes are renamed or listed in another order (symmetric
    nodes keep their listed order). ``depth`` is the length of the longest path from a source to a node,
    ``own`` its operator and attributes as bytes; ``readers`` maps each tensor to the nodes that read it, in
    that order; ``carried`` are nodes that never form a region alone: computed from shapes or from constants
    alone; ``bodied`` are nodes that have bodies. ``given_by`` maps each output of a body to its producer.
    Producers, consumers and readers are of the same graph.
    """

    model: Model
    order: tuple[int, ...]
    reads: tuple[tuple[str, ...], ...]
    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    carried: frozenset[int]
    bodied: frozenset[int]
    depth: tuple[int, ...]
    own: tuple[bytes, ...]
    readers: dict[str, tuple[int, ...]]
    given_by: dict[str, int]

    def graphs(self) -> dict[str, Flow]:
        """The same data flow per graph, by path: the main graph and all bodies that have nodes."""
        nodes = self.model.nodes
        orders: dict[str, list[int]] = {}
        for index in self.order:
            orders.setdefault(nodes[index].scope, []).append(index)
        return {path: replace(self, order=tuple(order)) for path, order in orders.items()}

    def is_light(self, nodes: Iterable[int]) -> bool:
        """Whether no node among them is an anchor."""
        return ANCHORS.isdisjoint([self.model.nodes[index].op_type for index in nodes])

    def linked(self, a: Iterable[int], b: Iterable[int]) -> bool:
        """Whether one of two sets of nodes feeds the other, or both read from the same node.

        A computation from a graph input without an anchor, for several readers (an attention mask for all
        layers), is linked to none of them: it would make the layer that contains it unlike the others.
        """
        a, b = tuple(a), tuple(b)
        if self._serves_more(a, b) or self._serves_more(b, a):
            return False
        others = set(b)
        around = {f for index in others for f in self.producers[index]}
        for index in a:
            feeds = self.producers[index]
            if not (others.isdisjoint(self.consumers[index]) and others.isdisjoint(feeds)):
                return True
            if not around.isdisjoint(feeds):
                return True
        return False

    def _serves_more(self, side: Collection[int], other: Collection[int]) -> bool:
        """Whether a side computation (graph inputs only, no anchor) has readers outside the other set too."""
        if len(side) > _FEW or any(p not in side for i in side for p in self.producers[i]):
            return False
        readers = {c for i in side for c in self.consumers[i]}.difference(side)
        return len(readers) > 1 and not readers.issubset(other) and self.is_light(side)


def flow_of(model: Model) -> Flow:
    """Read the data flow of a model. Linear in nodes and edges, except for one sort."""
    own, bodied = _write_own_texts(model)
    nodes = model.nodes
    made_by = {t: n.index for n in nodes if own[n.index] for t in n.outputs if t}
    fed = {
        *model.inputs,
        *(t for n in nodes if n.is_marker for t in n.outputs),
    }  # no node makes them, and they vary
    # the tensors that the bodies of a node read; tensors made inside may be included
    captures = {index: nodes[index].body_reads for index in bodied}
    for owner, inside in model.nodes_inside.items():
        made = {tensor for node in inside for tensor in node.outputs}
        read = {tensor for node in inside for tensor in node.inputs}
        captures[model.by_name[owner].index] = frozenset(read - made)
    reads: list[tuple[str, ...]] = []
    producers: list[tuple[int, ...]] = []
    depth: list[int] = []
    for node in nodes:
        tensors = [*node.inputs, *sorted(captures.get(node.index, ()))] if own[node.index] else []
        reads.append(tuple([t for t in tensors if t in made_by or t in fed]))
        feeding = dict.fromkeys([made_by[t] for t in reads[-1] if t in made_by])
        depth.append(max([depth[p] + 1 for p in feeding], default=0))
        producers.append(tuple([p for p in feeding if nodes[p].scope == node.scope]))
    order = _sort_canonically(model, own, depth, _invert_edges(range(len(reads)), producers))
    carried: set[int] = set()
    varying = set(fed)
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for index in order:
        node = nodes[index]
        is_fixed = node.op_type in SHAPE_SOURCES or varying.isdisjoint(reads[index])
        if is_fixed and node.op_type not in ANCHORS:
            carried.add(index)
        else:
            varying.update([tensor for tensor in node.outputs if tensor])
        for tensor in reads[index]:
            if nodes[made_by.get(tensor, index)].scope == node.scope:
                readers[tensor].append(index)
    return Flow(
        model=model,
        order=order,
        reads=tuple(reads),
        producers=tuple(producers),
        consumers=_invert_edges(order, producers),
        carried=frozenset(carried),
        bodied=bodied,
        depth=tuple(depth),
        own=own,
        readers={tensor: tuple(indices) for tensor, indices in readers.items()},
        given_by={
            t: model.by_name[n].index for n, ends in model.bodies.items() for e in ends for t in e.inputs[:-1]
        },
    )


def _invert_edges(order: Iterable[int], producers: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Consumers by producer, in the order given."""
    consumers: list[list[int]] = [[] for _ in producers]
    for index in order:
        for producer in producers[index]:
            consumers[producer].append(index)
    return tuple(map(tuple, consumers))


def attribute_text(attribute: onnx.AttributeProto) -> str:
    """``name=value``, the same for equal values on each machine; a body is represented by its operators."""
    kind = attribute.type
    types = onnx.AttributeProto
    if kind == types.INT:
        value = str(attribute.i)
    elif kind == types.INTS:
        value = "[" + ",".join(map(str, attribute.ints[:])) + "]"
    elif kind == types.FLOAT:
        value = f"{attribute.f:.9g}"
    elif kind == types.STRING:
        value = attribute.s.decode("utf-8", "replace")
    elif kind in (types.GRAPH, types.GRAPHS):
        graphs = [attribute.g] if kind == types.GRAPH else attribute.graphs
        value = "|".join(",".join(node.op_type for node in graph.node) for graph in graphs)
    elif kind == types.TENSOR:
        nameless = copied(attribute.t)
        nameless.ClearField("name")
        value = hashlib.blake2b(nameless.SerializeToString(deterministic=True), digest_size=8).hexdigest()
    else:
        value = hashlib.blake2b(attribute.SerializeToString(deterministic=True), digest_size=8).hexdigest()
    return f"{attribute.name}={value}"


def _sort_canonically(
    model: Model, own: Sequence[bytes], depth: Sequence[int], consumers: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Sort by depth, then by the subgraph above a node, then by the subgraph below it.

    Both subgraphs enter as hashes; graph inputs and outputs count by their position, not by name.
    """
    source = {name: b"in%d" % i for i, name in enumerate(model.inputs)}
    result = {name: b"out%d" % i for i, name in enumerate(model.outputs)}
    above = [b""] * len(own)
    live = [n for n in model.nodes if own[n.index]]
    for node in live:
        digests = [source.get(t, b"w") for t in node.inputs]
        digest = above[node.index] = short_hash(b"\0".join([own[node.index], *digests]))
        for position, tensor in enumerate(node.outputs):
            source[tensor] = (b"%d." % position if position else b"0.") + digest
    below = list(above)
    for node in reversed(live):
        after = [below[c] for c in consumers[node.index]]
        if len(after) > 1:
            after.sort()
        digests = [result.get(t, b"-") for t in node.outputs]
        below[node.index] = short_hash(b"\0".join([above[node.index], *after, *digests]))
    rows = sorted([(depth[n.index], above[n.index], below[n.index], n.index) for n in live])
    return tuple([row[-1] for row in rows])


def _write_own_texts(model: Model) -> tuple[tuple[bytes, ...], frozenset[int]]:
    """Each node's operator and attributes, empty for a ``Constant``; and the nodes that have bodies."""
    bodied = {model.by_name[name].index for name in model.bodies}
    texts: list[bytes] = []
    same: dict[str, bytes] = {}  # equal texts share one object
    for node in model.nodes:
        if is_constant_node(node) or node.is_marker:
            texts.append(b"")
            continue
        attributes: list[str] = []
        for attribute in node.proto.attribute[:]:  # a copy as a list: iterating over a protobuf field is slow
            attributes.append(attribute_text(attribute))
            if attribute.type in BODIES:
                bodied.add(node.index)
        attributes.sort()
        text = f"{node.domain}:{node.op_type}[{','.join(attributes)}]"
        if text not in same:
            same[text] = text.encode()
        texts.append(same[text])
    return tuple(texts), frozenset(bodied)


def short_hash(data: bytes) -> bytes:
    """Eight-byte hash."""
    return hashlib.blake2b(data, digest_size=8).digest()


# ---- dominators ----------------------------------------------------------------------------------


class DominatorTree:
    """A dominator tree that grows by one vertex at a time, in topological order. Vertex 0 is the entry.

    In an acyclic graph the immediate dominator of a vertex is the nearest common ancestor of its predecessors in
    the dominator tree built so far, so one pass in topological order is exact, without iteration.
    """

    def __init__(self) -> None:
        self.parent = [0]
        self._depth = [0]

    def add(self, predecessors: Iterable[int]) -> None:
        """Add the next vertex; the entry dominates one without predecessors."""
        self.parent.append(self.meet(predecessors))
        self._depth.append(self._depth[self.parent[-1]] + 1)

    def meet(self, vertices: Iterable[int]) -> int:
        """The nearest common dominator of the vertices."""
        parent, depth = self.parent, self._depth
        found = -1
        for vertex in vertices:
            found = vertex if found < 0 else found
            while found != vertex:
                if depth[found] < depth[vertex]:
                    found, vertex = vertex, found
                found = parent[found]
        return max(found, 0)


@dataclass(frozen=True, slots=True)
class Chains:
    """The program structure tree of an acyclic graph, as chains.

    ``following[a] == b`` where ``a`` immediately dominates ``b`` and ``b`` immediately post-dominates ``a``;
    such links form disjoint chains. ``inside[a]`` are the heads of the chains strictly between ``a`` and
    ``following[a]``. -1 means none.
    """

    successors: list[list[int]]
    following: list[int]
    inside: dict[int, list[int]]


def chains_of(
    feeds: Sequence[Iterable[int]], *, results: Collection[int] = (), anchors: Collection[int] = ()
) -> Chains:
    """Nest all single-entry single-exit regions (Johnson, Pearson, Pingali, PLDI 1994), in linear time.

    Vertices are numbered from 1 in topological order; ``feeds`` lists the producers of each, and ``results`` leave the
    graph. Vertex 0 is the entry, the last is the exit. Side inputs, which join from an entry of their own without any
    of the ``anchors``, are omitted: all layers read an attention mask or a position table, which would connect them
    into one structure.

    The parent of a chain is the link from the nearest dominator of its head that has one to the end of that link. No
    other region can be smaller: in an acyclic graph, each vertex that ``a`` dominates and that is not reachable through
    ``following[a]`` lies before it.
    """
    last = len(feeds) + 1
    tree = DominatorTree()
    successors: list[list[int]] = [[] for _ in range(last + 1)]
    works: set[int] = set()  # vertices with an anchor at or above them
    for here, row in enumerate(feeds, start=1):
        feeding = list(row)
        if len(feeding) > 1 and tree.meet(feeding) == 0:
            feeding = [f for f in feeding if f in works] or feeding
        tree.add(feeding)
        for producer in feeding or (0,):
            successors[producer].append(here)
        if here in anchors or not works.isdisjoint(feeding):
            works.add(here)
    ends = [here for here in range(1, last) if not successors[here] or here in results]
    for here in ends:
        successors[here].append(last)
    tree.add(ends)
    reverse = DominatorTree()
    for vertex in range(last - 1, -1, -1):
        reverse.add([last - successor for successor in successors[vertex]])
    following, preceding, container = ([-1] * (last + 1) for _ in range(3))
    for vertex in range(1, last + 1):
        above = tree.parent[vertex]
        if last - reverse.parent[last - above] == vertex:  # the immediate post-dominator
            following[above], preceding[vertex] = vertex, above
    inside: dict[int, list[int]] = {}
    for vertex in range(1, last + 1):
        above = tree.parent[vertex]
        if preceding[vertex] >= 0:
            container[vertex] = container[above]
            continue
        container[vertex] = above if following[above] >= 0 else container[above]
        inside.setdefault(container[vertex], []).append(vertex)
    return Chains(successors, following, inside)
