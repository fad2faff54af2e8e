"""Options of backends, ``BACKEND.WORD=VALUE``: their declarations, types of values, and how both are checked.

A word that its backend does not declare is rejected. A word in a file or an environment variable is rejected
unless its declaration allows it there. Numbers, switches and choices usually may be there; names of files and
native code must not, because a file may come with a repository.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from qdqspec._core.registry import did_you_mean, names, resolve
from qdqspec.errors import ConfigError

OptionsT = TypeVar("OptionsT")

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """A type of values: ``expects`` in words, and ``read``, which raises ``ValueError`` stating the valid values."""

    expects: str
    read: Callable[[object], Any]


def one_of(*known: str) -> ValueType:
    """The type of values that are one of these words."""
    expects = f"one of {', '.join(known)}"

    def read(value: object) -> str:
        if value not in known:
            raise ValueError(f"{expects} is expected{did_you_mean(str(value), known)}")
        return str(value)

    return ValueType(expects=expects, read=read)


def whole(least: int, most: int | None = None, why: str = "") -> ValueType:
    """The type of whole numbers within bounds; ``why`` is added to the message for another value."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    expects = f"a whole number {bounds}"

    def read(value: object) -> int:
        text = str(value)
        fits = not isinstance(value, bool) and re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII)
        if not fits or not least <= int(text) <= (math.inf if most is None else most):
            raise ValueError(f"{expects} is expected{why}")
        return int(text)

    return ValueType(expects=expects, read=read)


def word(value: object) -> str:
    """Any text that is not empty."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise ValueError("a word is expected")


def path(value: object) -> Path:
    """A path, with ``~`` for the home folder."""
    try:
        return Path(word(os.fspath(value) if isinstance(value, os.PathLike) else value)).expanduser()
    except RuntimeError:
        raise ValueError(
            "there is no home folder of that name; begin with ./~ for a file called so"
        ) from None


def duration(value: object) -> float:
    """``90s``, ``20m``, ``1h30m``, ``2d`` in seconds."""
    text = str(value).strip()
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("a time with its unit is expected, such as 90s, 20m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _number(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError("a number is expected") from None
    if not math.isfinite(number):
        raise ValueError("a finite number is expected")
    return number


def _switch(value: object) -> bool:
    """A word for true or for false, in upper or lower case."""
    word = str(value).lower()
    if word not in ("1", "true", "on", "yes", "0", "false", "off", "no", ""):
        raise ValueError("on or off is expected")
    return word in ("1", "true", "on", "yes")


def _libraries(value: object) -> tuple[Path, ...]:
    paths = tuple(Path(part).expanduser().absolute() for part in str(value).split(os.pathsep) if part)
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"there is no file {missing[0]}")
    return paths


def _backend_option(value: object) -> str:
    text = word(value)
    name, equals, _ = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z0-9_-]+\.[a-z0-9_-]+", name):
        raise ValueError("BACKEND.WORD=VALUE is expected: an option that the backend declares, and its value")
    return text


NUMBER = ValueType(expects="a number", read=_number)
SWITCH = ValueType(expects="on or off", read=_switch)
TEXT = ValueType(expects="text", read=word)
PATH = ValueType(expects="a file", read=path)
TIME = ValueType(expects="a time with its unit", read=duration)
LIBRARIES = ValueType(expects=f"files, separated by '{os.pathsep}'", read=_libraries)
ARGUMENTS = ValueType(
    expects="arguments, as a shell splits them", read=lambda text: tuple(shlex.split(str(text)))
)
BACKEND = ValueType(expects="an installed backend", read=lambda value: one_of(*names("backend")).read(value))
BACKEND_OPTION = ValueType(expects="BACKEND.WORD=VALUE", read=_backend_option)


ENVIRONMENT_PREFIX = "QDQSPEC_"
# Why no file or variable may set an option: they may come with a repository.
NATIVE_CODE = "native code is loaded only where the command line permits it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, of qdqspec or of a backend, as the field ``key`` of a dataclass declares it.

    ``kind`` is ``one`` value, ``many`` (repeatable) or a ``switch``. ``shown`` is the default in words.
    ``command_line`` is why only the command line sets it, empty if files and variables may. ``flag`` is the option of
    qdqspec (without dashes) that sets this one of a backend; ``sets`` is the option of a backend, ``BACKEND.WORD``,
    that this one sets.
    """

    name: str  # with dashes
    key: str
    type: ValueType
    help: str
    shown: str = ""
    metavar: str = ""
    kind: Literal["one", "many", "switch"] = "one"
    command_line: str = ""
    flag: str = ""
    sets: str = ""

    @property
    def in_files(self) -> bool:
        """Whether files and environment variables may set it."""
        return not self.command_line

    @property
    def variable(self) -> str:
        """The environment variable of an option of qdqspec."""
        return ENVIRONMENT_PREFIX + self.key.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """All options that a backend accepts.

    ``refused`` are words that users of the runtime expect but that are not offered, with the reason and the
    remedy.
    """

    backend: str
    options: tuple[Option, ...] = ()
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def read(self, extra: Mapping[str, str]) -> dict[str, Any]:
        """This backend's values in ``extra`` by key. Raises `ConfigError` for an unknown word or an invalid value."""
        found = {}
        for name, text in extra.items():
            backend, _, word = name.partition(".")
            if backend == self.backend:
                found[self.option(word).key] = self.value(word, text)
        return found

    def option(self, word: str) -> Option:
        """The option of that word. Raises `ConfigError` with the nearest one and all of them."""
        known, name = {option.name: option for option in self.options}, f"{self.backend}.{word}"
        if word in known:
            return known[word]
        if word in self.refused:
            why, cure = self.refused[word]
            raise ConfigError(f"{name} cannot be set: {why}", cure=cure)
        near = did_you_mean(name, [f"{self.backend}.{one}" for one in known])
        cure = f"options of {self.backend}: {', '.join(known) or 'none'}"
        raise ConfigError(f"unknown option '{name}'{near}", cure=cure)

    def value(self, word: str, text: str) -> Any:
        """The value of ``text`` for an option. Raises `ConfigError` if it is invalid."""
        option = self.option(word)
        try:
            return option.type.read(text.strip())
        except ValueError as error:
            what = f"'{text}' does not fit {self.backend}.{word}: {error}"
            raise ConfigError(what, cure=option.help) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredOptions(BackendOptions, Generic[OptionsT]):
    """The options of a backend, as the fields of a dataclass declare them."""

    values: Callable[..., OptionsT]

    def of(self, extra: Mapping[str, str]) -> OptionsT:
        """The dataclass of the values in ``extra``. Raises `ConfigError` for an unknown or invalid one."""
        return self.values(**self.read(extra))


def option(
    type_: ValueType,
    text: str,
    default: Any = None,
    *,
    metavar: str = "",
    shown: str | None = None,
    in_files: bool = True,
    command_line: str = "",
    flag: str = "",
) -> Any:
    """A field of a dataclass of options that declares one; it is repeatable if the default is a tuple.

    ``shown`` is the default in words, if its value is none. ``in_files=False`` is short for native code.
    """
    is_many = isinstance(default, tuple)
    if shown is None:
        shown = "" if default is None or is_many else str(default)
        shown = {"True": "on", "False": "off"}.get(shown, shown)
    return field(
        default=default,
        metadata={
            "type": type_,
            "help": text,
            "shown": shown,
            "metavar": metavar,
            "kind": "many" if is_many else "switch" if type_ is SWITCH else "one",
            "command_line": command_line or ("" if in_files else NATIVE_CODE),
            "flag": flag,
        },
    )


def plugin_libraries(text: str = "Plugin libraries.") -> Any:
    """The field ``plugins`` of options: libraries with operators that a backend loads, by the command line only."""
    return option(LIBRARIES, text, (), shown="", in_files=False, flag="plugin")


def declare(
    backend: str,
    options: type[OptionsT],
    refused: Mapping[str, tuple[str, str]] | None = None,
    *,
    separator: str = "-",
) -> DeclaredOptions[OptionsT]:
    """The options that the fields of a dataclass declare: ``_`` in a name is the ``separator`` in the word."""
    declared = tuple(
        Option(name=each.name.rstrip("_").replace("_", separator), key=each.name, **each.metadata)
        for each in fields(options)  # type: ignore[arg-type]  # a dataclass, which has no type of its own
    )
    return DeclaredOptions(backend=backend, options=declared, refused=refused or {}, values=options)


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
            what = f"{name} is accepted from the command line only: native code loads or reads what it names"
            raise ConfigError(what, cure=f"give {flag} {place}")
        declared.value(word, value)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.what}", where=error.where, cure=error.cure) from None
