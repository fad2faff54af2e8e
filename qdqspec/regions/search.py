"""Finds the regions of a model: its units of placement. May import floors 0 and 1.

By structure: the program structure tree of the data flow gives chains of operators and, between two
links of a chain, what branches there. A chain is cut into units, each begun by an anchor (Conv, MatMul,
...) or by a branching; units are packed into leaves of at most ``max_nodes`` and larger branchings
become composites.
"""

from __future__ import annotations

from collections.abc import Sequence

from qdqspec.graph.model import Model
from qdqspec.regions.blocks import Block, Composite, Leaf, dissolve, join_tiny, leaves, pack_run
from qdqspec.regions.dominators import Chains, DominatorTree, post_dominators, structure_tree
from qdqspec.regions.flow import Flow, flow_of
from qdqspec.regions.manual import blocks_of_globs, blocks_of_groups
from qdqspec.regions.names import blocks_of_names
from qdqspec.regions.ops import ANCHORS, POOLS
from qdqspec.regions.tree import regions_of_blocks
from qdqspec.types import Region, RegionRules

DEFAULT_RULES = RegionRules()


def find_regions(
    model: Model, rules: RegionRules = DEFAULT_RULES, *, groups: Sequence[Sequence[str]] = ()
) -> tuple[Region, ...]:
    """Cut the main graph into regions: one ROOT first, then depth first; leaves are a strict partition.

    Every node is in exactly one LEAF, except ``Constant`` nodes, which count as initializers and are in
    none. What is computed from shapes or constants alone, and runs of nothing but copies (Transpose,
    Reshape, Q, DQ, ...), join the leaf that uses them; only these may carry a leaf beyond ``max_nodes``.
    Bodies of If, Loop and Scan are not searched: such a node is one unit.

    ``groups`` are node names fused by a backend, for ``by="fusion"``. Where ``names``, ``manual`` or
    ``fusion`` say nothing of a node, structure decides. Ids are positions in the tree (``r0.3``): they
    and the patterns do not depend on names, nor on the order in which nodes are listed.
    Raises `SpecError` when a glob of ``rules.manual`` matches no node.

    Source: Johnson, Pearson, Pingali, "The program structure tree", PLDI 1994.
    """
    flow = flow_of(model)
    if rules.by == "names":
        blocks = blocks_of_names(flow, rules.max_nodes) or blocks_of_structure(flow, rules.max_nodes)
    else:
        blocks = blocks_of_structure(flow, rules.max_nodes)
        if rules.by == "manual":
            blocks = blocks_of_globs(flow, rules.manual, list(leaves(blocks)))
        elif rules.by == "fusion":
            blocks = blocks_of_groups(flow, groups, list(leaves(blocks)))
    return regions_of_blocks(flow, blocks)


def blocks_of_structure(flow: Flow, max_nodes: int) -> list[Block]:
    """The blocks below the root, in topological order."""
    searched = [i for i in flow.order if i not in flow.carried] or list(flow.order)
    builder = _Builder(flow, searched, max_nodes)
    root = Composite(builder.root())
    dissolve(root, max_nodes)
    for leaf in leaves(root.children):
        leaf.nodes = [searched[vertex - 1] for vertex in leaf.nodes]
    return root.children


def _chains(flow: Flow, searched: Sequence[int]) -> Chains:
    """Vertex 0 is the entry, ``i + 1`` stands for ``searched[i]``, the last is the exit."""
    vertex = {index: i + 1 for i, index in enumerate(searched)}
    last = len(searched) + 1
    tree = DominatorTree()
    successors: list[list[int]] = [[] for _ in range(last + 1)]
    works: set[int] = set()  # vertices with an anchor at or above them
    for here, index in enumerate(searched, start=1):
        feeding = _main_feeds(tree, [vertex[p] for p in flow.producers[index] if p in vertex], works)
        tree.add(feeding)
        for producer in feeding or (0,):
            successors[producer].append(here)
        if flow.model.nodes[index].op_type in ANCHORS or not works.isdisjoint(feeding):
            works.add(here)
    results = set(flow.model.outputs)
    for here, index in enumerate(searched, start=1):
        if not successors[here] or not results.isdisjoint(flow.model.nodes[index].outputs):
            successors[here].append(last)
    tree.add(here for here in range(1, last) if successors[here][-1] == last)
    return structure_tree(tree.parent, post_dominators(successors))


def _main_feeds(tree: DominatorTree, feeding: list[int], works: set[int]) -> list[int]:
    """Leave out side inputs: what joins the main flow from an input of its own, without any anchor.

    An attention mask or a position table is read by every layer; followed, it would tie all of them
    into one tangle that no single entry leads to.
    """
    if len(feeding) < 2 or tree.meet(feeding) != 0:
        return feeding
    return [f for f in feeding if f in works] or feeding


class _Builder:
    """Makes blocks of chains, the innermost first."""

    def __init__(self, flow: Flow, searched: Sequence[int], limit: int) -> None:
        self._ops = ["", *(flow.model.nodes[index].op_type for index in searched), ""]
        self._searched = searched
        self._limit = limit
        self._chains = _chains(flow, searched)
        self._between: dict[
            int, list[Block]
        ] = {}  # what lies after a vertex and before the next of its chain

    def root(self) -> list[Block]:
        """The blocks of the outermost chain."""
        # What a chain lies in begins before the chain, so in this order everything inside is ready.
        for vertex in range(len(self._searched), -1, -1):
            for head in self._chains.inside.get(vertex, ()):
                self._between.setdefault(vertex, []).extend(self._chain(head))
        return self._chain(0)

    def _chain(self, head: int) -> list[Block]:
        blocks: list[Block] = []
        branches: list[Block] = []
        unit: list[int] = []
        vertex = head
        while vertex >= 0:
            if self._ops[vertex] in ANCHORS | POOLS and unit:
                blocks += self._unit(branches, unit)
                branches, unit = [], []
            if 0 < vertex <= len(self._searched):
                unit.append(vertex)
            inside = self._between.pop(vertex, [])
            if inside and self._is_light(inside, self._limit - len(unit)):
                unit += [vertex for leaf in leaves(inside) for vertex in leaf.nodes]
            elif inside:
                blocks += self._unit(branches, unit)
                branches, unit = inside, []
            vertex = self._chains.following[vertex]
        blocks += self._unit(branches, unit)
        return join_tiny(pack_run(blocks, self._limit), self._limit)

    def _unit(self, branches: list[Block], unit: list[int]) -> list[Block]:
        """A branching with what closes it is one leaf if it fits, else a composite; a bare run is a leaf."""
        tail: list[Block] = [Leaf(unit, light=self._no_anchor(unit))] if unit else []
        if not branches:
            return tail
        room = self._limit - sum(block.size for block in branches)
        if room < min(len(unit), 1):
            return [Composite(join_tiny([*branches, *pack_run(tail, self._limit)], self._limit))]
        whole = [vertex for leaf in leaves(branches) for vertex in leaf.nodes] + unit[:room]
        closed = Leaf(whole, closed=True, light=self._no_anchor(whole))
        rest = unit[room:]
        return [closed, Leaf(rest, light=True)] if rest else [closed]

    def _is_light(self, blocks: Sequence[Block], room: int) -> bool:
        """Whether they are few and hold no anchor, as the insides of a decomposed LayerNormalization or Gelu."""
        return all(isinstance(b, Leaf) and b.light for b in blocks) and sum(b.size for b in blocks) <= room

    def _no_anchor(self, vertices: Sequence[int]) -> bool:
        return all(self._ops[vertex] not in ANCHORS for vertex in vertices)
