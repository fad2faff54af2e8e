"""Finds a backend, strategy, check or report format by name.

A name is looked up first in this package: a file of a folder that holds nothing else (``checks/kinds/NAME.py``), or a
folder with an engine (``backends/NAME``; a hyphen in the name of a backend is an underscore in that of its folder).
Then it is an entry point of an installed package. An unknown name raises an error with the nearest known name.
Listing imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias

from qdqspec.errors import ConfigError

RegistryKind: TypeAlias = Literal["backend", "strategy", "check", "format"]

DEFAULT_BACKEND = "onnxruntime"  # which is also the reference: it computes a model as ONNX defines it

# Package (module path below qdqspec), entry-point group, and the attribute that a module defines.
_PLACES: dict[RegistryKind, tuple[str, str, str]] = {
    "backend": ("backends", "qdqspec.backends", "backend"),
    "strategy": ("search.strategies", "qdqspec.strategies", "strategy"),
    "check": ("checks.kinds", "qdqspec.checks", "check"),
    "format": ("app.report.formats", "qdqspec.formats", "report_format"),
}


@cache
def built_in(kind: RegistryKind) -> tuple[str, ...]:
    """The names of a kind in this package, sorted."""
    folder = Path(__file__).parents[1].joinpath(*_PLACES[kind][0].split("."))
    if kind == "backend":
        return tuple(sorted(path.parent.name.replace("_", "-") for path in folder.glob("*/engine.py")))
    return tuple(sorted(path.stem for path in folder.glob("[!_]*.py")))


@cache
def _entry_points(kind: RegistryKind) -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=_PLACES[kind][1])}


def names(kind: RegistryKind) -> tuple[str, ...]:
    """All names of a kind, built-in and installed, sorted. Imports none of them."""
    return tuple(sorted({*built_in(kind), *_entry_points(kind)}))


def module_of(kind: RegistryKind, name: str) -> ModuleType:
    """The module of a name, built in or of an entry point. Raises `ConfigError` with the nearest known name."""
    if name in built_in(kind):
        return importlib.import_module(f"qdqspec.{_PLACES[kind][0]}.{name.replace('-', '_')}")
    if name in _entry_points(kind):
        return importlib.import_module(_entry_points(kind)[name].module)
    near = did_you_mean(name, names(kind))
    raise ConfigError(f"unknown {kind} '{name}'{near}", cure=f"known: {', '.join(names(kind))}")


def resolve(kind: RegistryKind, name: str) -> object:
    """The object of a name. Raises `ConfigError` with the nearest known name if there is none.

    A built-in file ``x.py`` defines it as an attribute named after its package (``backend``, ``strategy``,
    ``check``, ``report_format``): a class or an instance with the protocol of its kind.
    """
    if name not in built_in(kind) and name in _entry_points(kind):
        return loaded(_entry_points(kind)[name], kind)
    return getattr(module_of(kind, name), _PLACES[kind][2])


def loaded(point: importlib.metadata.EntryPoint, what: str) -> object:
    """The object of an entry point. Raises `ConfigError` if it cannot be imported or is a module."""
    try:
        found: object = point.load()
        if isinstance(found, ModuleType):
            raise TypeError("it is a module, not its object")
    except Exception as error:  # any error while a module of another package is imported
        problem = (
            f"{what} '{point.name}' cannot be imported from '{point.value}': {type(error).__name__}: {error}"
        )
        cure = f"correct the entry point in group {point.group} of its package, and install the package again"
        raise ConfigError(problem, cure=cure) from error
    return found


def raising_line(error: Exception, function: Callable[..., object]) -> str | None:
    """The last executed line in the file of a function that the caller wrote."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f"{own}:{lines[-1]}" if lines else None


def did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """`` (did you mean 'x'?)`` if a similar name is known, else empty."""
    folded, typed = {name.casefold(): name for name in known}, word.casefold()
    close = difflib.get_close_matches(typed, folded, n=1)
    return f" (did you mean '{folded[close[0]]}'?)" if close else ""
