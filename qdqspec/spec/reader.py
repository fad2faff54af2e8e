"""Reads YAML 1.2 as plain data with the position of each part.

The parser's events are read once, without building nodes: that keeps collection fast, finds all duplicate
keys and tags of a file at once, and limits depth and size before memory is spent.

The parser reads YAML 1.1; the types of plain scalars here are those of YAML 1.2, in which ``on`` and ``yes`` are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import yaml
from yaml import Event, Mark, MarkedYAMLError, YAMLError, events
from yaml.reader import ReaderError

from qdqspec.spec.problems import Loc, Problem, source_lines

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | float | bool"

MAX_DEPTH = 50
MAX_NODES = 20_000

# Plain scalars of YAML 1.2 (core schema, section 10.3.2); digits may be grouped by underscores.
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")}
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7][0-7_]*|0x[0-9a-fA-F][0-9a-fA-F_]*|0b[01][01_]*")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


class _StopReading(Exception):  # noqa: N818 - control flow inside this module, never an error of a user
    """The rest of the text cannot be interpreted."""


class Document:
    """One YAML document whose top is a mapping: its ``data``, and the position of each key and value.

    ``problems`` of the YAML itself are listed, not raised; the data are empty if one of them stopped the reading.
    """

    def __init__(self, text: str) -> None:
        self.data: dict[str, Plain] = {}
        self.lines = source_lines(text)
        self.problems: list[Problem] = []
        self._keys: dict[Loc, tuple[Mark, Mark]] = {}
        self._values: dict[Loc, tuple[Mark, Mark]] = {}
        self._text = text
        self._events: Iterator[Any] = yaml.parse(text, yaml.SafeLoader)
        self._anchors: dict[str, tuple[Plain | None, int]] = {}
        self._last: Mark | None = None  # where the last event ended
        self._nodes = 0
        with suppress(_StopReading):
            self._read()

    def line(self, loc: Loc) -> int:
        """The line of a key or list item, counted from 1."""
        marks = self._keys.get(loc) or self._values.get(loc)
        return 1 if marks is None else int(marks[0].line) + 1

    def locate(self, found: Problem) -> Problem:
        """The problem with the position of the key or value at its location.

        Parts of the location that the file does not have (a missing key, a default, a short form) are skipped, so
        that the nearest text in the file is underlined.
        """
        here: Loc = ()
        for part in found.loc:
            here = (*here, part) if (*here, part) in self._values else here
        value: Any = self.data
        for part in here:
            value = value[part]
        at_key = found.at_key or (here[-1:] != found.loc[-1:] and isinstance(value, Mapping | list))
        marks = (self._keys.get(here) if at_key else None) or self._values.get(here)
        return _placed(found, marks)

    def _read(self) -> None:
        self._next()
        start = self._next()
        if not isinstance(start, events.DocumentStartEvent):
            self._stop(None, "the file is empty", hint="a spec begins with 'qdqspec: 1'")
        first = self._next()
        data = self._value(first, ())
        self._next()
        rest = self._next()
        if not isinstance(rest, events.StreamEndEvent):
            self._stop(rest, "a second document begins here", hint="one spec a file")
        if not isinstance(data, dict):
            self._stop(first, "a spec is a mapping of keys to values", hint="it begins with 'qdqspec: 1'")
        self.data = data

    def _value(self, event: Any, loc: Loc) -> Plain | None:
        self._values[loc] = (event.start_mark, event.end_mark)
        self._count(event, 1)
        if isinstance(event, events.AliasEvent):
            if event.anchor not in self._anchors:
                self._stop(event, f"alias '*{event.anchor}' has no anchor before it")
            value, nodes = self._anchors[event.anchor]
            self._count(event, nodes)
            return value
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._note(event, f"explicit tag '{tag}'", hint="a spec is plain data; remove the tag")
        before = self._nodes
        if isinstance(event, events.ScalarEvent):
            # text if it is quoted or a block of text
            value = _read_scalar(str(event.value)) if event.implicit[0] else str(event.value)
        elif len(loc) >= MAX_DEPTH:
            self._stop(event, f"nested more than {MAX_DEPTH} deep")
        elif isinstance(event, events.MappingStartEvent):
            value = self._mapping(loc)
        else:
            value = self._sequence(loc)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._nodes - before + 1)
        return value

    def _mapping(self, loc: Loc) -> Plain:
        """A mapping with keys of text, as an ONNX input may be named ``1`` or ``on``.

        A plain key ``<<`` stands for the keys of its mapping that are not given beside it, as YAML 1.1 has it.
        """
        found: dict[str, Plain] = {}
        merged: dict[str, Plain] = {}
        while not isinstance(event := self._next(), events.MappingEndEvent):
            if not isinstance(event, events.ScalarEvent):
                self._stop(event, "a key is a plain word, not a list, mapping or alias")
            if event.tag is not None or event.anchor is not None:
                self._note(event, "a key has neither tag nor anchor", hint="a spec is plain data")
            key, is_plain = str(event.value), event.implicit[0]
            here = (*loc, key)
            again = here in self._keys
            if again:
                first = self._keys[here][0].line + 1
                self._note(event, f"duplicate key '{key}'", hint=f"first on line {first}")
                # read but discarded; keys are text, so this location does not exist
                here = (*loc, event.start_mark.index)
            self._keys[here] = (event.start_mark, event.end_mark)
            value = self._value(self._next(), here)
            if value is None:
                self._note(event, f"'{key}' has no value", hint="give one, or remove the key")
            elif key == "<<" and is_plain and isinstance(value, dict):
                merged.update(value)
            elif not again:
                found[key] = value
        self._values[loc] = (self._values[loc][0], event.end_mark)
        return {**merged, **found}

    def _sequence(self, loc: Loc) -> Plain:
        found: list[Plain] = []
        while not isinstance(event := self._next(), events.SequenceEndEvent):
            value = self._value(event, (*loc, len(found)))
            if value is None:
                self._note(event, "a list entry has no value", hint="give one, or remove the entry")
            else:
                found.append(value)
        self._values[loc] = (self._values[loc][0], event.end_mark)
        return found

    def _count(self, event: Event, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self._stop(event, f"more than {MAX_NODES:,} values", hint="aliases count as their content")

    def _next(self) -> Any:
        # Any: PyYAML has no types of events
        try:
            event = next(self._events)
            self._last = event.end_mark
            return event
        except MarkedYAMLError as error:
            # where the parser stopped, and where the construct it was reading began
            mark, began, hint = error.problem_mark or error.context_mark, error.context_mark, ""
            if "'\\t'" in (error.problem or ""):
                hint = "indent with spaces"
            elif mark is not None and began is not None and began.line < mark.line:
                hint = f"begun on line {began.line + 1}"
            reason = ": ".join(part for part in (error.context, error.problem) if part)
            message = f"not valid YAML: {reason}"
            self.problems.append(_placed(Problem(message=message, hint=hint), (mark, mark)))
        except ReaderError as error:
            before = source_lines(self._text[: error.position])
            message = f"character U+{ord(self._text[error.position]):04X} is not allowed in YAML"
            self.problems.append(Problem(line=len(before), column=len(before[-1]) + 1, message=message))
        except (YAMLError, ValueError, ArithmeticError, LookupError) as error:
            # other errors for a few malformed escapes, such as "\UFFFFFFFF"
            problem = Problem(message=f"not valid YAML: {error}")
            self.problems.append(_placed(problem, (self._last, self._last)))
        raise _StopReading

    def _note(self, event: Event | None, message: str, hint: str = "") -> None:
        marks = None if event is None else (event.start_mark, event.end_mark)
        self.problems.append(_placed(Problem(message=message, hint=hint), marks))

    def _stop(self, event: Event | None, message: str, hint: str = "") -> NoReturn:
        self._note(event, message, hint)
        raise _StopReading


@lru_cache(maxsize=4096)
def _read_scalar(text: str) -> Plain | None:
    """The value of an unquoted scalar in YAML 1.2: null, boolean, number, or else the text itself."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) > 40:  # Python refuses to convert more than 4,300 digits
        return text
    digits = text.replace("_", "")
    if _INT.fullmatch(text):
        return int(digits, 0 if digits[1:2] in ("o", "x", "b") else 10)
    if _FLOAT.fullmatch(text):
        return float(digits)
    special = _SPECIAL.fullmatch(text)
    return text if special is None else float(text.replace(".", ""))


def _placed(problem: Problem, marks: tuple[Mark | None, Mark | None] | None) -> Problem:
    """The problem with its position."""
    start, end = marks or (None, None)
    if start is None or end is None:
        return problem
    width = max(1, end.column - start.column) if end.line == start.line else 10**6
    return replace(problem, line=start.line + 1, column=start.column + 1, width=width)
