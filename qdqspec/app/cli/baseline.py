"""Command ``baseline``: lists committed baselines, checks them for damage, and finds entries that no check uses.

It opens specs and baselines only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec._core.config import Settings
from qdqspec._core.units import plain
from qdqspec.app.cases import SPEC_SUFFIXES, YAML, is_spec, load_cases
from qdqspec.app.cli.arguments import argument, settings_from, verb
from qdqspec.app.cli.output import FINE, WANTING, answer, complain
from qdqspec.errors import ConfigError, StateError

if TYPE_CHECKING:
    from qdqspec.checks.baselines import Entry, Figure, Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One entry of one file; ``state`` is ``in use``, or ``obsolete`` if its spec does not use it."""

    file: Path
    device: str
    name: Name
    entry: Entry
    state: str


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
    settings = settings_from(arguments)
    found: list[Kept] = []
    damaged: list[str] = []
    for file in _find_files(arguments.paths or [Path()]):
        try:
            found += _read_entries(file, settings)
        except StateError as error:
            damaged.append(str(error))
    obsolete = [kept for kept in found if kept.state == "obsolete"]
    if arguments.action == "prune":
        _prune(obsolete)
        found = obsolete
    _print(arguments, found, damaged)
    return WANTING if damaged or (obsolete and arguments.action != "prune") else FINE


def _find_files(paths: list[Path]) -> Iterator[Path]:
    from qdqspec.checks.baselines import FOLDER, find_baselines

    for path in paths:
        if is_spec(path) and path.is_file():
            yield from find_baselines([path.parent / FOLDER / path.name.rpartition(".qdq.")[0]])
        elif path.exists():
            yield from find_baselines([path])
        else:
            raise ConfigError("there is no such file or folder", where=path, cure="name specs or baselines")


def _read_entries(file: Path, settings: Settings) -> Iterator[Kept]:
    from qdqspec.checks.baselines import read_baseline

    known = read_baseline(file)
    if known is None:
        return
    asked = _entries_asked_for(file, settings)
    for name in known.names():
        entry = known.entry(name)
        assert entry is not None
        state = "in use" if asked is None or name in asked else "obsolete"
        yield Kept(file=file, device=known.device, name=name, entry=entry, state=state)


def _entries_asked_for(file: Path, settings: Settings) -> frozenset[Name] | None:
    """The entries used by the spec of a baseline: none if it is gone, ``None`` if only Python can determine it."""
    from qdqspec.checks.base import baseline_entries
    from qdqspec.checks.baselines import FOLDER

    if file.absolute().parent.parent.name != FOLDER:
        return None
    home, stem = file.absolute().parents[2], file.absolute().parent.name
    for suffix in (*SPEC_SUFFIXES, *YAML):
        if (home / f"{stem}{suffix}").is_file():
            return baseline_entries(load_cases(home / f"{stem}{suffix}", settings))
    return None if (home / f"{stem}.py").is_file() else frozenset()


def _prune(obsolete: list[Kept]) -> None:
    from qdqspec.checks.baselines import update_baseline

    for file in sorted({kept.file for kept in obsolete}):
        update_baseline(file, "", {}, [kept.name for kept in obsolete if kept.file == file])


def _print(arguments: argparse.Namespace, found: list[Kept], damaged: list[str]) -> None:
    lines = []
    for file in dict.fromkeys(kept.file for kept in found):
        own = [kept for kept in found if kept.file == file]
        lines += [file.as_posix(), f"  device {own[0].device}"]
        lines += [line for kept in own for line in _lines(kept, arguments.action)]
    if not found and not damaged:
        lines.append(
            "nothing is obsolete"
            if arguments.action == "prune"
            else "no baseline found; pytest --qdq-update=new writes them"
        )
    rows = [_row(kept, whole=arguments.action == "show") for kept in found]
    answer(arguments, {"entries": rows, "errors": damaged}, "\n".join(lines))
    for message in damaged:
        complain(message)


def _lines(kept: Kept, action: str) -> list[str]:
    entry = kept.entry
    mark = "removed" if action == "prune" else kept.state
    head = f"  {'::'.join(kept.name)}  {_figure_text(entry)}  {mark}"
    if action != "show":
        return [head]
    facts = {"model": entry.model_sha256, "clock": entry.clock, "scheme": entry.scheme}
    facts |= {
        f"rule {name}": "none" if value is None else str(value) for name, value in sorted(entry.rules.items())
    }
    facts |= dict(sorted(entry.environment.items()))
    lines = [f"    {name}: {value}" for name, value in facts.items()]
    for figure in (*entry.history, entry)[::-1]:
        lines += [] if figure is entry else [f"    before: {_figure_text(figure)}"]
        lines += [f"      changed: {plain(text, 200)}" for text in figure.changed]
    return [head, *lines]


def _figure_text(figure: Figure) -> str:
    ratio = figure.ratio
    return (
        f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})  {plain(figure.recorded, 40) or 'undated'}"
    )


def _row(kept: Kept, *, whole: bool) -> dict[str, Any]:
    entry = kept.entry
    row = {
        "name": "::".join(kept.name),
        "file": kept.file.as_posix(),
        "device": kept.device,
        "case": kept.name[0],
        "check": kept.name[1],
        "state": kept.state,
        "ratio": entry.ratio.median,
        "ci95": [entry.ratio.low, entry.ratio.high],
        "recorded": entry.recorded,
    }
    return {**row, "entry": entry.model_dump(mode="json")} if whole else row
