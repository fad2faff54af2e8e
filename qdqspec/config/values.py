"""Parsers of option values: each returns the value, or raises ``ValueError`` stating what is valid."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from qdqspec.registry import did_you_mean, names

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def word(value: object) -> str:
    """Any text that is not empty."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise ValueError("a word is expected")


def one_of(known: Iterable[str]) -> Callable[[object], str]:
    """One of these words."""
    words = tuple(known)

    def parse(value: object) -> str:
        if value in words:
            return str(value)
        raise ValueError(f"one of {', '.join(words)} is expected{did_you_mean(str(value), words)}")

    return parse


def backend(value: object) -> str:
    """The name of an installed backend."""
    return one_of(names("backend"))(value)


def whole(least: int) -> Callable[[object], int]:
    """A whole number of at least ``least``."""

    def parse(value: object) -> int:
        text = str(value)
        if isinstance(value, bool) or not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII) or int(text) < least:
            raise ValueError(f"a whole number of at least {least} is expected")
        return int(text)

    return parse


def duration(value: object) -> float:
    """``90s``, ``20m``, ``1h30m``, ``2d`` in seconds."""
    text = str(value).strip()
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("a time with its unit is expected, such as 90s, 20m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def switch(value: object) -> bool:
    """True or false, in the words that files and variables use."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
    if str(value).lower() not in words:
        raise ValueError("true or false is expected")
    return words[str(value).lower()]


def path(value: object) -> Path:
    """A path, with ``~`` for the home folder."""
    try:
        return Path(word(value)).expanduser()
    except RuntimeError:
        raise ValueError(
            "there is no home folder of that name; begin with ./~ for a file called so"
        ) from None


def backend_option(value: object) -> str:
    """``BACKEND.WORD=VALUE``; `qdqspec.config.declared` checks it against the backend's declaration."""
    text = word(value)
    name, equals, _ = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z0-9_-]+\.[a-z0-9_-]+", name):
        raise ValueError("BACKEND.WORD=VALUE is expected: an option that the backend declares, and its value")
    return text
