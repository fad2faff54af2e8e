"""Writes the pages of docs/reference from the code: keys, options, commands, JSON, Python names, rules.

``python tools/reference.py`` renews them; a test compares them with the code.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from python_page import python_names
from record_page import RUN
from verbs_page import verb_fields

from qdqspec._core import hooks, registry
from qdqspec._core.config import OPTIONS
from qdqspec.app import cli
from qdqspec.backends.base import backend_named
from qdqspec.qdq.lint import Rule, rules_for
from qdqspec.qdq.lint.rules import BY_LOADING, range_text
from qdqspec.spec import inline
from qdqspec.spec.inline import Asked, AskedWithStrategy
from qdqspec.spec.kinds import params_of
from qdqspec.spec.models import spec_schema

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
DIFFERENCES = FOLDER.parents[1] / "tests" / "data" / "tensorrt" / "rtx-differences.json"
_NOTE = "Generated from the code by `python tools/reference.py`."


def pages() -> dict[str, str]:
    """The pages by file name."""
    return {
        "spec.md": _page("Keys of a spec", _spec()),
        "options.md": _page("Options", _options()),
        "commands.md": _page("Commands", _commands()),
        "record.md": _page("The JSON record", _record()),
        "verbs-json.md": _page("The JSON of verbs", verb_fields()),
        "python.md": _page("Python names", python_names(_asked())),
        "placement-rules.md": _page("Placement rules", _placement_rules()),
        "lint.md": _page("Lint rules", _lint_rules()),
        "lint-and-compiler.md": _page("Lint and the compiler of TensorRT for RTX", _differences()),
    }


def _page(title: str, lines: Iterator[str]) -> str:
    text = "\n".join([f"# {title}", "", _NOTE, "", *lines]) + "\n"
    return text.replace("\n\n\n", "\n\n")


# ---- lint ---------------------------------------------------------------------------------------


def _lint_rules() -> Iterator[str]:
    """Each rule, those of the severest findings first, then the findings of the loading runtime."""
    yield "The rules of `qdqspec lint MODEL --target T` and of the check `lint`."
    yield ""
    yield "A rule applies to all versions of its targets unless a range is given. In versions for which no source"
    yield "states whether it applies, it is applied, and the finding states this. A target of a major version alone is"
    yield "judged for all its versions."
    yield ""
    yield "`refused`: the target does not build the model, or computes it wrongly. `slow`: it costs time there. `note`:"
    yield "for information. An id never changes its meaning and is never used again. A rule that holds for targets with"
    yield "different sources has all of them."
    yield ""
    yield "ONNX's checker judges a model for every target. The runtime of a target loads the model if it is installed"
    yield "in the version of the target, unless `--no-load` or `load: false` is given. What they refuse has an id at"
    yield "the end of this page. A refusal by the checker is a note if the runtime loads the model."
    known: dict[str, list[Rule]] = {}
    for rule in rules_for():
        known.setdefault(rule.id, []).append(rule)
    for severity in ("refused", "slow", "note"):
        for first, *others in (rules for rules in known.values() if rules[0].severity == severity):
            yield from ("", f"## {first.id}", "", f"{first.title}.", "", f"- severity: {severity}")
            yield f"- targets: {', '.join(first.targets)}{_versions(first)}"
            yield from (f"- cure: {first.cure}", f"- source: {first.source}")
            for rule in others:
                yield from _other_targets(rule, first)
    for finding in BY_LOADING:
        yield from ("", f"## {finding.id}", "", f"{finding.title}.", "", f"- severity: {finding.severity}")
        yield from ("- targets: all", f"- cure: {finding.cure}", f"- source: {finding.source}")


def _versions(rule: Rule) -> str:
    """The versions that a rule applies to."""
    held = range_text(rule.since, rule.until)
    unknown = f"not known {range_text(*rule.unknown)}" if rule.unknown else ""
    return "".join(f", {text}" for text in (held, unknown) if text)


def _other_targets(rule: Rule, first: Rule) -> Iterator[str]:
    """A rule of an id that another one has, for other targets: its source, and what else is different."""
    yield f"- {', '.join(rule.targets)}: {rule.source}"
    words = {"severity": rule.severity, "rule": rule.title, "cure": rule.cure}
    same = {"severity": first.severity, "rule": first.title, "cure": first.cure}
    yield from (f"    - {name}: {text}" for name, text in words.items() if text != same[name])


# ---- lint and compiler --------------------------------------------------------------------------


def _differences() -> Iterator[str]:
    reviewed = json.loads(DIFFERENCES.read_text(encoding="utf-8"))
    targets = ", ".join(reviewed["capabilities"])
    yield (
        f"The models of the tests of [lint rules](lint.md) were built with {reviewed['compiler']} for {targets}, and "
        "linted for `tensorrt-rtx-1`. A refusal by one side only is listed here, with the reason why it is accepted. "
        "`pytest -m integration` fails for a difference that is not listed. Nothing was run: a model that builds is "
        "neither right nor fast for that reason."
    )
    yield from _heading(
        "Differences", ("model", "rule", "refused by lint only", "refused by the compiler only", "reason")
    )
    for name, entry in reviewed["differences"].items():
        sides = (", ".join(entry.get(side, [])) for side in ("lint", "compiler"))
        yield f"| `{name}` | {entry['rule']} | {' | '.join(sides)} | {entry['reason']} |"


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
    yield "The file is the nearest `pyproject.toml` at or above pytest's rootdir, for verbs the current folder."
    yield from _heading("", ("option of pytest", "variable", "value", "meaning"))
    for option in OPTIONS:
        variable = "command line only" if option.command_line else f"`{option.variable}`"
        yield _row(
            f"`--qdq-{option.name}`",
            variable,
            f"`{option.metavar}`" if option.metavar else "switch",
            option.help,
        )


def _commands() -> Iterator[str]:
    yield from _heading("Exit codes", ("code", "meaning"))
    yield _row("0", "success; of a verb that judges: no fault found")
    yield _row("1", "a check or comparison failed")
    yield _row(
        "2",
        "the command could not be run: wrong arguments, input that cannot be read, a backend that is missing",
    )
    yield _row("130", "interrupted; what was measured is kept")
    yield ""
    yield "`pytest` exits with its own codes: [continuous integration](../how-to/ci.md). `--json` of each verb:"
    yield "[fields](verbs-json.md)."
    for name, verb in cli.parsers()[1].items():
        yield from ("", f"## {name}", "", " ".join(str(verb.description).split()), "", "```sh")
        yield from (line.strip() for line in str(verb.epilog).splitlines()[1:])
        yield "```"
        yield from ("", _row("argument", "meaning"), _row("---", "---"))
        shown = (action for action in verb._actions if action.help != argparse.SUPPRESS)  # noqa: SLF001 - the only list
        yield from map(_argument, shown)


def _argument(action: argparse.Action) -> str:
    names = " ".join(f"`{word}`" for word in action.option_strings) or f"`{action.metavar or action.dest}`"
    value = f" `{action.metavar}`" if action.option_strings and isinstance(action.metavar, str) else ""
    return _row(names + value, str(action.help or "").replace("%%", "%"))


# ---- Python ----------------------------------------------------------------------------------------


def _asked() -> Iterator[str]:
    """The options of a case with the keys of a spec that they set."""
    schema = spec_schema()
    yield from (_row("option", "key of a spec", "meaning"), _row(*("---",) * 3))
    for option in AskedWithStrategy.__annotations__ | Asked.__annotations__:
        if option in _OTHER:
            yield _row(f"`{option}`", "", _OTHER[option])
            continue
        *path, key = inline._PLACES[option]  # noqa: SLF001 - the only list
        properties = schema["properties"]
        for part in path:
            properties = _properties(properties[part], schema)
        yield _row(f"`{option}`", f"`{'.'.join((*path, key))}`", properties[key].get("description", ""))


_OTHER = {
    "name": "The id of the case, and its folder below that of the model in `reports/` (default: `default`).",
    "batch": "The batch: the first dimension of the inputs, where it is dynamic; `matrix.batch` of a spec.",
    "metrics": "Task metrics of your own, by the name that `metric` or a spec gives them.",
    "regions": "`regions.by`, or groups of node names (globs), which is `manual`.",
}


# ---- placement rules --------------------------------------------------------------------------------


def _placement_rules() -> Iterator[str]:
    """Each rule with the backends that apply it and its docstring."""
    yield "Constraints on Q/DQ pairs beyond single operators, each with its source. Each backend defines its own"
    yield "([how to](../how-to/backend.md)); `qdqspec inspect MODEL --backend tensorrt --verbose` names the rule that"
    yield "leaves an operator in float."
    yield ""
    yield "Two more rules apply to every backend, in the search and in the final model. All inputs of a weighted"
    yield "operator are quantized together (`qdq/unit_finder.py`). Inputs and output of a Concat, a MaxPool or an"
    yield "operator that moves values share one scale (`tie_ranges` in `qdq/ranges.py`). The operators that"
    yield "run in each format, pooling among them, are in the table of a backend (`backends/tensorrt/ops.py`)."
    backends: dict[tuple[str, str], list[str]] = {}
    for backend in registry.names("backend"):
        for rule in backend_named(backend).capabilities().rules.items():
            backends.setdefault(rule, []).append(f"`{backend}`")
    for (name, hook), names in sorted(backends.items()):
        yield from (
            "",
            f"## {name}",
            "",
            str(inspect.getdoc(hooks.load(hook))),
            "",
            f"Backends: {', '.join(names)}.",
        )


# ---- record -------------------------------------------------------------------------------------


def _record() -> Iterator[str]:
    yield "`--qdq-json=PATH`, `tune --json` and reports with the suffix `.json` hold a [Run](#run); `result.json` of"
    yield "a case is a [Case](#case). Numbers that JSON lacks are the texts `Infinity`, `-Infinity` and `NaN`."
    schema = RUN.model_json_schema(mode="serialization")
    parts = {**schema["$defs"], "Run": schema}
    waiting = ["Run"]
    for name in waiting:  # grows
        part = parts[name]
        about = part["description"].replace("``", "`").split("\n\n")
        yield from ("", f"## {_part_name(name)}", "", "\n\n".join(" ".join(text.split()) for text in about))
        yield from ("", _row("field", "type"), _row("---", "---"))
        yield from (_row(f"`{key}`", _json_type(one, parts)) for key, one in part["properties"].items())
        refs = re.findall(r"'#/\$defs/(\w+)'", str(part["properties"]))
        waiting += [ref for ref in dict.fromkeys(refs) if ref not in waiting and "properties" in parts[ref]]


def _part_name(name: str) -> str:
    return name.removesuffix("Part")


def _json_type(part: Mapping[str, Any], parts: Mapping[str, Any]) -> str:
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        named = f"[{_part_name(name)}](#{_part_name(name).lower()})"
        return named if "properties" in parts[name] else _json_type(parts[name], parts)
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_json_type(one, parts) for one in part["anyOf"]))
    if "enum" in part or "const" in part:
        return _type(part, parts)
    if "prefixItems" in part:
        return f"list: {', '.join(_json_type(one, parts) for one in part['prefixItems'])}"
    if part.get("type") == "array":
        return f"list of {_json_type(part.get('items', {}), parts)}"
    if "additionalProperties" in part:
        return f"table of {_json_type(part['additionalProperties'], parts)}"
    words = {"string": "text", "integer": "number"}
    return words.get(str(part.get("type")), str(part.get("type", "any")))


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
