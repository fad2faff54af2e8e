"""Keeps runs apart: one run in a folder, one timed section of a user on a device. Those that come later wait.

Both locks end with their process, however it dies. While one waits, it reports the process that it waits for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from qdqspec.errors import OutputError, StateError
from qdqspec.files import remove_partial, unwritable
from qdqspec.temporary import shared_folder

_POLL = 0.5  # seconds
_SINCE = "%Y-%m-%d %H:%M:%S"  # local time
_REPEAT = 60.0  # seconds until the same wait is reported again
_RUN = (
    "PYTEST_XDIST_TESTRUNUID"  # equal in the workers of one test run, which wait for each other all the time
)

_REPORTED: dict[Path, float] = {}  # when a wait for a lock was last reported
_OWN_FOLDERS: set[Path] = set()  # that this process holds


def log_wait(text: str) -> None:
    """Report a wait where nothing else shows it."""
    logging.getLogger("qdqspec").warning("%s", text)


class _Waiting:
    """A lock with a note beside it that states which process holds it, and since when."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self.path = path
        self._note = path.with_name(f"{path.name}.owner")  # Windows cannot read a locked file
        self._lock = FileLock(path, thread_local=False)
        self._report = report

    def acquire(self, what: str, patience: float) -> None:
        """Wait for the lock; after ``patience`` seconds report for ``what``, and which process has it."""
        seconds = patience
        while True:
            try:
                self._lock.acquire(timeout=seconds)
                break
            except Timeout:
                seconds = _POLL
                self._tell(what)
        if self._lock.lock_counter == 1:
            since = datetime.now(UTC).astimezone()
            own = {"pid": os.getpid(), "since": f"{since:{_SINCE}}", "run": os.environ.get(_RUN, "")}
            with contextlib.suppress(OSError):  # a full disk is reported by what is written next
                self._note.write_text(json.dumps(own), encoding="utf-8")

    def release(self) -> None:
        """Give the lock to the next one."""
        if self._lock.lock_counter == 1:
            with contextlib.suppress(OSError):
                self._note.unlink()
        self._lock.release()

    @property
    def holder(self) -> str:
        """``process 4242, since 2026-11-22 10:02:11``, as far as its note states it."""
        note = self._read()
        try:
            pid, since = int(note["pid"]), datetime.fromisoformat(note["since"])
        except (ValueError, KeyError, TypeError):
            return "another process"
        return f"process {pid}, since {since:{_SINCE}}"

    def _tell(self, what: str) -> None:
        now, own = time.monotonic(), os.environ.get(_RUN)
        if (own and self._read().get("run") == own) or now - _REPORTED.get(self.path, -_REPEAT) < _REPEAT:
            return
        _REPORTED[self.path] = now
        self._report(f"waits for {what} ({self.holder})")

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            note = json.loads(self._note.read_text(encoding="utf-8"))
            return note if isinstance(note, dict) else {}
        return {}


class RunLock:
    """Holds a results folder for this run. Another process that wants it waits, and reports for what at once.

    Raises `StateError` where this very process holds it already: it would wait for itself.
    """

    def __init__(self, folder: Path, report: Callable[[str], None] = log_wait) -> None:
        self._folder = folder
        self._lock = _Waiting(folder / ".lock", report)

    def __enter__(self) -> Self:
        own = self._folder.absolute()
        if own in _OWN_FOLDERS:
            raise StateError(
                f"another run is writing here (process {os.getpid()}, which is this one)",
                where=self._folder,
                cure="wait for it to end, or choose another output folder",
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(f"the run that writes to {self._folder}", patience=0)
            for folder in (self._folder, *(path for path in self._folder.iterdir() if path.is_dir())):
                remove_partial(folder)
        except OSError as error:
            self._lock.release()
            raise unwritable("the folder", self._folder, error, "choose another output folder") from None
        _OWN_FOLDERS.add(own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _OWN_FOLDERS.discard(self._folder.absolute())
        self._lock.release()


class DeviceLock:
    """Lets one process of this user at a time be timed on a device; the others wait, and report for what.

    Runs that share a processor would measure each other. Entering it again inside itself is free. The lock lies in
    the user's own temporary folder, so that users of one machine never meet a file of another one.
    """

    def __init__(
        self, device_key: str, *, folder: Path | None = None, report: Callable[[str], None] = log_wait
    ) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", device_key)[:100]
        self._key = device_key
        self._lock = _Waiting((folder or shared_folder("locks")) / f"{name}.lock", report)

    def __enter__(self) -> Self:
        path = self._lock.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(f"a measurement of another run on {self._key}", patience=_POLL)
        except OSError as error:
            self._lock.release()
            raise OutputError(
                f"the lock that keeps measurements apart cannot be taken: {error.strerror or error}",
                where=path,
                cure="make its folder writable, or set TMPDIR to another folder",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
