"""Writes the pages of docs/reference that list what the code declares: spec keys, options, commands, the JSON record.

``python tools/reference.py`` renews them; a test compares them with the code.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qdqspec import cli, registry
from qdqspec.config.settings import COMMAND_LINE, OPTIONS
from qdqspec.report.record import record_to_json
from qdqspec.spec.kinds import params_of
from qdqspec.spec.models import spec_schema
from qdqspec.testing.records import sample_run

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_NOTE = "Generated from the code by `python tools/reference.py`."


def pages() -> dict[str, str]:
    """The pages by file name."""
    return {
        "spec.md": _page("Keys of a spec", _spec()),
        "options.md": _page("Options", _options()),
        "commands.md": _page("Commands", _commands()),
        "record.md": _page("The JSON record", _record()),
    }


def _page(title: str, lines: Iterator[str]) -> str:
    text = "\n".join([f"# {title}", "", _NOTE, "", *lines]) + "\n"
    return text.replace("\n\n\n", "\n\n")


# ---- spec ---------------------------------------------------------------------------------------


def _spec() -> Iterator[str]:
    schema = spec_schema()
    yield "The [guide](../guide.md) explains them with examples; `qdqspec schema` writes the JSON Schema."
    yield from _heading("Top level", ("key", "type", "default", "meaning"))
    parts = schema["properties"]
    yield from (_key_row(name, part, schema) for name, part in parts.items())
    for name, part in parts.items():
        if name != "checks" and (properties := _properties(part, schema)):
            yield from _heading(name, ("key", "type", "default", "meaning"))
            yield from (_key_row(f"{name}.{key}", one, schema) for key, one in properties.items())
    yield from _data(schema)
    for kind in registry.names("check"):
        model = params_of(kind).model_json_schema()
        yield from _heading(f"Check {kind}", ("key", "type", "default", "meaning"))
        yield from (_key_row(key, one, model) for key, one in model["properties"].items() if key != "kind")


def _data(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from _heading("Data", ("key", "type", "default", "meaning"))
    yield from (
        _key_row(key, one, schema) for key, one in schema["$defs"]["DataSection"]["properties"].items()
    )


def _properties(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a section; none if the value is no section."""
    named = part.get("$ref") or next((one["$ref"] for one in part.get("anyOf", ()) if "$ref" in one), "")
    found = schema["$defs"].get(named.rpartition("/")[2], {}) if named else part
    properties: Mapping[str, Any] = found.get("properties", {})
    return properties


def _key_row(name: str, part: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    default = f"`{_value(part['default'])}`" if part.get("default") not in (None, "", [], {}) else ""
    section = schema.get("$defs", {}).get(str(part.get("$ref", "")).rpartition("/")[2], {})
    return _row(
        f"`{name}`", _type(part, schema), default, part.get("description") or section.get("description", "")
    )


def _value(value: object) -> str:
    return (
        f"{value:.6g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _type(part: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "enum" in part:
        return ", ".join(f"`{_value(word)}`" for word in part["enum"])
    if "const" in part:
        return f"`{_value(part['const'])}`"
    if "$ref" in part:
        named = schema.get("$defs", {}).get(part["$ref"].rpartition("/")[2], {})
        return "table" if "properties" in named else _type(named, schema)
    if "anyOf" in part:
        kinds = (_type(one, schema) for one in part["anyOf"] if one != {"type": "null"})
        return " or ".join(dict.fromkeys(kinds))
    words = {
        "array": "list",
        "object": "table",
        "string": "text",
        "boolean": "true or false",
        "integer": "whole number",
    }
    return words.get(str(part.get("type", "")), str(part.get("type", "any")))


# ---- options and commands -----------------------------------------------------------------------


def _options() -> Iterator[str]:
    yield "Each is an option of pytest (`--qdq-seed`), of the verbs that use it (`--seed`), an environment variable"
    yield "(`QDQSPEC_SEED`) and a key of `[tool.qdqspec]` in `pyproject.toml` (`seed`); the first given applies."
    yield from _heading("", ("option of pytest", "variable", "value", "meaning"))
    for option in OPTIONS:
        variable = "command line only" if option.key in COMMAND_LINE else f"`{option.variable}`"
        yield _row(
            f"`--qdq-{option.name}`",
            variable,
            f"`{option.metavar}`" if option.metavar else "switch",
            option.help,
        )


def _commands() -> Iterator[str]:
    yield from _heading("Exit codes", ("code", "meaning"))
    yield _row("0", "success; of a verb that judges: nothing was found wanting")
    yield _row("1", "a check or comparison failed")
    yield _row(
        "2",
        "the command could not be run: wrong arguments, input that cannot be read, a backend that is missing",
    )
    yield _row("130", "interrupted; what was measured is kept")
    yield ""
    yield "`pytest` exits with its own codes: [continuous integration](../how-to/ci.md)."
    for name, verb in cli._parser()[1].items():  # noqa: SLF001 - the parser has no other owner
        yield from ("", f"## {name}", "", " ".join(str(verb.description).split()), "", "```sh")
        yield from (line.strip() for line in str(verb.epilog).splitlines()[1:])
        yield "```"
        yield from ("", _row("argument", "meaning"), _row("---", "---"))
        shown = (action for action in verb._actions if action.help != argparse.SUPPRESS)  # noqa: SLF001 - no other list
        yield from map(_argument, shown)


def _argument(action: argparse.Action) -> str:
    names = " ".join(f"`{word}`" for word in action.option_strings) or f"`{action.metavar or action.dest}`"
    value = f" `{action.metavar}`" if action.option_strings and isinstance(action.metavar, str) else ""
    return _row(names + value, str(action.help or "").replace("%%", "%"))


# ---- record -------------------------------------------------------------------------------------


def _record() -> Iterator[str]:
    yield "`--qdq-json=PATH`, `tune --json` and reports with the suffix `.json` hold this record; `result.json` of"
    yield "a case is one entry of `cases`. Fields without a value may be absent. The fields below are of a sample."
    yield from _heading("", ("field", "type"))
    yield from (
        _row(f"`{name}`", kind) for name, kind in sorted(_fields(record_to_json(sample_run())).items())
    )


_FREE = (
    "ops",
    "numbers",
    "matrix",
    "facts",
    "metrics",
)  # their keys are names of the user's model or of a machine


def _fields(value: object, name: str = "") -> dict[str, str]:
    """Every field below a value with its types; tables whose keys are names are not entered."""
    found: dict[str, str] = {}
    if isinstance(value, Mapping) and name.rpartition(".")[2] not in _FREE:
        for key, one in value.items():
            found |= _merged(found, _fields(one, f"{name}.{key}" if name else str(key)))
        return found
    if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for one in value:
            found |= _merged(found, _fields(one, f"{name}[]"))
        return found
    words = {bool: "boolean", int: "number", float: "number", str: "text", type(None): "null"}
    return {
        name: "list"
        if isinstance(value, list)
        else "table"
        if isinstance(value, Mapping)
        else words[type(value)]
    }


def _merged(found: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """The types of both, each once."""
    return {
        name: " or ".join(dict.fromkeys([*found.get(name, kind).split(" or "), *kind.split(" or ")]))
        for name, kind in more.items()
    }


def _heading(title: str, columns: tuple[str, ...]) -> Iterator[str]:
    yield from ("", f"## {title}") if title else ()
    yield from ("", _row(*columns), _row(*("---" for _ in columns)))


def _row(*cells: str) -> str:
    return (
        "| "
        + " | ".join(" ".join(cell.replace("|", "\\|").replace("<", "&lt;").split()) for cell in cells)
        + " |"
    )


if __name__ == "__main__":
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
