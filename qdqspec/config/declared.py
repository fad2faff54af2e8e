"""Options of backends, ``BACKEND.WORD=VALUE``: their declarations, and how values are read and checked.

A word that its backend does not declare is rejected. A word in a file or an environment variable is rejected
unless its declaration allows it there. Numbers, switches and choices usually may be there; names of files and
native code must not, because a file may come with a repository.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean, resolve

NATIVE_CODE = "native code is loaded only where the command line says so"
REMOTE_CODE = "a cluster is used only where the command line names it, since its scheduler can run code here"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """A type of values: ``expects`` in words, and ``read``, which raises ``ValueError`` for other text."""

    expects: str
    read: Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOption:
    """One option of a backend.

    ``in_files`` allows it in files and environment variables; without it only the command line sets it.
    ``default`` is text for people; ``flag`` is an option of the command line (without dashes) with the same
    effect.
    """

    word: str
    type: ValueType
    in_files: bool
    help: str
    default: str = ""
    flag: str = ""

    @property
    def key(self) -> str:
        """The word as a Python identifier."""
        return self.word.replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """All options that a backend accepts.

    ``refused`` are words that users of the runtime expect but that are not offered, with the reason and the
    remedy.
    """

    backend: str
    options: tuple[BackendOption, ...] = ()
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def read(self, extra: Mapping[str, str]) -> dict[str, Any]:
        """The values of this backend's words in ``extra``, by key; words of other backends are skipped.

        Raises `ConfigError` for a word that is not declared and for an invalid value.
        """
        found = {}
        for name, text in extra.items():
            backend, _, word = name.partition(".")
            if backend == self.backend:
                found[self.option(word).key] = self.value(word, text)
        return found

    def option(self, word: str) -> BackendOption:
        """The option of that word. Raises `ConfigError` with the nearest one and all of them."""
        known = {option.word: option for option in self.options}
        if word in known:
            return known[word]
        if word in self.refused:
            why, cure = self.refused[word]
            raise ConfigError(f"{self.backend}.{word} cannot be set: {why}", cure=cure)
        near = did_you_mean(f"{self.backend}.{word}", [f"{self.backend}.{one}" for one in known])
        listed = ", ".join(known) or "none"
        raise ConfigError(
            f"unknown option '{self.backend}.{word}'{near}", cure=f"options of {self.backend}: {listed}"
        )

    def value(self, word: str, text: str) -> Any:
        """The value of ``text`` for an option. Raises `ConfigError` if it is invalid."""
        option = self.option(word)
        try:
            return option.type.read(text.strip())
        except ValueError as error:
            raise ConfigError(
                f"'{text}' does not fit {self.backend}.{word}: {error}", cure=option.help
            ) from None


def options_of(backend: object) -> BackendOptions:
    """The options that a backend, given by object or name, declares; empty if none. Imports a named one."""
    found = resolve("backend", backend) if isinstance(backend, str) else backend
    declared = getattr(found, "options", None)
    name = backend if isinstance(backend, str) else str(getattr(found, "name", ""))
    return declared if isinstance(declared, BackendOptions) else BackendOptions(backend=name)


def check_option(
    text: str, origin: str, *, command_line: bool, prefix: str = "--qdq-", place: str = "on the command line"
) -> None:
    """Raise `ConfigError` if ``BACKEND.WORD=VALUE`` is not declared, not valid, or not allowed there.

    ``place`` is where an option that only the command line sets is to be given.
    """
    name, _, value = text.partition("=")
    backend, _, word = name.partition(".")
    try:
        declared = options_of(backend)
        option = declared.option(word)
        if not command_line and not option.in_files:
            flag = f"{prefix}{option.flag or f'backend-option={name}=...'}"
            raise ConfigError(
                f"{name} is accepted from the command line only: native code loads or reads what it names",
                cure=f"give {flag} {place}",
            )
        declared.value(word, value)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.what}", where=error.where, cure=error.cure) from None


def require_plugins(backend: str, origin: str) -> None:
    """Raise `ConfigError` if plugin libraries are given to a backend that loads none."""
    if "plugins" not in {option.word for option in options_of(backend).options}:
        raise ConfigError(f"{origin}: backend {backend} loads no plugin libraries", cure="leave it out")


# ---- types of values ----------------------------------------------------------------------------


def whole(least: int, most: int | None = None, why: str = "") -> ValueType:
    """A whole number within bounds; ``why`` is added to the description of the type."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    expects = f"a whole number {bounds}"

    def read(text: str) -> int:
        fits = re.fullmatch(r"\d{1,12}", text, re.ASCII)
        if not fits or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(f"{expects} is expected{why}")
        return int(text)

    return ValueType(expects=expects, read=read)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number is expected") from None
    if value != value or value in (float("inf"), -float("inf")):
        raise ValueError("a finite number is expected")
    return value


def _switch(text: str) -> bool:
    on, off = ("1", "true", "on", "yes"), ("0", "false", "off", "no")
    if text.lower() not in (*on, *off):
        raise ValueError("on or off is expected")
    return text.lower() in on


def one_of(*known: str) -> ValueType:
    """One of these words."""
    expects = f"one of {', '.join(known)}"

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"{expects} is expected{did_you_mean(text, known)}")
        return text

    return ValueType(expects=expects, read=read)


def _text(text: str) -> str:
    if not text:
        raise ValueError("a word is expected")
    return text


def _paths(text: str) -> tuple[Path, ...]:
    paths = tuple(Path(part).expanduser().absolute() for part in text.split(os.pathsep) if part)
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"there is no file {missing[0]}")
    return paths


def _path(text: str) -> Path:
    return Path(_text(text)).expanduser()


NUMBER = ValueType(expects="a number", read=_number)
SWITCH = ValueType(expects="on or off", read=_switch)
TEXT = ValueType(expects="text", read=_text)
PATH = ValueType(expects="a file", read=_path)
LIBRARIES = ValueType(expects=f"files, separated by '{os.pathsep}'", read=_paths)
ARGUMENTS = ValueType(expects="arguments, as a shell splits them", read=lambda text: tuple(shlex.split(text)))
