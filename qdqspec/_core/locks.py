"""Locks between runs: one run per folder, one timed section per user and device. Later ones wait, and report it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from qdqspec._core.files import OTHER_FOLDER, remove_partial, shared_folder, unwritable
from qdqspec.errors import OutputError, StateError

_PATIENCE = 0.5  # seconds of waiting for a device that are not reported
_OWNER = re.compile(r"process \d+, since [\d :-]+")  # the note of a lock, in local time

_REPORTED: set[Path] = set()  # locks for which this process has reported a wait: once is enough
_OWN_FOLDERS: set[Path] = set()  # held by this process


def log_wait(text: str) -> None:
    """Log a wait, if no progress display shows it."""
    logging.getLogger("qdqspec").warning("%s", text)


class _Lock:
    """A lock, with a note beside it that states its owner. With ``reentrant`` a thread does not wait for itself."""

    def __init__(self, path: Path, report: Callable[[str], None], *, reentrant: bool = False) -> None:
        self.path = path
        self._note = path.with_name(f"{path.name}.owner")  # Windows cannot read a locked file
        self._lock = FileLock(path, thread_local=reentrant, is_singleton=reentrant)
        self._report = report

    def acquire(self, what: str, patience: float) -> float:
        """Wait for the lock, and after ``patience`` seconds report the wait for ``what``; returns the seconds spent."""
        started = time.monotonic()
        try:
            self._lock.acquire(timeout=patience)
        except Timeout:
            if self.path not in _REPORTED:
                _REPORTED.add(self.path)
                owner = ""
                with contextlib.suppress(OSError, ValueError):
                    owner = self._note.read_text(encoding="utf-8")
                self._report(f"waits for {what} ({owner if _OWNER.fullmatch(owner) else 'another process'})")
            self._lock.acquire()
        if self._lock.lock_counter == 1:
            own = f"process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
            with contextlib.suppress(OSError):  # a full disk is reported by the next write
                self._note.write_text(own, encoding="utf-8")
        return time.monotonic() - started

    def release(self) -> None:
        """Release the lock."""
        if self._lock.lock_counter == 1:
            with contextlib.suppress(OSError):
                self._note.unlink()
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.release()


class RunLock(_Lock):
    """Locks a results folder for this run. Another process waits, and reports that at once.

    Raises `StateError` if this process holds it already, since it would wait for itself.
    """

    def __init__(self, folder: Path, report: Callable[[str], None] = log_wait) -> None:
        super().__init__(folder / ".lock", report)

    def __enter__(self) -> Self:
        folder = self.path.parent
        if folder.absolute() in _OWN_FOLDERS:
            what = f"another run is writing here (process {os.getpid()}, which is this one)"
            cure = f"wait for it to end, or {OTHER_FOLDER}"
            raise StateError(what, where=folder, cure=cure)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.acquire(f"the run that writes to {folder}", patience=0)
            for each in (folder, *(path for path in folder.iterdir() if path.is_dir())):
                remove_partial(each)
        except OSError as error:
            self.release()
            raise unwritable("the folder", folder, error, OTHER_FOLDER) from None
        _OWN_FOLDERS.add(folder.absolute())
        return self

    def __exit__(self, *_: object) -> None:
        _OWN_FOLDERS.discard(self.path.parent.absolute())
        self.release()


class DeviceLock(_Lock):
    """Allows timing on a device to one process of this user at a time; the others wait, and report that.

    Its file is in the user's own temporary folder, so that users of one machine do not share it. ``waited`` is called
    with the seconds of each wait.
    """

    def __init__(
        self,
        device_key: str,
        *,
        folder: Path | None = None,
        report: Callable[[str], None] = log_wait,
        waited: Callable[[float], None] = lambda seconds: None,  # noqa: ARG005 - ignored by default
    ) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", device_key)[:100]
        super().__init__((folder or shared_folder("locks")) / f"{name}.lock", report, reentrant=True)
        self._key, self._waited = device_key, waited

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._waited(self.acquire(f"a measurement of another run on {self._key}", patience=_PATIENCE))
        except OSError as error:
            self.release()
            what = f"the lock that keeps measurements apart cannot be taken: {error.strerror or error}"
            cure = "make its folder writable, or set TMPDIR to another folder"
            raise OutputError(what, where=self.path, cure=cure) from None
        return self
