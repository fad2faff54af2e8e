"""Problems of a spec: pydantic's errors in the terms of a spec, and error messages with the source line and a caret."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qdqspec._core import registry
from qdqspec._core.units import plain
from qdqspec.errors import SpecError
from qdqspec.spec.kinds import params_of

Loc: TypeAlias = tuple[str | int, ...]

MAX_PROBLEMS = 20
MAX_MESSAGE = 200  # characters; keys, tags and values in it may be long
_MAX_WIDTH = 100  # of a source line; a longer one is cut around the caret


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem, with its location in the data, or its position in the text, or both.

    ``at_key`` if the key of the location is wrong, not its value. ``line`` and ``column`` count from 1, ``width`` is
    the caret's. ``hint`` is written beside the caret, ``note`` on a separate line.
    """

    message: str
    hint: str = ""
    note: str = ""
    loc: Loc = ()
    at_key: bool = False
    line: int = 1
    column: int = 1
    width: int = 1


def source_lines(text: str) -> list[str]:
    """The lines as the YAML reader counts them; ``str.splitlines`` knows more kinds of line break."""
    return re.split(r"\r\n|\n|\r", text)


def excerpt(path: Path, line: int, column: int | None = None) -> str:
    """Number the lines of a file around ``line``, with a caret below the column; empty if it can no longer be read."""
    try:
        lines = source_lines(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    if len(lines) > line and not lines[-1]:  # the text after the last line end is not a line
        lines.pop()
    return "\n".join(numbered(lines, line, column, after=1))


def numbered(
    lines: Sequence[str],
    line: int,
    column: int | None = None,
    *,
    width: int = 1,
    hint: str = "",
    after: int = 0,
) -> list[str]:
    """Source lines around ``line``, each with its number, and a line with a caret if a column is given."""
    line = min(max(line, 1), len(lines))
    last = min(line + after, len(lines))
    gutter = len(str(last)) + 3
    long, start = len(lines[line - 1]), 0
    if long > _MAX_WIDTH:  # cut so that the column is visible
        start = max(0, min((column or 1) - _MAX_WIDTH // 2, long - _MAX_WIDTH))
    rows = []
    for number in range(max(line - 1, 1), last + 1):
        # one column per character, so that the caret is at the right position
        cut = lines[number - 1][start : start + _MAX_WIDTH]
        shown = "".join(ch if ch.isprintable() else " " if ch == "\t" else "?" for ch in cut)
        rows.append(f"{number:>{gutter}} | {shown}".rstrip())
        if number == line and column is not None:
            indent = " " * (column - 1 - start)
            room = min(len(lines[line - 1].rstrip()), start + _MAX_WIDTH) - column + 1
            carets = "^" * max(1, min(width, room))
            rows.append(f"{'':>{gutter}} | {indent}{carets} {hint}".rstrip())
    return rows


def spec_error(problems: Sequence[Problem], lines: Sequence[str], name: str) -> SpecError:
    """All problems of the file ``name`` as one error, by position; the first line is a complete message."""
    ordered = sorted(dict.fromkeys(problems), key=lambda p: (p.line, p.column))
    count = f" (first of {len(ordered)} problems)" if len(ordered) > 1 else ""
    rows = [plain(ordered[0].message, MAX_MESSAGE) + count]
    for number, problem in enumerate(ordered[:MAX_PROBLEMS]):
        if number:
            rows.append(f"{name}:{problem.line}:{problem.column}: {plain(problem.message, MAX_MESSAGE)}")
        rows += numbered(lines, problem.line, problem.column, width=problem.width, hint=problem.hint)
        rows += [f"   {problem.note}"] if problem.note else []
    if len(ordered) > MAX_PROBLEMS:
        rows.append(f"and {len(ordered) - MAX_PROBLEMS} more")
    error = SpecError("\n".join(rows), where=f"{name}:{ordered[0].line}:{ordered[0].column}")
    error.problems = tuple((p.line, p.column, plain(p.message, MAX_MESSAGE)) for p in ordered)
    return error


# ---- errors of pydantic --------------------------------------------------------------------------

# pydantic's terms, and those of YAML.
_WORDS = (
    (r"valid dictionary or instance of \w+", "mapping"),
    (r"valid dictionary", "mapping"),
    (r"valid tuple|valid list", "list"),
    (r"a valid string", "text"),
    (r"an instance of Path", "a path"),
    (r"valid (integer|number|boolean)", r"\1"),
    (r"a integer", "an integer"),
    (r" after validation", ""),
    (r", unable to parse string as an? \w+", ""),
)


def findings(error: ValidationError, model: type[BaseModel], data: object) -> list[Problem]:
    """All problems of ``data`` that ``model`` reported."""
    return [_make_finding(details, model, data) for details in error.errors(include_url=False)]


def error_without_file(
    error: ValidationError,
    model: type[BaseModel],
    data: object,
    *,
    where: str | None = None,
    name: Callable[[Loc], str | None] | None = None,
) -> SpecError:
    """All problems of a spec without a file as one error; ``name`` returns the caller's name for a location, if any."""
    found, rows = findings(error, model, data), []
    for finding in found[:MAX_PROBLEMS]:
        hint = f" ({finding.hint})" if finding.hint else ""
        place = (name and name(finding.loc)) or _write_location(finding.loc)
        rows.append(plain(f"{place}: {finding.message}", MAX_MESSAGE) + hint)
        rows += [f"   {finding.note}"] if finding.note else []
    if len(found) > 1:
        rows[0] += f" (first of {len(found)} problems)"
    if len(found) > MAX_PROBLEMS:
        rows.append(f"and {len(found) - MAX_PROBLEMS} more")
    return SpecError("\n".join(rows), where=where)


def _make_finding(details: ErrorDetails, model: type[BaseModel], data: object) -> Problem:
    """The problem; of an invalid word, the nearest valid one is the hint, and all of them are the note."""
    loc: Loc = details["loc"]
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    expected = re.findall(r"'([^']*)'", str(context.get("expected")))
    message, word, known, what = details["msg"], context.get("name", ""), context.get("known"), "names"
    if kind == "extra_forbidden":
        message, word = f"unknown key '{loc[-1]}' in {_write_place(loc[:-1], data)}", loc[-1]
        known, what = _find_keys(loc, model, data), "keys"
    elif kind == "missing":
        message = f"'{loc[-1]}' is missing in {_write_place(loc[:-1], data)}"
    elif kind == "literal_error" and len(expected) > 1:
        message, word = f"{_write_value(value)} is not a value of '{_find_key(loc, data)}'", value
        known, what = expected, "values"
    elif known is None:
        message = _write_message(details, data)
    if known is None:
        return Problem(loc=loc, message=message, hint=context.get("hint", ""))
    near = registry.did_you_mean(str(word), list(known)).strip(" ()")
    note = f"valid {what}: {', '.join(known)}"
    return Problem(loc=loc, message=message, at_key=what == "keys", hint=near, note=note)


def _write_message(details: ErrorDetails, data: object) -> str:
    text = details["msg"].removeprefix("Value error, ")
    subject, should, rest = text.partition(" should ")
    if subject not in ("Input", "Tuple", "List", "Dictionary", "String", "Value") or not should:
        return text
    for pydantic_word, our_word in _WORDS:
        rest = re.sub(pydantic_word, our_word, rest)
    sentence = f"'{_find_key(details['loc'], data)}' should {rest}"
    return sentence if ", not " in rest else f"{sentence}, not {_write_value(details['input'])}"


def _find_keys(loc: Loc, model: type[BaseModel], data: object) -> list[str]:
    """The valid keys of the mapping around the last part of ``loc``."""
    inner = loc[:-1]
    always: set[str] = set()
    if loc[0] == "checks":
        model, inner = params_of(_find_kind(loc, data)), loc[2:-1]
        always = {"kind"} if len(loc) == 3 else set()
    for part in inner:
        if part in model.model_fields:
            model = next(_find_models(model.model_fields[str(part)].annotation), model)
    return sorted(always | {field.alias or name for name, field in model.model_fields.items()})


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models anywhere inside a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _find_models(argument)


def _find_kind(loc: Loc, data: object) -> str:
    entry = data["checks"][loc[1]] if isinstance(data, Mapping) else None
    return str(entry["kind"]) if isinstance(entry, Mapping) else ""


def _write_place(loc: Loc, data: object) -> str:
    loc = _keep_written(loc, data)
    if not loc:
        return "the spec"
    if loc[0] == "checks" and len(loc) > 1:
        inner = f" under '{_write_location(loc[2:])}'" if len(loc) > 2 else ""
        return f"check '{_find_kind(loc, data)}'{inner}"
    return f"'{_write_location(loc)}'"


def _keep_written(loc: Loc, data: object) -> Loc:
    """The parts of ``loc`` that the author wrote, without those that a short form expands to."""
    kept: Loc = ()
    for part in loc:
        try:
            data = data[part]  # type: ignore[index]  # whatever does not fit is passed over
        except (LookupError, TypeError):
            continue
        kept = (*kept, part)
    return kept


def _write_location(loc: Loc) -> str:
    """``checks[0].min``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".") or "spec"


def _find_key(loc: Loc, data: object) -> str:
    """The nearest key that the author wrote, for messages about a value."""
    return next((str(part) for part in reversed(_keep_written(loc, data)) if isinstance(part, str)), "spec")


def _write_value(value: object) -> str:
    """A value as the author would recognize it."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple | set):
        return "a list"
    text = str(value).lower() if isinstance(value, bool | None) else str(value)
    text = plain(text, 60)
    return f"'{text}'" if isinstance(value, str) else text
