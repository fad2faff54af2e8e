"""Types of option values: what each expects, and how it is read from text or from a value of a TOML file."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqspec.registry import did_you_mean, names

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """A type of values: ``expects`` in words, and ``read``, which raises ``ValueError`` stating what is valid."""

    expects: str
    read: Callable[[object], Any]


def one_of(*known: str) -> ValueType:
    """One of these words."""
    expects = f"one of {', '.join(known)}"

    def read(value: object) -> str:
        if value not in known:
            raise ValueError(f"{expects} is expected{did_you_mean(str(value), known)}")
        return str(value)

    return ValueType(expects=expects, read=read)


def whole(least: int, most: int | None = None, why: str = "") -> ValueType:
    """A whole number within bounds; ``why`` is added to the description of the type."""
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
        return Path(word(value)).expanduser()
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
    on, off = ("1", "true", "on", "yes"), ("0", "false", "off", "no")
    if str(value).lower() not in (*on, *off):
        raise ValueError("on or off is expected")
    return str(value).lower() in on


def _truth(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
    if str(value).lower() not in words:
        raise ValueError("true or false is expected")
    return words[str(value).lower()]


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
TRUTH = ValueType(expects="true or false", read=_truth)
TEXT = ValueType(expects="text", read=word)
PATH = ValueType(expects="a file", read=path)
TIME = ValueType(expects="a time with its unit", read=duration)
LIBRARIES = ValueType(expects=f"files, separated by '{os.pathsep}'", read=_libraries)
ARGUMENTS = ValueType(
    expects="arguments, as a shell splits them", read=lambda text: tuple(shlex.split(str(text)))
)
BACKEND = ValueType(expects="an installed backend", read=lambda value: one_of(*names("backend")).read(value))
BACKEND_OPTION = ValueType(expects="BACKEND.WORD=VALUE", read=_backend_option)
