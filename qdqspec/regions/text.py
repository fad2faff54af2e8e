"""A pattern as readable text: ``Conv > Relu > (Conv | Conv > Relu) > Add``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qdqspec.regions.dominators import Chains, DominatorTree, post_dominators, structure_tree

LONGEST = 40  # operators that are written one by one; larger patterns are written as counts


def pattern_text(op_types: Sequence[str], feeds: Sequence[Sequence[int]]) -> str:
    """Operators along the data flow, branches in parentheses; large graphs as counts of operators.

    Operators are in topological order; ``feeds`` lists for each the positions of its producers.
    """
    return counted_text(op_types) if len(op_types) > LONGEST else _Writer(op_types, feeds).write()


def counted_text(op_types: Sequence[str]) -> str:
    """Counts of operators by type: ``120 nodes: 40 Conv, 40 Relu, ...``."""
    common = sorted(Counter(op_types).items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{count} {op}" for op, count in common[:5])
    return f"{len(op_types)} nodes: {shown}" + (", ..." if len(common) > 5 else "")


class _Writer:
    def __init__(self, op_types: Sequence[str], feeds: Sequence[Sequence[int]]) -> None:
        self._ops = op_types
        self._successors = _successors(feeds)
        tree = DominatorTree()
        for row in feeds:
            tree.add([p + 1 for p in row])
        last = len(feeds) + 1
        tree.add([v for v in range(1, last) if self._successors[v] == [last]])
        self._chains: Chains = structure_tree(tree.parent, post_dominators(self._successors))

    def write(self) -> str:
        """The text of the whole pattern."""
        return self._chain(0).removeprefix("(").removesuffix(")") if self._is_one_fork() else self._chain(0)

    def _is_one_fork(self) -> bool:
        return self._chains.following[0] == len(self._ops) + 1

    def _chain(self, vertex: int) -> str:
        parts = []
        while vertex >= 0:
            if 0 < vertex <= len(self._ops):
                parts.append(self._ops[vertex - 1])
            if branches := self._chains.inside.get(vertex):
                parts.append(self._fork(vertex, branches))
            vertex = self._chains.following[vertex]
        return " > ".join(parts)

    def _fork(self, vertex: int, heads: Sequence[int]) -> str:
        """The branches sorted by text, so that equal patterns have equal texts."""
        texts = sorted(self._chain(head) for head in heads)
        is_skipped = vertex > 0 and self._chains.following[vertex] in self._successors[vertex]
        if is_skipped:
            texts.append("skip")
        return f"({' | '.join(texts)})" if len(texts) > 1 or vertex == 0 else texts[0]


def _successors(feeds: Sequence[Sequence[int]]) -> list[list[int]]:
    last = len(feeds) + 1
    successors: list[list[int]] = [[] for _ in range(last + 1)]
    for here, row in enumerate(feeds, start=1):
        for producer in row:
            successors[producer + 1].append(here)
        if not row:
            successors[0].append(here)
    for vertex in range(1, last):
        successors[vertex] = successors[vertex] or [last]
    return successors
