"""Nodes that lie on a match of a pattern expression, found in time linear in the graph.

There can be exponentially many matches, but the set of nodes that they cover is a reachability question. The
expression becomes a position automaton, whose states are its operators in the order written (V. M. Glushkov,
"The abstract theory of automata", Russian Mathematical Surveys 16, 1961). The automaton runs along the data
edges of the whole graph at once; a node is on a match if one of its states is reachable from a start state
and reaches an accepting state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from qdqspec.regions.grammar import Alternatives, Op, PatternPart, Repeat
from qdqspec.regions.grammar import Sequence as InTurn


@dataclass(slots=True)
class Automaton:
    """A position automaton. States are indexes of ``ops``; ``first`` can begin a match, ``last`` can end it."""

    ops: list[Op] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The states that a part of the expression begins and ends with."""

    first: frozenset[int]
    last: frozenset[int]
    may_be_empty: bool


def automaton_of(part: PatternPart) -> Automaton:
    """The automaton of an expression."""
    made = Automaton()
    whole = _piece(part, made)
    made.first, made.last = set(whole.first), set(whole.last)
    return made


def _piece(part: PatternPart, made: Automaton) -> _Piece:
    match part:
        case Op():
            made.ops.append(part)
            made.follow.append(set())
            only = frozenset({len(made.ops) - 1})
            return _Piece(only, only, may_be_empty=False)
        case Alternatives():
            pieces = [_piece(choice, made) for choice in part.parts]
            return _Piece(
                frozenset().union(*(p.first for p in pieces)),
                frozenset().union(*(p.last for p in pieces)),
                any(p.may_be_empty for p in pieces),
            )
        case InTurn():
            whole = _Piece(frozenset(), frozenset(), may_be_empty=True)
            for inner in part.parts:
                whole = _joined(whole, _piece(inner, made), made)
            return whole
        case Repeat():
            inside = _piece(part.part, made)
            if part.many:
                _link(inside.last, inside.first, made)
            return _Piece(inside.first, inside.last, may_be_empty=True)


def _joined(a: _Piece, b: _Piece, made: Automaton) -> _Piece:
    _link(a.last, b.first, made)
    return _Piece(
        a.first | b.first if a.may_be_empty else a.first,
        a.last | b.last if b.may_be_empty else b.last,
        a.may_be_empty and b.may_be_empty,
    )


def _link(ends: Iterable[int], beginnings: frozenset[int], made: Automaton) -> None:
    for state in ends:
        made.follow[state] |= beginnings


def taken_nodes(
    automaton: Automaton, consumers: Sequence[Sequence[int]], fits: Callable[[Op, int], bool]
) -> set[int]:
    """The nodes on any match.

    ``consumers`` lists by node the nodes that read it; ``fits`` is whether a node has an operator.
    """
    # state and node: the pairs that it was reached from
    reached: dict[tuple[int, int], list[tuple[int, int]]] = {}
    pending = [(state, node) for node in range(len(consumers)) for state in automaton.first]
    pending = [(state, node) for state, node in pending if fits(automaton.ops[state], node)]
    reached.update({spot: [] for spot in pending})
    while pending:
        spot = state, node = pending.pop()
        for follower in automaton.follow[state]:
            for reader in consumers[node]:
                after = follower, reader
                if after in reached:
                    reached[after].append(spot)
                elif fits(automaton.ops[follower], reader):
                    reached[after] = [spot]
                    pending.append(after)
    alive = {spot for spot in reached if spot[0] in automaton.last}
    pending = list(alive)
    while pending:
        for before in reached[pending.pop()]:
            if before not in alive:
                alive.add(before)
                pending.append(before)
    return {node for _, node in alive}
