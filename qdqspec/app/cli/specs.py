"""Commands about specs: ``list``, ``schema`` and ``baseline``. They open specs and baselines only, never a model."""

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from qdqspec._core import registry
from qdqspec._core.config import Settings
from qdqspec._core.files import write_whole
from qdqspec._core.units import plain
from qdqspec.app.cases import YAML, find_specs, is_spec, load_cases
from qdqspec.app.cli.command import (
    FINE,
    IMPOSSIBLE,
    WANTING,
    answer,
    argument,
    complain,
    output,
    say,
    settings_from,
    verb,
)
from qdqspec.errors import ConfigError, SpecError, StateError
from qdqspec.types import Case

if TYPE_CHECKING:
    from qdqspec.app.evidence.baselines import Entry, Figure

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
    found: dict[str, str] = {}
    for name in registry.names(kind):
        text = inspect.cleandoc(registry.module_of(kind, name).__doc__ or "")
        sentence = " ".join(text.split("\n\n")[0].split()).partition(". ")[0]
        found[name] = sentence.removesuffix(".").replace("``", "")
    numbers: dict[str, list[str]] = {}
    last = ""
    if kind == "format":
        from qdqspec.app.report.write import NAME
        from qdqspec.spec import Format

        formats = get_args(Format)
        found[NAME] = "Markdown for the summary of a GitHub Actions job, and annotations; without a suffix"
        numbers = {"number_formats": list(formats)}
        last = f"\nnumber formats of --quant: {', '.join(formats)}"
    width = max(map(len, found))
    text = "\n".join(f"{name:<{width}}  {about}" for name, about in found.items()) + last
    entries = [{"name": name, "about": about} for name, about in found.items()]
    return answer(arguments, {"kind": kind, "entries": entries, **numbers}, text)


def _lines(path: Path, case: Case) -> Iterator[str]:
    """The case, and each check with its parameters as a spec writes them, without the defaults: ``{min: 1.3}``."""
    import yaml

    yield f"{path.as_posix()}::{case.id}{'  ' + case.title if case.title else ''}"
    for check in case.checks:
        params: Any = check.params
        given = params.model_dump(mode="json", exclude_unset=True, exclude={"id", "severity", "kind"})
        text: str = yaml.safe_dump(given, default_flow_style=True, width=math.inf, sort_keys=False)
        yield f"  {check.id}: {text.strip()}"


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
    from qdqspec.spec import spec_schema

    text = json.dumps(spec_schema(), indent=2)
    if arguments.output is None:
        say(text)
        return FINE
    write_whole(arguments.output, text + "\n", what="the schema")
    return FINE


# ---- baselines -----------------------------------------------------------------------------------


@verb(
    "baseline",
    "qdqspec baseline list specs/",
    argument(
        "action",
        text="list: every entry (default); show: also environment and rules; prune: remove entries that no spec uses.",
        nargs="?",
        default="list",
        choices=("list", "show", "prune"),
    ),
    argument("paths", "PATH", "Folders, specs or baselines (default: here).", nargs="*", type=Path),
    options=("allow-path",),
)
def baseline(arguments: argparse.Namespace) -> int:
    """List, show or prune committed baselines. Exits 1 where one is damaged or obsolete. They are written by pytest
    with --qdq-update.
    """
    from qdqspec.app.evidence.baselines import baseline_folder, find_baselines, update_baseline

    settings = settings_from(arguments)
    found: list[tuple[dict[str, Any], Entry]] = []
    damaged: list[str] = []
    for path in arguments.paths or [Path()]:
        folder = path
        if is_spec(path) and path.is_file():
            folder = baseline_folder(path)
        elif not path.exists():
            raise ConfigError("there is no such file or folder", where=path, cure="name specs or baselines")
        for file in find_baselines(folder):
            try:
                found += _read_entries(file, settings)
            except StateError as error:
                damaged.append(str(error))
    obsolete = [(row, entry) for row, entry in found if row["state"] == "obsolete"]
    action = arguments.action
    if action == "prune":
        for file in sorted({row["file"] for row, _ in obsolete}):
            dropped = [(row["case"], row["check"]) for row, _ in obsolete if row["file"] == file]
            update_baseline(Path(file), "", {}, dropped)
        found = obsolete
    lines, last = [], ""
    for row, entry in found:
        lines += [row["file"], f"  device {row['device']}"] if row["file"] != last else []
        last = row["file"]
        mark = "removed" if action == "prune" else row["state"]
        lines.append(f"  {row['name']}  {_figure_text(entry)}  {mark}")
        if action == "show":
            lines += _entry_lines(entry)
            row["entry"] = entry.model_dump(mode="json")
    if not found and not damaged:
        lines.append(
            "nothing is obsolete"
            if action == "prune"
            else "no baseline found; pytest --qdq-update=new writes them"
        )
    answer(arguments, {"entries": [row for row, _ in found], "errors": damaged}, "\n".join(lines))
    for message in damaged:
        complain(message)
    return WANTING if damaged or (obsolete and action != "prune") else FINE


def _read_entries(file: Path, settings: Settings) -> Iterator[tuple[dict[str, Any], Entry]]:
    """The entries of a baseline with their facts; obsolete if its spec does not use them or is gone.

    An entry of a spec in Python counts as used: its cases are known only when it runs.
    """
    from qdqspec.app.evidence.baselines import FOLDER, baseline_entries, read_baseline
    from qdqspec.types import SPEC_ENDINGS

    known = read_baseline(file)
    if known is None:
        return
    folder = file.absolute().parent
    home, used = folder.parents[1], frozenset(known.names())
    if folder.parent.name == FOLDER:
        names = (folder.name, *(f"{folder.name}{ending}" for ending in SPEC_ENDINGS))
        spec = next((home / name for name in names if (home / name).is_file()), None)
        if spec is None:
            used = frozenset()
        elif spec.suffix in YAML:
            used = baseline_entries(load_cases(spec, settings))
    for name in known.names():
        entry = known.entry(name)
        assert entry is not None
        row = {
            "name": "::".join(name),
            "file": file.as_posix(),
            "device": known.device,
            "case": name[0],
            "check": name[1],
            "state": "in use" if name in used else "obsolete",
            "ratio": entry.ratio.median,
            "ci95": [entry.ratio.low, entry.ratio.high],
            "recorded": entry.recorded,
        }
        yield row, entry


def _entry_lines(entry: Entry) -> list[str]:
    """Environment, rules and history of an entry."""
    facts = {"model": entry.model_sha256, "clock": entry.clock, "scheme": entry.scheme}
    facts |= {
        f"rule {name}": "none" if value is None else str(value) for name, value in sorted(entry.rules.items())
    }
    facts |= dict(sorted(entry.environment.items()))
    lines = [f"    {name}: {value}" for name, value in facts.items()]
    for figure in (*entry.history, entry)[::-1]:
        lines += [] if figure is entry else [f"    before: {_figure_text(figure)}"]
        lines += [f"      changed: {plain(text, 200)}" for text in figure.changed]
    return lines


def _figure_text(figure: Figure) -> str:
    ratio = figure.ratio
    return (
        f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})  {plain(figure.recorded, 40) or 'undated'}"
    )
