"""All matches of a pattern expression, as a reference for the linear search; and the pattern of given nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TypeAlias

from qdqspec.graph.model import Model, Node
from qdqspec.graph.regions.expressions import (
    Alternatives,
    Expression,
    ExpressionMatcher,
    InTurn,
    Op,
    PatternPart,
    Repeat,
)
from qdqspec.graph.regions.flow import flow_of
from qdqspec.graph.regions.pattern import Pattern, PatternGranularity, PatternMaker

LONGEST_REPEAT = 16  # repetitions of one `*`
MOST_STEPS = 2000  # steps from one node

Path: TypeAlias = tuple[Node, ...]


def canonical(
    model: Model, nodes: Iterable[str], granularity: PatternGranularity = "structure+shapes"
) -> Pattern:
    """The pattern of nodes given by name."""
    return PatternMaker(flow_of(model), granularity).make(model.by_name[name].index for name in nodes)


def matches(expression: Expression, model: Model) -> tuple[tuple[str, ...], ...]:
    """The node names of each match, in graph order of the first node, except those that are part of a longer one."""
    if expression.name:
        return tuple((n.name,) for n in model.nodes if fnmatchcase(n.name, expression.name))
    found: dict[tuple[str, ...], None] = {}
    for node in model.nodes:
        if node.op_type != "Constant":
            ways = {tuple(n.name for n in way) for way in _Walk(model, node).ways(expression.part, ()) if way}
            sets = [frozenset(way) for way in ways]
            kept = (way for way in ways if not any(frozenset(way) < other for other in sets))
            found |= dict.fromkeys(sorted(kept, key=lambda way: [model.by_name[name].index for name in way]))
    return tuple(found)


class _Walk:
    """The matches that begin at one node."""

    def __init__(self, model: Model, start: Node) -> None:
        self._model = model
        self._start = start
        self._matcher = ExpressionMatcher(model)
        self._steps = 0

    def ways(self, part: PatternPart | None, path: Path) -> Iterator[Path]:
        """The extensions of a path by a part of an expression."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            return
        match part:
            case Op():
                readers = self._matcher.readers[path[-1].index] if path else (self._start.index,)
                for node in (self._model.nodes[index] for index in readers):
                    if node not in path and self._matcher.fits(part, node):
                        yield (*path, node)
            case Alternatives():
                for choice in part.parts:
                    yield from self.ways(choice, path)
            case InTurn():
                yield from self._in_turn(part.parts, path)
            case Repeat():
                yield from self._repeated(part, path, LONGEST_REPEAT if part.many else 1)

    def _in_turn(self, parts: tuple[PatternPart, ...], path: Path) -> Iterator[Path]:
        if not parts:
            yield path
            return
        for way in self.ways(parts[0], path):
            yield from self._in_turn(parts[1:], way)

    def _repeated(self, repeat: Repeat, path: Path, rounds: int) -> Iterator[Path]:
        if rounds:
            for way in self.ways(repeat.part, path):
                if way != path:
                    yield from self._repeated(repeat, way, rounds - 1)
        yield path
