"""All matches of a pattern expression, as a reference for the linear search; and the pattern of given nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from qdqspec.graph.model import Model
from qdqspec.graph.regions.expressions import BUILT_INS, Expression, ExpressionMatcher, Op
from qdqspec.graph.regions.flow import flow_of
from qdqspec.graph.regions.pattern import Pattern, PatternGranularity, PatternMaker


def canonical(
    model: Model, nodes: Iterable[str], granularity: PatternGranularity = "structure+shapes"
) -> Pattern:
    """The pattern of nodes given by name."""
    return PatternMaker(flow_of(model), granularity).make(model.by_name[name].index for name in nodes)


def matches(expression: Expression, model: Model) -> tuple[tuple[str, ...], ...]:
    """The node names of each match, in graph order of the first node, except those that are part of a longer one.

    Each path along data edges is compared with a regular expression over nodes, each of which is one character.
    """
    if expression.name:
        return tuple((n.name,) for n in model.nodes if fnmatchcase(n.name, expression.name))
    matcher = ExpressionMatcher(model)
    pattern = re.compile(_pattern_of(expression.text, matcher, model))
    found: list[tuple[str, ...]] = []
    for node in model.nodes:
        ways = [
            way for way in _paths_from(node.index, matcher) if pattern.fullmatch("".join(map(_char, way)))
        ]
        kept = sorted(way for way in ways if not any(set(way) < set(other) for other in ways))
        found += [tuple(model.nodes[index].name for index in way) for way in kept]
    return tuple(found)


_TOKEN = re.compile(
    r"(?P<op>[A-Za-z_][\w:.-]*)(?:\[(?P<name>\w+)=(?P<value>\[.*?\]|.*?)\])?|(?P<mark>[>()|?*])"
)


def _pattern_of(text: str, matcher: ExpressionMatcher, model: Model) -> str:
    found, is_item = "", True  # whether an item may begin here, as which `*` is any operator
    for token in _TOKEN.finditer(text):
        op, mark = token["op"], token["mark"]
        if op in BUILT_INS:
            found += f"(?:{_pattern_of(BUILT_INS[op], matcher, model)})"
        elif op or (mark == "*" and is_item):
            attributes = ((token["name"], token["value"]),) if token["name"] else ()
            wanted = Op(op or "*", attributes)
            fitting = "".join(_char(node.index) for node in model.nodes if matcher.fits(wanted, node))
            found += f"[{fitting}]" if fitting else "(?!)"
        else:
            found += {">": "", "(": "(?:"}.get(mark, mark)
        is_item = mark in (">", "(", "|")
    return found


def _char(index: int) -> str:
    return chr(0x4E00 + index)


def _paths_from(index: int, matcher: ExpressionMatcher) -> Iterator[tuple[int, ...]]:
    yield (index,)
    for reader in matcher.readers[index]:
        yield from ((index, *path) for path in _paths_from(reader, matcher))
