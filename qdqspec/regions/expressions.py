"""Matches pattern expressions against a model. `qdqspec.regions.grammar` describes the syntax.

There can be exponentially many matches, but the set of nodes that they cover is a reachability question, answered in
time linear in the graph. The expression becomes a position automaton, whose states are its operators in the order
written (V. M. Glushkov, "The abstract theory of automata", Russian Mathematical Surveys 16, 1961). The automaton runs
along the data edges of the whole graph at once; a node is on a match if one of its states is reachable from a start
state and reaches an accepting state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import onnx

from qdqspec.errors import SpecError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import reads_data
from qdqspec.regions.flow import attribute_text, is_constant
from qdqspec.regions.grammar import (
    BUILT_INS,
    Alternatives,
    Expression,
    Op,
    PatternPart,
    Repeat,
    parse,
)
from qdqspec.regions.grammar import Sequence as InTurn
from qdqspec.registry import did_you_mean
from qdqspec.types import PatternRules

__all__ = [
    "BUILT_INS", "Expression", "allowed_nodes", "matched_nodes", "parse", "require_matches", "unmatched",
]  # fmt: skip


def matched_nodes(expression: Expression, model: Model) -> frozenset[str]:
    """The names of all nodes on a match. Linear in the graph for any expression."""
    if expression.name:
        return frozenset(n.name for n in model.nodes if fnmatchcase(n.name, expression.name))
    assert expression.part is not None
    matcher = ExpressionMatcher(model)
    found = taken_nodes(
        automaton_of(expression.part), matcher.readers, lambda op, node: matcher.fits(op, model.nodes[node])
    )
    return frozenset(model.nodes[index].name for index in found)


def allowed_nodes(model: Model, rules: PatternRules) -> frozenset[str]:
    """Names of the nodes that may be quantized.

    An empty ``allow`` allows all, ``deny`` overrides it, and ``include`` and ``exclude`` are case-sensitive
    globs over node names. ``Constant`` nodes are never among them. Raises `PatternError` for an expression
    that cannot be parsed.
    """
    everything = {node.name for node in model.nodes if not is_constant(node)}
    allowed = _named(model, rules.allow) if rules.allow else set(everything)
    denied = _named(model, rules.deny)
    return frozenset(
        name
        for name in (allowed & everything) - denied
        if (not rules.include or _is_like(name, rules.include)) and not _is_like(name, rules.exclude)
    )


def denied_nodes(model: Model, rules: PatternRules) -> frozenset[str]:
    """Names of the nodes that ``deny`` and ``exclude`` keep in floating point, inputs included.

    A node that is only not allowed may still read a tensor that an allowed producer has quantized.
    """
    denied = _named(model, rules.deny)
    return frozenset(denied | {node.name for node in model.nodes if _is_like(node.name, rules.exclude)})


def require_matches(model: Model, rules: PatternRules) -> None:
    """Raise `SpecError` for a glob of ``include`` that matches no node, or if nothing in ``allow`` matches any.

    They restrict quantization, so the model would stay unchanged without a reason. Names belong to one model,
    so each must match; a list of operators may be for many models, so one that is absent is only a warning
    (`unmatched`).
    """
    names = [node.name for node in model.nodes if not is_constant(node)]
    for glob in rules.include:
        if any(fnmatchcase(name, glob) for name in names):
            continue
        is_operator = any(node.op_type == glob for node in model.nodes)
        raise SpecError(
            f"'{glob}' is the name of no node{did_you_mean(glob, names)}",
            where=model.where,
            cure=f"it is an operator type: write it under patterns.allow (--allow {glob})"
            if is_operator
            else "patterns.nodes.include, allow_file and --include take globs over node names: /layer1/*",
        )
    if rules.allow and not _named(model, rules.allow):
        operators = sorted({node.op_type for node in model.nodes})
        raise SpecError(
            f"nothing in patterns.allow matches a node: {', '.join(rules.allow)}",
            where=model.where,
            cure=f"operators of this model: {', '.join(operators)}",
        )


def unmatched(model: Model, rules: PatternRules) -> tuple[str, ...]:
    """The expressions and globs of the rules that match no node, as written: a warning, not an error."""
    names = [node.name for node in model.nodes]
    idle = [text for text in (*rules.allow, *rules.deny) if not matched_nodes(parse(text), model)]
    idle += [g for g in (*rules.include, *rules.exclude) if not any(fnmatchcase(name, g) for name in names)]
    return tuple(idle)


def _named(model: Model, texts: tuple[str, ...]) -> set[str]:
    return {name for text in texts for name in matched_nodes(parse(text), model)}


def _is_like(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


class ExpressionMatcher:
    """Decides which nodes of a model the operators of an expression fit, and which nodes may follow another."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._defaults: dict[tuple[str, str], dict[str, onnx.AttributeProto]] = {}

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By node, the nodes that read one of its outputs as data: not as a scale, a bound or a shape."""
        model = self._model
        found = []
        for node in model.nodes:
            ends = (end for tensor in node.outputs for end in model.consumers.get(tensor, ()))
            found.append(dict.fromkeys(model.by_name[e.node].index for e in ends if reads_data(model, e)))
        return tuple(map(tuple, found))

    def fits(self, op: Op, node: Node) -> bool:
        """Whether a node has this operator type and these attributes. ``Constant`` nodes never match."""
        if is_constant(node) or node.is_marker:
            return False
        if op.op_type not in ("*", node.op_type, f"{node.domain}:{node.op_type}"):
            return False
        return all(self._has(node, name, value) for name, value in op.attributes)

    def _has(self, node: Node, name: str, value: str) -> bool:
        for attribute in node.proto.attribute:
            if attribute.name == name:
                return _is_value(attribute, value)
        default = self._default_attributes(node).get(name)
        return default is not None and _is_value(default, value)

    def _default_attributes(self, node: Node) -> dict[str, onnx.AttributeProto]:
        key = (node.domain, node.op_type)
        if key not in self._defaults:
            self._defaults[key] = _schema_defaults(node, self._model)
        return self._defaults[key]


def _schema_defaults(node: Node, model: Model) -> dict[str, onnx.AttributeProto]:
    """Attribute defaults of the operator's schema; empty for operators that onnx does not define."""
    versions = {o.domain: o.version for o in model.proto.opset_import}
    try:
        schema = onnx.defs.get_schema(node.op_type, versions.get(node.domain, model.opset), node.domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}


def _is_value(attribute: onnx.AttributeProto, value: str) -> bool:
    if attribute.type == onnx.AttributeProto.FLOAT:
        try:
            # A float32 written in decimal: 0.1 is stored as 0.100000001.
            return math.isclose(attribute.f, float(value), rel_tol=1e-6)
        except ValueError:
            return False
    return attribute_text(attribute) == f"{attribute.name}={value}"


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
    useful = {spot for spot in reached if spot[0] in automaton.last}
    pending = list(useful)
    while pending:
        for before in reached[pending.pop()]:
            if before not in useful:
                useful.add(before)
                pending.append(before)
    return {node for _, node in useful}
