"""Commands about specs: ``list`` and ``schema``. They open YAML only, never a model."""

from __future__ import annotations

import argparse
import inspect
import json
import math
from pathlib import Path
from typing import Any, get_args

from qdqspec._core import registry
from qdqspec._core.files import write_whole
from qdqspec.app.cases import find_specs, is_spec, load_cases
from qdqspec.app.cli.arguments import argument, output, settings_from, verb
from qdqspec.app.cli.output import FINE, IMPOSSIBLE, answer, complain, say
from qdqspec.errors import ConfigError, SpecError
from qdqspec.types import Case

KINDS: dict[str, registry.RegistryKind] = {
    "backends": "backend",
    "strategies": "strategy",
    "checks": "check",
    "formats": "format",
}


@verb(
    "list",
    "qdqspec list specs/ --json\n  qdqspec list checks",
    argument(
        "paths", "PATH|WORD", "Specs or folders (default: here), or one of the words.", nargs="*", type=Path
    ),
    options=("allow-path",),
)
def list_cases(arguments: argparse.Namespace) -> int:
    """List the cases and checks of specs, without opening a model; or, by a word, all entries of a kind: backends,
    strategies, checks or formats (of reports).

    An invalid spec is reported and does not hide the others.
    """
    word = str(arguments.paths[0]) if len(arguments.paths) == 1 else ""
    if word and not Path(word).exists():
        if word in KINDS:
            return _list_kind(KINDS[word], arguments)
        if not is_spec(Path(word)):
            raise ConfigError(
                f"there is no such spec or folder{registry.did_you_mean(word, [*KINDS])}",
                where=word,
                cure=f"name specs or folders, or one of the words {', '.join(KINDS)}",
            )
    settings = settings_from(arguments)
    found, wrong = [], []
    for path in find_specs(arguments.paths or [Path()]):
        try:
            found += [(path, case) for case in load_cases(path.absolute(), settings)]
        except SpecError as error:
            wrong.append(str(error))
    rows = [_entry(path, case, settings.root) for path, case in found]
    text = "\n".join(line for path, case in found for line in _lines(path, case))
    answer(arguments, {"cases": rows, "errors": wrong}, text)
    for message in wrong:
        complain(message)
    if not found and not wrong:
        complain("no spec found; names of specs end in .qdq.yaml\n  qdqspec init MODEL.onnx writes one")
    return IMPOSSIBLE if wrong or not found else FINE


def _list_kind(kind: registry.RegistryKind, arguments: argparse.Namespace) -> int:
    """All entries of a kind, built-in or of installed packages, with the first sentence of their documentation."""
    found = {name: _description_of(kind, name) for name in registry.names(kind)}
    numbers: dict[str, list[str]] = {}
    text = ""
    if kind == "format":
        from qdqspec.app.report.write import NAME
        from qdqspec.spec.fields import Format

        formats = get_args(Format)
        found[NAME] = "Markdown for the summary of a GitHub Actions job, and annotations; without a suffix"
        numbers = {"number_formats": list(formats)}
        text = f"\nnumber formats of --quant: {', '.join(formats)}"
    width = max(map(len, found))
    text = "\n".join(f"{name:<{width}}  {about}" for name, about in found.items()) + text
    entries = [{"name": name, "about": about} for name, about in found.items()]
    answer(arguments, {"kind": kind, "entries": entries, **numbers}, text)
    return FINE


def _description_of(kind: registry.RegistryKind, name: str) -> str:
    """The first sentence of the documentation of an entry's module."""
    text = inspect.cleandoc(registry.module_of(kind, name).__doc__ or "")
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".").replace("``", "")


def _lines(path: Path, case: Case) -> list[str]:
    title = f"  {case.title}" if case.title else ""
    head = f"{path.as_posix()}::{case.id}{title}"
    return [head, *(f"  {check.id}: {_params_text(check.params)}" for check in case.checks)]


def _params_text(params: Any) -> str:
    """The parameters given to a check, without the defaults, as a spec writes them: ``{min: 1.3}``."""
    import yaml

    given = params.model_dump(mode="json", exclude_unset=True, exclude={"id", "severity", "kind"})
    text: str = yaml.safe_dump(given, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.strip()


def _entry(path: Path, case: Case, root: Path) -> dict[str, object]:
    return {
        "file": path.as_posix(),
        "id": f"{path.as_posix()}::{case.id}",
        "case": case.id,
        "title": case.title,
        "model": case.model.relative_to(root).as_posix()
        if case.model.is_relative_to(root)
        else str(case.model),
        "tags": list(case.tags),
        "quant": case.quantize.format,
        "tune": {"strategy": case.tune.strategy, "trials": case.tune.trials, "minutes": case.tune.minutes},
        "checks": [
            {
                "id": check.id,
                "kind": check.kind,
                "severity": check.severity,
                "line": check.line,
                "params": check.params.model_dump(mode="json", exclude_unset=True, exclude={"kind"}),
            }
            for check in case.checks
        ],
    }


@verb("schema", "qdqspec schema -o qdqspec.schema.json", output("PATH", "Write to a file.", required=False))
def write_schema(arguments: argparse.Namespace) -> int:
    """Write the JSON Schema of spec files. Editors complete the keys of a spec with it."""
    from qdqspec.spec.models import spec_schema

    text = json.dumps(spec_schema(), indent=2)
    if arguments.output is None:
        say(text)
        return FINE
    write_whole(arguments.output, text + "\n", what="the schema")
    return FINE
