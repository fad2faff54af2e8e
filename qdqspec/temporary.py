"""Temporary folders that a killed run does not leave behind for good.

All of a user's stand in one folder, each beside a lock that its process holds. The system ends the lock with the
process, however that dies; the next run that needs a folder removes those whose lock nobody holds. No clock is asked.
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

from qdqspec.files import SHARED, explained

_RUNS = "runs"


class TemporaryFolder:
    """A folder of this process, gone when closed, when forgotten, or at the latest with the next run.

    Raises `OutputError` where it cannot be made.
    """

    def __init__(self) -> None:
        home = shared_folder(_RUNS)
        with explained("the temporary folder", home, _CURE):
            _remove_abandoned(home)
            self.path, lock = _made(home)
        self._close = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove it with all that is in it. Closing twice does no harm."""
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
        _check_owner(own)
        (own / name).mkdir(exist_ok=True)
    return own / name


_CURE = "set TMPDIR to another folder"


def _check_owner(folder: Path) -> None:
    """Names here are predictable and others may write to the parent: do not use a folder they planted."""
    if hasattr(os, "getuid") and folder.lstat().st_uid != os.getuid():
        raise PermissionError("its folder belongs to another user")


def _made(home: Path) -> tuple[Path, FileLock]:
    """A new folder, locked before it is there, so that nobody ever finds it abandoned."""
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
    with suppress(OSError):  # while it is still held, so that nobody takes it for another folder's
        Path(lock.lock_file).unlink()
    lock.release()


def _remove_abandoned(home: Path) -> None:
    for found in home.glob("*.lock"):
        lock = FileLock(found, thread_local=False)
        with suppress(Timeout, OSError):
            lock.acquire(timeout=0)
            _remove(found.with_suffix(""), lock)
