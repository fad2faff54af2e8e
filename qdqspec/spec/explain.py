"""Says in the words of a spec what pydantic found. May import floor 0 and pydantic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qdqspec import registry
from qdqspec.errors import SpecError
from qdqspec.spec.kinds import params_of
from qdqspec.spec.locate import Loc
from qdqspec.spec.problems import MAX_PROBLEMS, printable

_MAX_SHOWN = 60  # characters of a value in a message

# What pydantic calls things, and what they are called in YAML.
_WORDS = (
    (r"valid dictionary or instance of \w+", "mapping"),
    (r"valid dictionary", "mapping"),
    (r"valid tuple|valid list", "list"),
    (r"valid string", "text"),
    (r"valid (integer|number|boolean)", r"\1"),
    (r"a integer", "an integer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem by its location in the data; ``at_key`` where the key is wrong, not its value."""

    loc: Loc
    message: str
    at_key: bool = False
    hint: str = ""
    note: str = ""


def findings(error: ValidationError, model: type[BaseModel], data: object) -> Iterator[Finding]:
    """Every problem of ``data``, which ``model`` refused."""
    for details in error.errors(include_url=False):
        yield _finding(details, model, data)


def error_without_file(error: ValidationError, model: type[BaseModel], data: object) -> SpecError:
    """All problems of a spec built in Python as one error; the first line is complete in itself."""
    found = list(findings(error, model, data))
    rows = []
    for finding in found[:MAX_PROBLEMS]:
        hint = f" ({finding.hint})" if finding.hint else ""
        rows.append(f"{_dotted(finding.loc)}: {finding.message}{hint}")
        rows += [f"   {finding.note}"] if finding.note else []
    if len(found) > 1:
        rows[0] += f" (first of {len(found)} problems)"
    if len(found) > MAX_PROBLEMS:
        rows.append(f"and {len(found) - MAX_PROBLEMS} more")
    return SpecError(printable("\n".join(rows)), where=f"{model.__name__}(...)")


def _finding(details: ErrorDetails, model: type[BaseModel], data: object) -> Finding:
    loc: Loc = details["loc"]
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        keys = _keys_at(loc, model, data)
        message = f"unknown key '{loc[-1]}' in {_place_name(loc[:-1], data)}"
        return Finding(loc=loc, message=message, at_key=True, **_near(loc[-1], keys, "keys"))
    if kind == "missing":
        return Finding(loc=loc, message=f"'{loc[-1]}' is missing in {_place_name(loc[:-1], data)}")
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(context.get("expected"))) or [str(context.get("expected"))]
        message = f"{_shown(details['input'])} is not a value of '{_key(loc)}'"
        return Finding(loc=loc, message=message, **_near(details["input"], known, "values"))
    if "known" in context:
        near = _near(context.get("name", ""), context["known"], "names")
        return Finding(loc=loc, message=details["msg"], **near)
    return Finding(loc=loc, message=_message(details), hint=context.get("hint", ""))


def _message(details: ErrorDetails) -> str:
    text = details["msg"].removeprefix("Value error, ")
    if not text.startswith("Input should "):
        return text
    for pydantic_word, our_word in _WORDS:
        text = re.sub(pydantic_word, our_word, text)
    return f"'{_key(details['loc'])}' {text.removeprefix('Input ')}, not {_shown(details['input'])}"


def _near(word: object, known: Sequence[str], what: str) -> dict[str, str]:
    """The nearest known word as hint, all of them as note."""
    hint = registry.did_you_mean(str(word), list(known)).strip(" ()")
    return {"hint": hint, "note": f"valid {what}: {', '.join(known)}"}


def _keys_at(loc: Loc, model: type[BaseModel], data: object) -> list[str]:
    """The keys that the mapping around the last part of ``loc`` may have."""
    for depth, part in enumerate(loc[:-1]):
        if loc[depth - 1 : depth] == ("checks",) and depth == 1:
            model = params_of(_kind(loc, data))
        elif part in model.model_fields:
            model = next(_models_in(model.model_fields[str(part)].annotation), model)
    extra = [] if "kind" in model.model_fields or loc[0] != "checks" else ["kind"]
    return sorted([*extra, *(field.alias or name for name, field in model.model_fields.items())])


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models anywhere inside a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _kind(loc: Loc, data: object) -> str:
    entry = data["checks"][loc[1]] if isinstance(data, Mapping) else None
    return str(entry["kind"]) if isinstance(entry, Mapping) else ""


def _place_name(loc: Loc, data: object) -> str:
    if not loc:
        return "the spec"
    if loc[0] == "checks" and len(loc) > 1:
        inner = f" under '{_dotted(loc[2:])}'" if len(loc) > 2 else ""
        return f"check '{_kind(loc, data)}'{inner}"
    return f"'{_dotted(loc)}'"


def _dotted(loc: Loc) -> str:
    """``checks[0].min``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".") or "spec"


def _key(loc: Loc) -> str:
    """The nearest key, for messages about a value."""
    return next((str(part) for part in reversed(loc) if isinstance(part, str)), "spec")


def _shown(value: object) -> str:
    """A value as its author would recognize it."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple | set):
        return "a list"
    text = str(value).lower() if isinstance(value, bool | None) else str(value)
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return f"'{text}'" if isinstance(value, str) else text
