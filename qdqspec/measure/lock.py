"""Keeps runs out of each other's way: one run in a folder, one timed section on a device.

May import floor 0 and filelock. Both locks end with their process, however it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from qdqspec.errors import OutputError, StateError
from qdqspec.files import remove_partial, unwritable
from qdqspec.temporary import shared_folder


class RunLock:
    """Holds a results folder for this run; raises `StateError` when another run has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = folder / ".lock.owner"  # beside the lock: Windows lets nobody read a locked file
        self._lock = FileLock(folder / ".lock", thread_local=False)

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            for folder in (self._folder, *(path for path in self._folder.iterdir() if path.is_dir())):
                remove_partial(folder)
            self._owner.write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
        except Timeout:
            raise StateError(
                f"another run is writing here{self._by_whom()}",
                where=self._folder,
                cure="wait for it to end, or choose another output folder",
            ) from None
        except OSError as error:
            self._lock.release()
            raise unwritable("the folder", self._folder, error, "choose another output folder") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._owner.unlink()
        self._lock.release()

    def _by_whom(self) -> str:
        try:
            return f" (process {int(json.loads(self._owner.read_text(encoding='utf-8'))['pid'])})"
        except (OSError, ValueError, KeyError, TypeError):
            return ""


class DeviceLock:
    """Lets one process of this user at a time be timed on a device; the others wait.

    Test workers that run side by side share the processor, and would measure each other. Entering it
    again inside itself is free.
    """

    def __init__(self, device_key: str, *, folder: Path | None = None) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", device_key)[:100]
        self._path = (folder or shared_folder("locks")) / f"{name}.lock"
        self._lock = FileLock(self._path, thread_local=False)

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except OSError as error:
            raise OutputError(
                f"the lock that keeps measurements apart cannot be taken: {error.strerror or error}",
                where=self._path,
                cure="make its folder writable",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
