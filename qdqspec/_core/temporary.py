"""Temporary folders that are removed even after a killed run.

All folders of a user are in one folder, each beside a lock file that its process holds. The system releases
the lock when the process ends, in any way; the next run that needs a folder removes those that are not
locked. No clock is used.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from qdqspec._core.files import SHARED, explained

_RUNS = "runs"


class TemporaryFolder:
    """A folder of this process, removed when closed or collected, or by the next run. Raises `OutputError`."""

    def __init__(self) -> None:
        home = shared_folder(_RUNS)
        with explained("the temporary folder", home, _CURE):
            for found in home.glob("*.lock"):  # of runs that were killed
                abandoned = FileLock(found, thread_local=False)
                with suppress(Timeout, OSError):
                    abandoned.acquire(timeout=0)
                    _remove(found.with_suffix(""), abandoned)
            self.path, lock = _made(home)
        self._close = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove the folder with its content. May be called twice."""
        self._close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shared_folder(name: str) -> Path:
    """A folder that all processes of this user share, such as one for locks. Raises `OutputError`."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    own = Path(tempfile.gettempdir()) / f"{SHARED}{user}"
    with explained("the temporary folder", own, _CURE):
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Names here are predictable, and others may write to the parent.
        if hasattr(os, "getuid") and own.lstat().st_uid != os.getuid():
            raise PermissionError("its folder belongs to another user")
        (own / name).mkdir(exist_ok=True)
    return own / name


_CURE = "set TMPDIR to another folder"


def _made(home: Path) -> tuple[Path, FileLock]:
    """A new folder, locked before it is created, so that no process finds it abandoned."""
    while True:
        path = home / secrets.token_hex(6)
        lock = FileLock(path.with_suffix(".lock"), thread_local=False)
        lock.acquire()
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            lock.release()
        except BaseException:
            _remove(path, lock)
            raise
        else:
            return path, lock


def _remove(path: Path, lock: FileLock) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # while the lock is held, so that it cannot be a new folder's
        Path(lock.lock_file).unlink()
    lock.release()
