"""Pattern expressions, for ``allow`` and ``deny``: their syntax, and the nodes of a model that they match.

    choice    = sequence { "|" sequence }
    sequence  = item { ">" item }                        along data edges
    item      = ( operator | "(" choice ")" ) [ "?" | "*" ]
    operator  = name [ "[" attribute "=" value { "," ... } "]" ] | "*"       "*" is any operator

``|`` binds looser than ``>``: ``Conv > Relu | MatMul`` is a Conv before a Relu, or a MatMul. A single
word may also be a built-in (``conv-relu``), and a text with ``/`` or a wildcard is a node name
(``/head/*``, ``block_?_conv``).

There can be exponentially many matches, but the set of nodes that they cover is a reachability question, answered in
time linear in the graph. The expression becomes a position automaton, whose states are its operators in the order
written (V. M. Glushkov, "The abstract theory of automata", Russian Mathematical Surveys 16, 1961). The automaton runs
along the data edges of the whole graph at once; a node is on a match if one of its states is reachable from a start
state and reaches an accepting state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

import onnx

from qdqspec._core.registry import did_you_mean
from qdqspec.errors import PatternError, SpecError
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_constant_node, reads_data
from qdqspec.graph.regions.flow import attribute_text
from qdqspec.types import PatternRules

BUILT_INS: dict[str, str] = {
    "conv-relu": "Conv > BatchNormalization? > (Relu|Clip|LeakyRelu|PRelu|HardSwish)",
    "conv-add-relu": "Conv > BatchNormalization? > Add > (Relu|Clip)?",
    "conv-layernorm": "Conv > (Transpose|Reshape|Squeeze|Unsqueeze|Identity)* > LayerNormalization",
    "matmul-gelu": "(MatMul|Gemm) > Add? > (Gelu | Div > Erf > Add > Mul > Mul?)",
    "attention": "Attention | MatMul > (Mul|Div|Add|Where)* > Softmax > (Cast|Dropout)* > MatMul",
}
LONGEST = 2000  # characters
DEEPEST = 50  # parentheses


@dataclass(frozen=True, slots=True)
class Op:
    """One operator; ``op_type`` ``*`` is any. Attribute values are compared as text."""

    op_type: str
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: a position automaton, or a glob over node names (``name``).

    States are indexes of its operators ``ops``; ``follow`` lists by state the states that may come next.
    """

    text: str
    name: str = ""
    ops: tuple[Op, ...] = ()
    follow: tuple[frozenset[int], ...] = ()
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


def parse(text: str) -> Expression:
    """Parse an expression. Raises `PatternError`, with a caret under the column of the problem."""
    if len(text) > LONGEST:
        raise PatternError(f"longer than {LONGEST} characters", text=text[:LONGEST], column=LONGEST)
    if _is_node_name(text.strip()):
        return Expression(text, name=text.strip())
    parser = _Parser(text, [], [])
    first, last, _ = parser.whole()
    return Expression(text, "", tuple(parser.ops), tuple(map(frozenset, parser.follow)), first, last)


def _is_node_name(text: str) -> bool:
    if not text or not _NODE_NAME.fullmatch(text):
        return False
    if "/" in text or "#" in text:
        return True
    if text == "*" or "[" in text:
        return False
    # `Relu?` and `Relu*` are an operator that may be missing; any other wildcard can only be a name.
    return ("*" in text or "?" in text) and text.rstrip("?*") not in known_ops()


@cache
def known_ops() -> frozenset[str]:
    """Names of all operators that the installed ``onnx`` defines, in any domain."""
    return frozenset(schema.name for schema in onnx.defs.get_all_schemas())


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


class _Piece(NamedTuple):
    """The states that a part of the expression begins and ends with."""

    first: frozenset[int]
    last: frozenset[int]
    may_be_empty: bool


_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<word>[A-Za-z_][\w.:-]*)|(?P<mark>[>()|?*\[\],=])|(?P<value>[-+.\w]+)|(?P<bad>.)",
    re.DOTALL,
)
_NODE_NAME = re.compile(r"[^\s>()|,=]*")
ParsedT = TypeVar("ParsedT")


class _Parser:
    """Recursive descent over one text. The states of the automaton are appended to ``ops`` and ``follow``."""

    def __init__(self, text: str, ops: list[Op], follow: list[set[int]]) -> None:
        self.ops = ops
        self.follow = follow
        self._text = text
        self._at = 0
        self._depth = 0
        self._tokens: list[_Token] = []
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup
            if kind == "bad":
                raise self._error(f"did not expect {match.group()!r} here", match.start())
            if kind != "space":
                mark = match.group() if kind == "mark" else str(kind)
                self._tokens.append(_Token(mark, match.group(), match.start()))
        self._tokens.append(_Token("end", "the end", len(text)))

    def whole(self) -> _Piece:
        """Parse the whole text as one expression."""
        part = self._choice()
        if self._token.kind != "end":
            raise self._error(f"did not expect {self._token.text!r} here")
        return part

    def _choice(self) -> _Piece:
        pieces = self._listed("|", self._sequence)
        first = frozenset[int]().union(*(piece.first for piece in pieces))
        last = frozenset[int]().union(*(piece.last for piece in pieces))
        return _Piece(first, last, any(piece.may_be_empty for piece in pieces))

    def _sequence(self) -> _Piece:
        """Parts that follow each other along data edges."""
        pieces = self._listed(">", self._item)
        first, last, may_be_empty = pieces[0]
        for piece in pieces[1:]:
            self._link(last, piece.first)
            first = first | piece.first if may_be_empty else first
            last = last | piece.last if piece.may_be_empty else piece.last
            may_be_empty = may_be_empty and piece.may_be_empty
        return _Piece(first, last, may_be_empty)

    def _item(self) -> _Piece:
        """An operator or a choice in parentheses, with ``?`` or ``*`` behind it."""
        opened = self._token.start
        if not self._take("("):
            part = self._operator()
        else:
            self._depth += 1
            if self._depth > DEEPEST:
                raise self._error(f"more than {DEEPEST} parentheses inside each other", opened)
            part = self._choice()
            if not self._take(")"):
                raise self._error("this parenthesis is never closed", opened)
            self._depth -= 1
        if repeats := self._take("*"):
            self._link(part.last, part.first)
        return part._replace(may_be_empty=True) if repeats or self._take("?") else part

    def _operator(self) -> _Piece:
        op = Op("*")
        if not self._take("*"):
            token = self._need("word", "an operator")
            if token.text in BUILT_INS:
                return _Parser(BUILT_INS[token.text], self.ops, self.follow).whole()
            if ":" not in token.text and token.text not in known_ops():
                near = did_you_mean(token.text, sorted({*known_ops(), *BUILT_INS}))
                raise self._error(f"unknown operator '{token.text}'{near}", token.start)
            attributes: tuple[tuple[str, str], ...] = ()
            if self._take("["):
                attributes = tuple(sorted(self._listed(",", self._attribute)))
                self._need("]", "']'")
            op = Op(token.text, attributes)
        self.ops.append(op)
        self.follow.append(set())
        only = frozenset({len(self.ops) - 1})
        return _Piece(only, only, may_be_empty=False)

    def _attribute(self) -> tuple[str, str]:
        name = self._need("word", "an attribute name").text
        self._need("=", "'=' and a value")
        if not self._take("["):
            return name, self._scalar()
        items = self._listed(",", self._scalar)
        self._need("]", "']'")
        return name, f"[{','.join(items)}]"

    def _scalar(self) -> str:
        token = self._token
        if token.kind not in ("word", "value"):
            raise self._error("expected a value")
        self._at += 1
        return token.text

    def _link(self, ends: Iterable[int], beginnings: frozenset[int]) -> None:
        for state in ends:
            self.follow[state] |= beginnings

    def _listed(self, mark: str, parse: Callable[[], ParsedT]) -> list[ParsedT]:
        """One or more parts with a mark between them."""
        parts = [parse()]
        while self._take(mark):
            parts.append(parse())
        return parts

    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, kind: str) -> bool:
        if self._token.kind == kind:
            self._at += 1
            return True
        return False

    def _need(self, kind: str, what: str) -> _Token:
        token = self._token
        if not self._take(kind):
            instead = f", not {token.text!r}" if token.kind != "end" else ""
            raise self._error(f"expected {what}{instead}")
        return token

    def _error(self, what: str, start: int | None = None) -> PatternError:
        at = self._token.start if start is None else start
        return PatternError(what, text=self._text, column=at + 1)


def matched_nodes(expression: Expression, model: Model) -> frozenset[str]:
    """The names of all nodes on a match. Linear in the graph for any expression."""
    if expression.name:
        return frozenset(n.name for n in model.nodes if fnmatchcase(n.name, expression.name))
    matcher = ExpressionMatcher(model)

    def fits(state: int, node: int) -> bool:
        return matcher.fits(expression.ops[state], model.nodes[node])

    # state and node: the pairs that it was reached from
    starts = ((state, node.index) for node in model.nodes for state in expression.first)
    pending = [spot for spot in starts if fits(*spot)]
    reached: dict[tuple[int, int], list[tuple[int, int]]] = {spot: [] for spot in pending}
    while pending:
        spot = state, node = pending.pop()
        for follower in expression.follow[state]:
            for reader in matcher.readers[node]:
                after = follower, reader
                if after in reached:
                    reached[after].append(spot)
                elif fits(*after):
                    reached[after] = [spot]
                    pending.append(after)
    useful = {spot for spot in reached if spot[0] in expression.last}
    pending = list(useful)
    while pending:
        for before in reached[pending.pop()]:
            if before not in useful:
                useful.add(before)
                pending.append(before)
    return frozenset(model.nodes[node].name for _, node in useful)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedNodes:
    """Names of nodes by the rules for patterns, and the rules that match no node, as written.

    The ``denied`` nodes stay in floating point, inputs included. A node that is only not ``allowed`` may still read a
    tensor that an allowed producer has quantized.
    """

    allowed: frozenset[str]
    denied: frozenset[str]
    unmatched: tuple[str, ...]


def select_nodes(model: Model, rules: PatternRules) -> SelectedNodes:
    """The nodes that the rules allow and deny.

    An empty ``allow`` allows all, ``deny`` overrides it, and ``include`` and ``exclude`` are case-sensitive globs over
    node names. ``Constant`` nodes are never allowed. Raises `PatternError` for an expression that cannot be parsed, and
    `SpecError` for a glob of ``include`` that matches no node, or if nothing in ``allow`` matches any: the model would
    stay unchanged without a reason. Names belong to one model, so each must match; a list of operators may be for many
    models, so one that is absent is only among ``unmatched``.
    """
    names = [node.name for node in model.nodes if not is_constant_node(node)]
    matches = {text: matched_nodes(parse(text), model) for text in (*rules.allow, *rules.deny)}
    globs = (*rules.include, *rules.exclude)
    named = {glob: frozenset(name for name in names if fnmatchcase(name, glob)) for glob in globs}
    for glob in rules.include:
        if not named[glob]:
            is_operator = any(node.op_type == glob for node in model.nodes)
            raise SpecError(
                f"'{glob}' is the name of no node{did_you_mean(glob, names)}",
                where=model.where,
                cure=f"it is an operator type: write it under patterns.allow (--allow {glob})"
                if is_operator
                else "patterns.nodes.include, allow_file and --include take globs over node names: /layer1/*",
            )
    if rules.allow and not any(matches[text] for text in rules.allow):
        operators = sorted({node.op_type for node in model.nodes})
        raise SpecError(
            f"nothing in patterns.allow matches a node: {', '.join(rules.allow)}",
            where=model.where,
            cure=f"operators of this model: {', '.join(operators)}",
        )

    def union(found: Mapping[str, frozenset[str]], texts: Iterable[str]) -> frozenset[str]:
        return frozenset[str]().union(*(found[text] for text in texts))

    denied = union(matches, rules.deny) | union(named, rules.exclude)
    allowed = union(matches, rules.allow) if rules.allow else frozenset(names)
    included = union(named, rules.include) if rules.include else frozenset(names)
    found = matches | named
    texts = (*rules.allow, *rules.deny, *rules.exclude)
    return SelectedNodes(
        allowed=(allowed & included) - denied,
        denied=denied,
        unmatched=tuple(text for text in texts if not found[text]),
    )


class ExpressionMatcher:
    """Decides which nodes of a model the operators of an expression fit, and which nodes may follow another."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._versions = {o.domain: o.version for o in model.proto.opset_import}

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
        if is_constant_node(node) or node.is_marker:
            return False
        if op.op_type not in ("*", node.op_type, f"{node.domain}:{node.op_type}"):
            return False
        for name, value in op.attributes:
            own = (attribute for attribute in node.proto.attribute if attribute.name == name)
            version = self._versions.get(node.domain, self._model.opset)
            found = next(own, None) or _defaults(node.op_type, version, node.domain).get(name)
            if found is None:
                return False
            if found.type != onnx.AttributeProto.FLOAT:
                if attribute_text(found) != f"{name}={value}":
                    return False
                continue
            try:  # A float32 written in decimal: 0.1 is stored as 0.100000001.
                if not math.isclose(found.f, float(value), rel_tol=1e-6):
                    return False
            except ValueError:
                return False
        return True


@cache
def _defaults(op_type: str, version: int, domain: str) -> dict[str, onnx.AttributeProto]:
    """Attribute defaults of an operator's schema; empty for operators that onnx does not define."""
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
