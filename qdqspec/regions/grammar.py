"""The syntax of pattern expressions, for ``allow`` and ``deny``.

    choice    = sequence { "|" sequence }
    sequence  = item { ">" item }                        along data edges
    item      = ( operator | "(" choice ")" ) [ "?" | "*" ]
    operator  = name [ "[" attribute "=" value { "," ... } "]" ] | "*"       "*" is any operator

``|`` binds looser than ``>``: ``Conv > Relu | MatMul`` is a Conv before a Relu, or a MatMul. A single
word may also be a built-in (``conv-relu``), and a text with ``/`` or a wildcard is a node name
(``/head/*``, ``block_?_conv``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import onnx

from qdqspec.errors import PatternError
from qdqspec.registry import did_you_mean

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
class Sequence:
    """Parts that follow each other along data edges."""

    parts: tuple[PatternPart, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several parts."""

    parts: tuple[PatternPart, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part that is optional and, if ``many``, repeatable."""

    part: PatternPart
    many: bool


PatternPart: TypeAlias = Op | Sequence | Alternatives | Repeat


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: a structure (``part``), or a glob over node names (``name``)."""

    text: str
    part: PatternPart | None = None
    name: str = ""


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<word>[A-Za-z_][\w.:-]*)|(?P<mark>[>()|?*\[\],=])|(?P<value>[-+.\w]+)|(?P<bad>.)",
    re.DOTALL,
)
_NODE_NAME = re.compile(r"[^\s>()|,=]*")


def parse(text: str) -> Expression:
    """Parse an expression. Raises `PatternError`, with a caret under the column of the problem."""
    if len(text) > LONGEST:
        raise PatternError(f"longer than {LONGEST} characters", text=text[:LONGEST], column=LONGEST)
    stripped = text.strip()
    if _is_node_name(stripped):
        return Expression(text, name=stripped)
    if stripped in BUILT_INS:
        return Expression(text, _Parser(BUILT_INS[stripped]).whole())
    return Expression(text, _Parser(text).whole())


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


class _Parser:
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._scan())
        self._at = 0
        self._depth = 0

    def whole(self) -> PatternPart:
        """Parse the whole text as one expression."""
        part = self._choice()
        if self._token.kind != "end":
            raise self._error(f"did not expect {self._token.text!r} here")
        return part

    def _scan(self) -> Iterator[_Token]:
        for match in _TOKEN.finditer(self._text):
            kind = match.lastgroup
            if kind == "bad":
                raise self._error(f"did not expect {match.group()!r} here", match.start())
            if kind != "space":
                yield _Token(match.group() if kind == "mark" else str(kind), match.group(), match.start())
        yield _Token("end", "the end", len(self._text))

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
            raise self._error(
                f"expected {what}, not {token.text!r}" if token.kind != "end" else f"expected {what}"
            )
        return token

    def _choice(self) -> PatternPart:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def _sequence(self) -> PatternPart:
        parts = [self._item()]
        while self._take(">"):
            parts.append(self._item())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _item(self) -> PatternPart:
        part = self._group() if self._token.kind == "(" else self._operator()
        if self._take("?"):
            return Repeat(part, many=False)
        return Repeat(part, many=True) if self._take("*") else part

    def _group(self) -> PatternPart:
        opened = self._need("(", "'('")
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._error(f"more than {DEEPEST} parentheses inside each other", opened.start)
        part = self._choice()
        if not self._take(")"):
            raise self._error("this parenthesis is never closed", opened.start)
        self._depth -= 1
        return part

    def _operator(self) -> PatternPart:
        if self._take("*"):
            return Op("*")
        token = self._need("word", "an operator")
        if token.text in BUILT_INS:
            return _Parser(BUILT_INS[token.text]).whole()
        if ":" not in token.text and token.text not in known_ops():
            near = did_you_mean(token.text, sorted({*known_ops(), *BUILT_INS}))
            raise self._error(f"unknown operator '{token.text}'{near}", token.start)
        return Op(token.text, self._attributes())

    def _attributes(self) -> tuple[tuple[str, str], ...]:
        if not self._take("["):
            return ()
        found = []
        while True:
            name = self._need("word", "an attribute name").text
            self._need("=", "'=' and a value")
            found.append((name, self._value()))
            if not self._take(","):
                break
        self._need("]", "']'")
        return tuple(sorted(found))

    def _value(self) -> str:
        if self._take("["):
            items = [self._scalar()]
            while self._take(","):
                items.append(self._scalar())
            self._need("]", "']'")
            return f"[{','.join(items)}]"
        return self._scalar()

    def _scalar(self) -> str:
        token = self._token
        if token.kind not in ("word", "value"):
            raise self._error("expected a value")
        self._at += 1
        return token.text

    def _error(self, what: str, start: int | None = None) -> PatternError:
        at = self._token.start if start is None else start
        return PatternError(what, text=self._text, column=at + 1)
