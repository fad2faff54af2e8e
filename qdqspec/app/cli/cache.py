"""Command ``cache``: list the stored results of finished searches, or remove some."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec._core.options import duration
from qdqspec._core.units import count_text, seconds_text, size_text
from qdqspec.app.cli.arguments import argument, settings_from, verb
from qdqspec.app.cli.output import FINE, WANTING, answer, complain
from qdqspec.errors import ConfigError

if TYPE_CHECKING:
    from qdqspec.timing.store import Store, StoreEntry

_MONTH = 30 * 86400.0  # seconds


def _age(text: str) -> float:
    try:
        return duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@verb(
    "cache",
    "qdqspec cache prune --older-than 30d",
    argument(
        "action",
        text="list: every entry (default); info: number, size and age; prune: remove old ones; clear: remove all; "
        "export, import: write all intact entries to FILE, or add those of FILE.",
        nargs="?",
        default="list",
        choices=("list", "info", "prune", "clear", "export", "import"),
    ),
    argument("file", "FILE", "A .zip archive, for export and import.", nargs="?", type=Path),
    argument(
        "--older-than",
        "TIME",
        "Smallest age of entries that prune removes, such as 12h or 30d (default: 30d).",
        type=_age,
        default=_MONTH,
    ),
    options=("cache-dir",),
)
def cache(arguments: argparse.Namespace) -> int:
    """List, prune, clear, export or import cached searches. Exits 1 where an entry is damaged."""
    from qdqspec.timing.store import Store

    store = Store(settings_from(arguments).cache_dir)
    if (arguments.file is None) is (arguments.action in ("export", "import")):
        raise ConfigError(f"cache {arguments.action}: FILE is for export and import, which need it")
    if arguments.action == "list":
        return _list(arguments, store)
    found: dict[str, Any] = {"folder": str(store.folder)}
    if arguments.file is not None:
        found["file"] = str(arguments.file)
    if arguments.action == "info":
        entries = store.entries()
        size = sum(each.size_bytes for each in entries)
        age = max((each.age_seconds for each in entries), default=0.0)
        found |= {"entries": len(entries), "bytes": size, "oldest_seconds": round(age, 1)}
        text = f"{_searches_text(len(entries))}, {size_text(size)}, the oldest {seconds_text(age)}"
    elif arguments.action == "export":
        found["exported"] = store.export(arguments.file)
        text = f"{_searches_text(found['exported'])} written to {arguments.file}"
    elif arguments.action == "import":
        found["added"], found["present"] = store.take(arguments.file)
        text = f"{_searches_text(found['added'])} added, {found['present']} were there"
    else:
        found["removed"] = store.prune(arguments.older_than if arguments.action == "prune" else 0.0)
        text = f"{count_text(found['removed'], 'entry', 'entries')} removed"
    answer(arguments, found, f"{store.folder}: {text}")
    return FINE


def _searches_text(number: int) -> str:
    return count_text(number, "finished search", "finished searches")


def _list(arguments: argparse.Namespace, store: Store) -> int:
    entries = store.entries()
    size = sum(entry.size_bytes for entry in entries)
    head = f"{store.folder}: {_searches_text(len(entries))}, {size_text(size)}"
    rows = list(map(_row, entries))
    found = {"folder": str(store.folder), "size_bytes": size, "entries": rows}
    answer(arguments, found, "\n".join([head, *map(_line, entries, rows)]))
    damaged = [entry for entry in entries if entry.damage]
    for entry in damaged:
        complain(
            f"{entry.folder}: {entry.damage}\n  it is ignored and made anew; qdqspec cache clear removes it"
        )
    return WANTING if damaged else FINE


def _row(entry: StoreEntry) -> dict[str, Any]:
    from qdqspec.app.preparation.stored import NODES, about

    return {
        "key": entry.folder.name,
        "folder": str(entry.folder),
        "bytes": entry.size_bytes,
        "age_seconds": round(entry.age_seconds, 1),
        "damage": entry.damage,
        **{name: text for name, text in about(entry.folder).items() if name != NODES},
    }


def _line(entry: StoreEntry, row: Mapping[str, Any]) -> str:
    what = " on ".join(row[word] for word in ("case", "device") if word in row) or "(not stated)"
    return f"  {entry.folder.name[:12]}  {size_text(entry.size_bytes):>9}  {seconds_text(entry.age_seconds):>9}  {what}"
