"""Commands about this machine: ``doctor`` and ``config``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qdqspec._core import registry
from qdqspec._core.config import OPTIONS, list_settings
from qdqspec._core.options import options_of
from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec._core.units import without_passwords
from qdqspec.app.cli.arguments import settings_from, verb
from qdqspec.app.cli.output import FINE, IMPOSSIBLE, answer

if TYPE_CHECKING:
    from qdqspec.backends.base import Availability


@verb(
    "doctor",
    f"qdqspec doctor --backend {DEFAULT_BACKEND}",
    options=("backend", "device", "backend-option", "plugin"),
)
def doctor(arguments: argparse.Namespace) -> int:
    """List which backends work here, and how to get the others. Exits 0 when the chosen one works."""
    from qdqspec.backends.base import BuildOptions, backend_named

    settings = settings_from(arguments)
    chosen, options = settings.backend, BuildOptions.of(settings)
    found = {name: backend_named(name).probe(options) for name in registry.names("backend")}
    order = sorted(found, key=lambda name: (name != chosen, not found[name].usable))
    lines = [_diagnosis(name, found[name], chosen=name == chosen) for name in order] + _option_lines(chosen)
    backends = {name: _facts(name, availability) for name, availability in found.items()}
    answer(arguments, {"chosen": chosen, "backends": backends}, "\n".join(lines))
    return FINE if found[chosen].usable else IMPOSSIBLE


def _facts(name: str, availability: Availability) -> dict[str, object]:
    return {
        "usable": availability.usable,
        "why": availability.why,
        "install": availability.install,
        "facts": dict(availability.facts),
        "options": [
            {
                "name": f"{name}.{option.word}",
                "expects": option.type.expects,
                "default": option.default,
                "in_files": option.in_files,
                "help": option.help,
            }
            for option in options_of(name).options
        ],
    }


def _option_lines(name: str) -> list[str]:
    """The options that a backend accepts, with their types, and where each may be set."""
    options = options_of(name).options
    if not options:
        return []
    rows = [
        (
            f"{name}.{option.word}",
            option.type.expects,
            option.default or "-",
            "anywhere" if option.in_files else "command line only",
        )
        for option in options
    ]
    table = _table(("option", "expects", "default", "set"), rows)
    return ["", f"options of {name} (--backend-option NAME=VALUE):", *table]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; it loads no library, as `config` loads none."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, rule, *rows)
    ]


def _diagnosis(name: str, availability: Availability, *, chosen: bool) -> str:
    state = "works" if availability.usable else "not usable here"
    lines = [f"{name}: {state}{' (chosen)' if chosen else ''}"]
    lines += [f"  {availability.why}"] if availability.why else []
    lines += (
        [f"  to get it: {availability.install}"] if availability.install and not availability.usable else []
    )
    width = max((len(fact) for fact in availability.facts), default=0)
    lines += [f"  {fact:<{width}}  {value}" for fact, value in availability.facts.items()]
    return "\n".join(lines)


@verb(
    "config",
    "QDQSPEC_THREADS=4 qdqspec config",
    options=[option.name for option in OPTIONS if option.name != "json"],  # --json is the command's own
)
def config(arguments: argparse.Namespace) -> int:
    """Print every setting with its value and where it came from."""
    settings = settings_from(arguments)
    rows = [(s.name, _shown(s.value), s.origin) for s in list_settings(settings)]
    texts = [(name, _text(value), origin) for name, value, origin in rows]
    text = "\n".join([f"root: {settings.root}", "", *_table(("setting", "value", "set by"), texts)])
    listed = [{"name": n, "value": v, "origin": o} for n, v, o in rows]
    answer(arguments, {"root": str(settings.root), "settings": listed}, text)
    return FINE


def _shown(value: object) -> object:
    """A value in a form that JSON can represent."""
    if isinstance(value, tuple):
        return [without_passwords(str(one)) for one in value]
    return value if value is None or isinstance(value, bool | int | float) else without_passwords(str(value))


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "-"
