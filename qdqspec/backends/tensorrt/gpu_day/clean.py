"""Removes what identifies a person or a machine from the texts of an archive: names, folders, serial numbers."""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from qdqspec.units import without_passwords

_SHORTEST = 3  # letters of a name that is replaced: a shorter one is part of too many words
_NAMES = frozenset(
    {"root", "user", "localhost", "nobody", "runner", "docker"}
)  # of no person, and words in logs
_HOMES = re.compile(r"(/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\\s\"':,;]+")
_UUID = re.compile(r"\b((?:GPU|MIG)-)[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_IDENTIFIED = re.compile(
    r"^(\s*(?:Serial Number|Board ID|Chassis Serial Number|Module ID|GPU GUID)\s*:).*$", re.MULTILINE
)
_PROCESSES = re.compile(
    r"^(\s*)Processes\b.*(?:\n(?:\1\s+.*)?$)*", re.MULTILINE
)  # of nvidia-smi -q, with their paths


def hidden_words(given: Iterable[Path] = ()) -> dict[str, str]:
    """Folders and names of this machine, with their replacements; longer ones first. ``given`` are further folders."""
    found: dict[str, str] = {}

    def hide(path: str | Path, name: str) -> None:
        for text in {str(path), str(Path(path).resolve())}:
            if len(Path(text).parts) > 1:  # not the root
                found.setdefault(text, name)

    for parent in given:
        hide(parent, "<given>")
    hide(tempfile.gettempdir(), "<tmp>")
    for folder in (*sys.path, sys.prefix, sys.base_prefix):
        if folder:
            hide(folder, "<python>")
    hide(Path.cwd(), "<here>")
    with suppress(RuntimeError):  # there is none
        hide(Path.home(), "<home>")
    names = {platform.node(): "<host>", platform.node().partition(".")[0]: "<host>"}
    with suppress(OSError, KeyError, ImportError):
        names[getpass.getuser()] = "<user>"
    names |= {os.environ[key]: "<user>" for key in ("USER", "LOGNAME", "SUDO_USER") if os.environ.get(key)}
    found |= {
        name: text for name, text in names.items() if len(name) >= _SHORTEST and name.lower() not in _NAMES
    }
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def cleaned(text: str, hidden: Mapping[str, str]) -> str:
    """The text without ``hidden`` words, home folders, identifiers of GPUs, processes and passwords."""
    for word, replacement in hidden.items():
        if "/" in word or "\\" in word:
            text = text.replace(word, replacement)
        else:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", replacement, text)
    text = _HOMES.sub(r"\1/<user>", text)
    text = _UUID.sub(r"\g<1>00000000-0000-0000-0000-000000000000", text)
    text = _IDENTIFIED.sub(r"\1 <removed>", _PROCESSES.sub(r"\1Processes: <removed>", text))
    return "\n".join(without_passwords(line) if "://" in line else line for line in text.split("\n"))
