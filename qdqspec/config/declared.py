"""Options of backends, ``BACKEND.WORD=VALUE``: their declarations, and how values are read and checked.

A word that its backend does not declare is rejected. A word in a file or an environment variable is rejected
unless its declaration allows it there. Numbers, switches and choices usually may be there; names of files and
native code must not, because a file may come with a repository.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from qdqspec.config.values import ValueType
from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean, resolve

NATIVE_CODE = "native code is loaded only where the command line says so"
REMOTE_CODE = "a cluster is used only where the command line names it, since its scheduler can run code here"


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
        key = self.word.replace("-", "_")
        return f"{key}_" if keyword.iskeyword(key) else key


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


def option(
    type_: ValueType,
    text: str,
    default: Any = None,
    *,
    shown: str | None = None,
    in_files: bool = True,
    flag: str = "",
) -> Any:
    """A field of a dataclass of options that declares one; ``shown`` is the default in words, if its value is none."""
    if shown is None:
        shown = ("on" if default else "off") if isinstance(default, bool) else str(default)
    declared = {"type": type_, "help": text, "default": shown, "in_files": in_files, "flag": flag}
    return field(default=default, metadata=declared)


def declare(
    backend: str,
    options: Any,
    refused: Mapping[str, tuple[str, str]] | None = None,
    *,
    separator: str = "-",
) -> BackendOptions:
    """The options that the fields of a dataclass declare: ``_`` in a name is the ``separator`` in the word."""
    declared = tuple(
        BackendOption(word=each.name.rstrip("_").replace("_", separator), **each.metadata)
        for each in fields(options)
    )
    return BackendOptions(backend=backend, options=declared, refused=refused or {})


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
