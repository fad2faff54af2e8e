"""Finds the regions of a model: groups of neighbouring operators that a placement treats alike.

By structure: the program structure tree of the data flow gives chains of operators and, between two links of
a chain, the branches there. A chain is cut into units, each of which begins with an anchor (Conv, MatMul,
...) or with a branching; units are packed into leaves of at most ``max_nodes`` and larger branchings
become composites. Blocks are regions under construction: a `Leaf` is a run of nodes, a `Composite` holds blocks. Both
are mutable while a search builds them; at the end they become regions with ids, boundaries and patterns.

By names: the module names that exporters write into a model are paths (``/layer1/0/conv1/Conv``); where they are flat,
PyTorch's exporter writes the scopes to node metadata under ``pkg.torch.onnx.name_scopes``, as a Python list literal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from typing import TypeAlias

from qdqspec._core.registry import did_you_mean
from qdqspec.errors import SpecError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import ANCHORS, MOVING_OPS, POOLS
from qdqspec.graph.protos import metadata
from qdqspec.graph.regions.flow import Flow, chains_of, flow_of
from qdqspec.graph.regions.pattern import PatternMaker
from qdqspec.types import LayerTime, Region, RegionRules

_TINY = 2  # nodes of the largest leaf that joins a neighbour, if both fit within the limit


@dataclass(slots=True)
class Leaf:
    """Nodes that stay in one region.

    A ``closed`` leaf is a whole branching structure and is not extended.
    """

    nodes: list[int]
    closed: bool = False

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.nodes)


@dataclass(slots=True)
class Composite:
    """Blocks between one entry and one exit. ``size`` counts nodes on all levels."""

    children: list[Block]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(child.size for child in self.children)


Block: TypeAlias = Leaf | Composite


def _list_leaves(blocks: Iterable[Block]) -> Iterable[Leaf]:
    """All leaves in order, at any depth."""
    pending = list(blocks)[::-1]
    while pending:
        block = pending.pop()
        if isinstance(block, Leaf):
            yield block
        else:
            pending.extend(reversed(block.children))


def _list_nodes(blocks: Iterable[Block]) -> list[int]:
    """The nodes of all leaves."""
    return [index for leaf in _list_leaves(blocks) for index in leaf.nodes]


def _dissolve(root: Composite, limit: int, flow: Flow) -> None:
    """Replace composites that make up nearly all of their parent by their children, below ``root``, in place.

    Such a level carries no information. Without it, each composite holds at most half of the nodes of its parent, so
    that all levels together hold at most twice the nodes, however deep they nest.
    """
    pending = [root]
    while pending:
        composite = pending.pop()
        kept: list[Block] = []
        waiting = composite.children[::-1]
        while waiting:
            block = waiting.pop()
            if isinstance(block, Composite) and 2 * block.size > composite.size:
                waiting.extend(reversed(block.children))
            else:
                kept.append(block)
        composite.children = _join_tiny(kept, limit, flow)
        pending.extend(block for block in composite.children if isinstance(block, Composite))


def _pack_run(blocks: Sequence[Block], limit: int) -> list[Block]:
    """Cut runs of leaves into leaves of at most ``limit`` nodes of about equal size, at unit borders where possible."""
    if len(blocks) == 1 and blocks[0].size <= limit:
        return list(blocks)
    packed: list[Block] = []
    for is_open, group in groupby(blocks, key=lambda b: isinstance(b, Leaf) and not b.closed):
        if not is_open:
            packed += group
            continue
        run = [block for block in group if isinstance(block, Leaf)]
        pieces: list[list[int]] = []
        for nodes in (leaf.nodes for leaf in run if leaf.nodes):
            count = -(-len(nodes) // limit)
            step = -(-len(nodes) // count)
            pieces += [nodes[i : i + step] for i in range(0, len(nodes), step)]
        total = sum(map(len, pieces))
        goal = total / -(-total // limit)
        filled: list[list[int]] = [[]]
        for piece in pieces:
            # Exceed the goal only where that is closer to it than stopping before it.
            now = len(filled[-1])
            if now and (now + len(piece) > limit or now + len(piece) - goal > goal - now):
                filled.append([])
            filled[-1] += piece
        packed += map(Leaf, filled)
    return packed


def _join_tiny(blocks: Sequence[Block], limit: int, flow: Flow) -> list[Block]:
    """Merge each tiny leaf with the next leaf, or else with the previous one, if both fit into one.

    A closed leaf takes in only leaves without an anchor, so that equal blocks of a model stay equal.
    """
    if len(blocks) < 2:
        return list(blocks)
    joined: list[Block] = []  # last block first
    for block in reversed(blocks):
        after = joined[-1] if joined else None
        if (
            isinstance(after, Leaf)
            and isinstance(block, Leaf)
            and block.size + after.size <= limit
            and min(block.size, after.size) <= _TINY
            and (
                not (block.closed or after.closed)
                or any(leaf.size <= _TINY and flow.is_light(leaf.nodes) for leaf in (block, after))
            )
            and flow.linked(block.nodes, after.nodes)
        ):
            joined[-1] = Leaf(block.nodes + after.nodes, closed=block.closed or after.closed)
        else:
            joined.append(block)
    return joined[::-1]


DEFAULT_RULES = RegionRules()
_STARTERS = ANCHORS | POOLS


def groups_of(layers: Iterable[LayerTime]) -> tuple[tuple[str, ...], ...]:
    """The nodes of each kernel that computes, in order of execution; a node belongs to its first kernel.

    Used as ``find_regions(model, rules, groups=groups_of(engine.layers()))``. Several kernels may share a
    node: a Softmax that a compiler splits in two is in the first one's group only.
    """
    taken: set[str] = set()
    groups: list[tuple[str, ...]] = []
    for layer in layers:
        own = tuple(node for node in layer.nodes if node not in taken) if not layer.boundary else ()
        taken.update(own)
        if own:
            groups.append(own)
    return tuple(groups)


def find_regions(
    model: Model, rules: RegionRules = DEFAULT_RULES, *, groups: Sequence[Sequence[str]] = ()
) -> tuple[Region, ...]:
    """Cut the graphs of a model into regions: one ROOT first, then depth first. Leaves are a strict partition.

    Each node is in exactly one LEAF, except ``Constant`` nodes, which count as initializers and are in none.
    Nodes computed from shapes or constants alone, and runs of copies only (Transpose, Reshape, Q, DQ, ...),
    join the leaf that uses them; only these may extend a leaf beyond ``max_nodes``. A body of an If, Loop or
    Scan is a region after those of the graph that contains it.

    ``groups`` are node names fused by a backend, for ``by="fusion"``. Nodes that ``names``, ``manual`` or
    ``fusion`` do not cover are grouped by structure. Ids are positions in the tree (``r0.3``): they and the
    patterns do not depend on names, nor on the order in which nodes are listed. Raises `SpecError` when a
    glob of ``rules.manual`` matches no node.

    Source: Johnson, Pearson, Pingali, "The program structure tree", PLDI 1994.
    """
    flow = flow_of(model)
    if rules.by == "manual":
        groups = _groups_of_globs(flow, rules.manual)
    inside: dict[str, list[Block]] = {}
    for path, graph in flow.graphs().items():
        blocks = _blocks_of_names(graph, rules.max_nodes) if rules.by == "names" else []
        if not blocks:
            whole = Composite(_blocks_of_structure(graph, _list_searched(graph), rules.max_nodes))
            _dissolve(whole, rules.max_nodes, graph)
            blocks = whole.children
        if rules.by in ("manual", "fusion"):
            blocks = _blocks_of_groups(graph, groups, _list_leaves(blocks))
        _settle(graph, list(_list_leaves(blocks)))
        inside[path] = blocks
    root = Composite(_prune(_nest_bodies(flow, inside, "")))
    return tuple(_make_regions(root, "r0", None, flow, PatternMaker(flow))) if root.children else ()


def _nest_bodies(flow: Flow, inside: Mapping[str, list[Block]], path: str) -> list[Block]:
    """The blocks of a graph, followed by one for each body in it, recursively."""
    blocks = [*inside.get(path, ())]
    bodies, nodes = flow.model.bodies, flow.model.nodes
    for owner in (nodes[index] for index in flow.order if bodies):
        if owner.scope == path and owner.name in bodies:
            found = [_nest_bodies(flow, inside, end.scope) for end in bodies[owner.name]]
            blocks += [Composite(body) for body in found if body]
    return blocks


def _list_searched(flow: Flow) -> list[int]:
    """The nodes that form regions; `_settle` adds the other ones."""
    return [i for i in flow.order if i not in flow.carried] or list(flow.order)


def _blocks_of_structure(flow: Flow, searched: Sequence[int], limit: int) -> list[Block]:
    """The blocks of the outermost chain of the program structure tree; blocks of inner chains are made first."""
    index_of = [-1, *searched, -1]  # the node of each vertex, without entry and exit
    ops = [flow.model.nodes[index].op_type if index >= 0 else "" for index in index_of]
    vertex_of = {index: vertex for vertex, index in enumerate(searched, start=1)}
    results = {*flow.model.outputs, *flow.given_by}
    chains = chains_of(
        [[vertex_of[p] for p in flow.producers[i] if p in vertex_of] for i in searched],
        results={v for i, v in vertex_of.items() if not results.isdisjoint(flow.model.nodes[i].outputs)},
        anchors={v for i, v in vertex_of.items() if flow.model.nodes[i].op_type in ANCHORS},
    )
    between: dict[int, list[Block]] = {}  # blocks between a vertex and the next of its chain

    @cache  # each branch of a large join asks for it
    def slots(index: int) -> dict[str, int]:
        """The slot at which a node reads each tensor."""
        reads = flow.reads[index]
        return dict(zip(reversed(reads), range(len(reads) - 1, -1, -1), strict=True))

    def character(head: int) -> tuple[int, list[bytes], list[tuple[bytes, int]], int]:
        """Depth, operators and consumers of a chain, so that branches have equal orders in each layer of a model."""
        operators: list[bytes] = []
        vertex = last = head
        while ops[vertex] and len(operators) < limit:
            last = vertex
            operators.append(flow.own[index_of[vertex]])
            vertex = chains.following[vertex]
        made = flow.model.nodes[index_of[last]].outputs
        fed = [(flow.own[c], slots(c)[tensor]) for tensor in made for c in flow.readers.get(tensor, ())]
        return flow.depth[index_of[head]], operators, sorted(fed), head

    def chain(head: int) -> list[Block]:
        blocks: list[Block] = []
        branches: list[Block] = []
        unit: list[int] = []
        vertex = head
        while vertex >= 0:
            if unit and ops[vertex] in _STARTERS:
                blocks += _close_unit(flow, branches, unit, limit)
                branches, unit = [], []
            if index_of[vertex] >= 0:
                unit.append(index_of[vertex])
            inside = between.pop(vertex, [])
            size = sum([block.size for block in inside])
            is_light = all(isinstance(block, Leaf) for block in inside) and flow.is_light(_list_nodes(inside))
            if inside and is_light and size + len(unit) <= limit:
                # The inside of a decomposed LayerNormalization or Gelu does not begin a unit.
                unit += _list_nodes(inside)
            elif inside:
                blocks += _close_unit(flow, branches, unit, limit)
                branches, unit = inside, []
            vertex = chains.following[vertex]
        blocks += _close_unit(flow, branches, unit, limit)
        return _join_tiny(_pack_run(blocks, limit), limit, flow)

    # A chain begins before the chains inside it, so in this order the inner ones are ready.
    for vertex in sorted(chains.inside, reverse=True):
        heads = sorted(chains.inside[vertex], key=character)
        between[vertex] = [block for head in heads for block in chain(head)]
    return chain(0)


def _close_unit(flow: Flow, branches: list[Block], unit: list[int], limit: int) -> list[Block]:
    """One leaf for a branching and the run after it if they fit, else a composite; a run alone is a leaf."""
    tail: list[Block] = [Leaf(unit)] if unit else []
    if not branches:
        return tail
    room = limit - sum([block.size for block in branches])
    if (len(unit) > room and len(unit) - room <= _TINY) or room < min(len(unit), 1):
        return [Composite(_join_tiny([*branches, *_pack_run(tail, limit)], limit, flow))]
    closed = Leaf(_list_nodes(branches) + unit[:room], closed=True)
    return [closed, *_pack_run([Leaf(unit[room:])] if unit[room:] else [], limit)]


# ---- regions given from outside: globs of a spec, or groups of nodes fused by a backend ------------


def _groups_of_globs(flow: Flow, globs: Sequence[Sequence[str]]) -> list[list[str]]:
    """The node names that each tuple of globs matches; a node belongs to the first tuple that matches.

    Raises `SpecError` for a tuple that matches no node.
    """
    names = [flow.model.nodes[index].name for index in flow.order]
    chosen = []
    for patterns in globs:
        matched = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not matched:
            near = did_you_mean(patterns[0], names) if patterns else ""
            raise SpecError(
                f"the manual region {list(patterns)} matches no node{near}",
                where=flow.model.where,
                cure="`qdqspec inspect --verbose` lists the node names",
            )
        chosen.append(matched)
    return chosen


def _blocks_of_groups(flow: Flow, groups: Iterable[Sequence[str]], rest: Iterable[Leaf]) -> list[Block]:
    """One leaf for each group of node names; other nodes stay in their leaf of ``rest``.

    Names that the model does not have are skipped: a backend may name nodes that it created.
    """
    place = {index: i for i, index in enumerate(flow.order)}
    by_name = flow.model.by_name
    taken: set[int] = set()
    found: list[Block] = []
    for group in groups:
        indices = {by_name[name].index for name in group if name in by_name} & place.keys()
        fresh = sorted(indices - taken, key=place.__getitem__)
        taken.update(fresh)
        if fresh:
            found.append(Leaf(fresh))
    for leaf in rest:
        left = [index for index in leaf.nodes if index not in taken]
        if left:
            found.append(Leaf(left))
    return found


def _settle(flow: Flow, found: Sequence[Leaf]) -> None:
    """Assign each carried node, and each node of a leaf that only copies, to the leaf that uses it.

    Then each node of ``flow.order`` is in exactly one leaf.
    """
    home = {index: leaf for leaf in found for index in leaf.nodes}
    nodes = flow.model.nodes
    idle = [leaf for leaf in found if all(nodes[index].op_type in MOVING_OPS for index in leaf.nodes)]
    if len(idle) == len(found):
        idle = []
    for leaf in idle:
        for index in leaf.nodes:
            del home[index]
        leaf.nodes.clear()

    def adopt(index: int, neighbours: Sequence[int]) -> None:
        leaf = next((home[n] for n in neighbours if n in home), None)
        if index not in home and leaf is not None:
            home[index] = leaf
            leaf.nodes.append(index)

    for index in reversed(flow.order):
        adopt(index, flow.consumers[index])
    for index in flow.order:
        adopt(index, flow.producers[index])
    for index in flow.order:  # in a part of the graph without a leaf
        if index not in home:
            home[index] = next(leaf for leaf in found if leaf.nodes)
            home[index].nodes.append(index)


def _prune(blocks: Sequence[Block]) -> list[Block]:
    """Drop blocks that lost all nodes, and levels that hold one block only."""
    kept: list[Block] = []
    for block in blocks:
        if isinstance(block, Leaf):
            if block.nodes:
                kept.append(block)
        elif inside := _prune(block.children):
            kept.append(inside[0] if len(inside) == 1 else Composite(inside))
    return kept


def _make_regions(
    block: Block, name: str, parent: str | None, flow: Flow, patterns: PatternMaker
) -> Iterator[Region]:
    """Regions of a block and all below, depth first. Levels are few: see `_dissolve`."""
    children = block.children if isinstance(block, Composite) else []
    names = tuple(f"{name}.{i}" for i in range(len(children)))
    own = _list_nodes([block])
    pattern = patterns.make(own)
    yield Region(
        id=name,
        type="ROOT" if parent is None else "COMPOSITE" if children else "LEAF",
        parent=parent,
        children=names,
        nodes=tuple(flow.model.nodes[index].name for index in sorted(own)),
        inputs=pattern.inputs,
        outputs=pattern.outputs,
        pattern=pattern.digest,
        pattern_text=pattern.text,
    )
    for child, child_name in zip(children, names, strict=True):
        yield from _make_regions(child, child_name, name, flow, patterns)


# ---- regions by module names ----------------------------------------------------------------------

_DEEPEST = 50  # levels; names are user input and recursion depth follows them
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"


def _blocks_of_names(flow: Flow, max_nodes: int) -> list[Block]:
    """The blocks below the root; empty if fewer than half of the nodes have a module name.

    A module of at most ``max_nodes`` nodes is a leaf, a larger one a composite. Nodes without a module name
    belong to the root.
    """
    paths = {index: _find_scope(flow.model.nodes[index]) for index in _list_searched(flow)}
    if 2 * sum(map(bool, paths.values())) < len(paths):
        return []
    whole = Composite(_blocks_in_module(paths, 0, max_nodes, flow))
    _dissolve(whole, max_nodes, flow)
    return whole.children


def _find_scope(node: Node) -> tuple[str, ...]:
    """The modules that contain a node, outermost first; empty if unknown.

    The metadata are a list of dotted names ending with the operator: ['', 'layer1', 'layer1.0', 'conv2d'].
    """
    text = metadata(node.proto, _SCOPES_KEY)
    if text is None:
        return tuple(part for part in node.name.split("/")[:-1] if part)[:_DEEPEST]
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    path: list[str] = []
    before = ""
    for name in filter(None, names[:-1]):
        path.append(name.removeprefix(f"{before}."))
        before = name
    return tuple(path[:_DEEPEST])


def _blocks_in_module(
    paths: Mapping[int, tuple[str, ...]], depth: int, limit: int, flow: Flow
) -> list[Block]:
    """The blocks of nodes that are in one module of ``depth`` names, by the submodules of their ``paths``."""
    parts: dict[str | int, dict[int, tuple[str, ...]]] = {}  # by submodule, or by node of the module itself
    for index, path in paths.items():
        parts.setdefault(path[depth] if depth < len(path) else index, {})[index] = path
    blocks: list[Block] = []
    for name, part in parts.items():
        if len(part) <= limit:
            blocks.append(Leaf([*part], closed=isinstance(name, str)))
        else:
            inside = _blocks_in_module(part, depth + 1, limit, flow)
            blocks.append(inside[0] if len(inside) == 1 else Composite(inside))
    return _join_tiny(_pack_run(blocks, limit), limit, flow)
