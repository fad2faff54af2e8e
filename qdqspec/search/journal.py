"""The journal of a search: every trial on a line of its own, on disk before the next one starts.

The description of the run (model, spec, backend, device, seed, versions) is in ``trials.header.json`` beside
``trials.jsonl``. Each line carries that header's digest as ``run``, and ends with a checksum of itself as ``sum``. A
line truncated by a kill is cut and noted, any other damage is a `StateError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from qdqspec._core.files import OTHER_FOLDER, Closing, unwritable, write_whole
from qdqspec._core.node_digests import changes_text
from qdqspec._core.records import content_sum, from_data, to_data
from qdqspec.errors import OutputError, StateError
from qdqspec.types import Trial, kind_of


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """The fields of a trial, its number as ``trial``; ``placement`` is the digest, ``scheme`` the placement in full."""
    data: dict[str, Any] = to_data(trial)
    own = {"placement": trial.placement.digest, "scheme": data["placement"]}
    return {"trial": data.pop("number"), **data, **own}


def trial_from_json(data: Mapping[str, Any]) -> Trial:
    """The inverse of `trial_to_json`. Raises ``ValueError`` if the object is not a trial."""
    try:
        digest, fields = data["placement"], {"number": data["trial"], "placement": data["scheme"]}
        trial = from_data(Trial, {**data, **fields})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a trial: {error!r}") from None
    if trial.placement.digest != digest:
        raise ValueError(f"the scheme has digest {trial.placement.digest}, not {digest}")
    for _, label in trial.placement.labels:
        kind_of(label)
    return trial


SCHEMA_VERSION = 4
MOST_BYTES = 1 << 30  # a build takes a few hundred kilobytes at most
_OTHER = "name the trials.jsonl of a tuning run, with trials.header.json beside it"
_NODES = "model_nodes"  # digests, from which a message names what changed
_AWAY = f"move the journal away, or {OTHER_FOLDER}, to start anew"


class Journal(Closing):
    """An open journal. ``notes`` are messages for the user about its state when it was opened."""

    def __init__(self, path: Path, run: str, trials: list[Trial], notes: tuple[str, ...]) -> None:
        self.path = path
        self.notes = notes
        self._run = run
        self._trials = trials
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._file = os.open(path, flags, 0o666)

    @classmethod
    def open(cls, path: Path, header: Mapping[str, object]) -> Self:
        """Open or create the journal of the run that ``header`` describes.

        Raises `StateError` if the header differs or a line is damaged, `OutputError` if the file cannot be written.
        """
        full = _full(header)
        run = _digest(full)
        try:
            raw = path.read_bytes() if path.exists() else b""
            if raw:
                _check_header(path, full)
            trials, size, damage = _sound_lines(path, raw, run)
            if damage is not None:
                raise damage
            text = json.dumps(full, indent=2, sort_keys=True) + "\n"
            write_whole(_header_path(path), text, what="the journal", make_folder=True)
            if torn := len(raw) - size:
                os.truncate(path, size)
            note = (
                f"{path}: the last {torn} bytes were half a line, from a run that was killed; they were cut"
            )
            return cls(path, run, trials, (note,) if torn else ())
        except OSError as error:
            raise _unwritable(path, error) from None

    @classmethod
    def recover(cls, source: Path, target: Path, header: Mapping[str, object]) -> int:
        """Copy the lines of this run before any damage in ``source`` to ``target``; returns their number."""
        raw = source.read_bytes()
        trials, size, _ = _sound_lines(source, raw, _digest(_full(header)))
        write_whole(target, raw[:size], what="the journal")
        return len(trials)

    def append(self, trial: Trial, **more: object) -> None:
        """Write one trial, with ``more`` keys in its line, and wait until it is on disk.

        Raises `OutputError` if it cannot be written; the earlier lines are intact then.
        """
        entry = {**trial_to_json(trial), **more, "run": self._run}
        line = json.dumps({**entry, "sum": content_sum(entry)}, separators=(",", ":"))
        self._write(f"{line}\n".encode())
        self._trials.append(trial)

    def trials(self) -> tuple[Trial, ...]:
        """All trials, oldest first."""
        return tuple(self._trials)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: bytes) -> None:
        if self._file < 0:
            raise StateError("the journal is closed", where=self.path, cure="open it again")
        size = os.fstat(self._file).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # a full disk may have stored half a line: truncate it
                os.ftruncate(self._file, size)
            raise _unwritable(self.path, error) from None


def read_journal(path: Path) -> tuple[dict[str, Any], tuple[Trial, ...]]:
    """Header and trials of a journal, oldest first; nothing is written, and a truncated last line is ignored.

    Raises `StateError` if it or its header is missing, or it is damaged.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise StateError(f"a journal has at most {MOST_BYTES >> 20} MiB", where=path, cure=_OTHER)
        raw, header = path.read_bytes(), _header(path)
    except OSError as error:
        what = f"the journal {path.name} cannot be read: {error.strerror or error}"
        raise StateError(what, where=error.filename or path, cure=_OTHER) from None
    if header is None:
        what = f"the header of the journal {path.name} is damaged"
        raise StateError(what, where=_header_path(path), cure=_OTHER)
    trials, _, damage = _sound_lines(path, raw, _digest(header))
    if damage is not None:
        raise damage
    return header, tuple(trials)


def _header(path: Path) -> dict[str, Any] | None:
    """The header on disk, ``None`` if it is damaged. Raises ``OSError``."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(_header_path(path).read_bytes())
        return found if isinstance(found, dict) else None
    return None


def _header_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.header.json")


def _full(header: Mapping[str, object]) -> dict[str, Any]:
    """The header as it is written, with the version of its format."""
    full: dict[str, Any] = json.loads(json.dumps({"schema_version": SCHEMA_VERSION, **header}))
    return full


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


def _check_header(path: Path, header: Mapping[str, Any]) -> None:
    """Compare with the header on disk. A missing or damaged one is rewritten if the lines are of this run."""
    found = _header(path) if _header_path(path).exists() else None
    if found is None or found == header:
        return
    differences = [
        f"{key} was {_short(found.get(key))} and is {_short(header.get(key))}"
        for key in sorted({*found, *header} - {_NODES})
        if found.get(key) != header.get(key)
    ]
    if found.get(_NODES) != header.get(_NODES):
        what = changes_text(str(found.get(_NODES)), str(header.get(_NODES)))
        differences.append(what or f"{_NODES} is missing in one of them")
    raise StateError(f"this journal belongs to another run: {'; '.join(differences)}", where=path, cure=_AWAY)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _sound_lines(path: Path, raw: bytes, run: str) -> tuple[list[Trial], int, StateError | None]:
    """The trials of the whole lines before any damage, the bytes of these lines, and the error of a damaged one."""
    trials, size = list[Trial](), 0
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            trials.append(_trial(path, number, line, run))
        except StateError as error:
            return trials, size, error
        size += len(line) + 1
    return trials, size, None


def _trial(path: Path, number: int, line: bytes, run: str) -> Trial:
    """The trial of a line."""
    where = f"{path}:{number}"
    try:
        entry: dict[str, Any] = json.loads(line)
        trial = trial_from_json(entry)
        if entry.pop("sum", None) != content_sum(entry):
            raise ValueError("its sum does not fit")
    except (ValueError, RecursionError) as error:
        what = f"this line of the journal is damaged ({str(error).splitlines()[0][:120]})"
        cure = f"delete the line to resume from the others, or {_AWAY}"
        raise StateError(what, where=where, cure=cure) from None
    if entry.get("run") != run:
        raise StateError("this line was written by another run", where=where, cure=_AWAY)
    return trial


def _unwritable(path: Path, error: OSError) -> OutputError:
    return unwritable("the journal", path, error, f"{OTHER_FOLDER}; the trials before it are kept")
