"""Files that are whole or not there, and what killed runs left of them.

A file is written under another name beside its place and then renamed, so that nobody, and no run after a kill,
ever reads half of it. What a kill leaves is hidden, called ``.qdqspec-*.part``, and removed by whoever writes there
next.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qdqspec.errors import OutputError

SHARED = "qdqspec-"  # begins the name of a user's folder for temporary ones
RESULT = "result.json"  # of a case; written last: where it stands, what lies beside it belongs together

_PREFIX, _SUFFIX = ".qdqspec-", ".part"
_ABANDONED = 2 * 86400.0  # seconds: nobody takes as long to write a file, and clocks are set by less
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_whole(
    path: Path, content: bytes | str, *, what: str = "the file", make_folder: bool = False
) -> None:
    """Replace a file in one step, on disk before this returns. Text becomes UTF-8.

    ``make_folder`` makes missing folders. Raises `OutputError`, which calls the file ``what``, where it cannot be
    written; what stood there before is whole then.
    """
    path = Path(path)
    with explained(what, path):
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def replace_file(path: Path, content: bytes | str) -> None:
    """As `write_whole`, for callers that have an answer of their own to what the system says. Raises ``OSError``."""
    with partial_folder(path.parent) as folder:
        _written(folder / "whole", content).replace(path)


def create_file(path: Path, content: bytes | str) -> None:
    """As `replace_file`, but raise ``FileExistsError`` where there is something already."""
    with partial_folder(path.parent) as folder:
        beside = _written(folder / "whole", content)
        try:
            os.link(beside, path)  # unlike a rename, it never replaces
        except FileExistsError:
            raise
        except OSError:  # a disk without links
            with path.open("xb"):
                beside.replace(path)


def _written(path: Path, content: bytes | str) -> Path:
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    return path


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file of any size so that the target is whole or as it was. Raises ``OSError``."""
    with partial_folder(target.parent) as folder:
        shutil.copyfile(source, folder / "whole").replace(target)


@contextmanager
def partial_folder(parent: Path) -> Iterator[Path]:
    """A hidden folder on the disk of ``parent``, to write in and to move from; gone afterwards.

    A kill leaves it behind; those of earlier runs are removed on the way. Raises ``OSError``.
    """
    remove_partial(parent)
    name = f"{_PREFIX}{_machine()}-{os.getpid()}-"
    folder = Path(tempfile.mkdtemp(prefix=name, suffix=_SUFFIX, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove what killed runs left half-written in a folder.

    That is what carries the name of a process of this machine that is gone, whatever the clock says; where the
    process may be another machine's, it is what is two days old.
    """
    with suppress(OSError):
        for left in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            alive = _is_alive(left.name)
            if alive is False or (alive is None and time.time() - left.stat().st_mtime > _ABANDONED):
                shutil.rmtree(left, ignore_errors=True)


def _machine() -> str:
    """Eight letters for this machine: on a disk that several share, a process may live on another one."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _is_alive(name: str) -> bool | None:
    """Whether the process that a name tells of still runs; ``None`` where that cannot be asked."""
    machine, _, rest = name.removeprefix(_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    if os.name != "posix" or machine != _machine() or not pid.isdecimal():
        return None  # elsewhere there is no question to a process without an answer
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return None
    except OSError:  # it is another user's
        return True
    return True


@contextmanager
def explained(what: str, path: Path, cure: str = "choose another folder") -> Iterator[None]:
    """Turn what the system says when ``what`` cannot be written to ``path`` into an `OutputError`."""
    try:
        yield
    except OSError as error:
        raise unwritable(what, path, error, cure) from None


def unwritable(what: str, path: Path, error: OSError, cure: str = "choose another folder") -> OutputError:
    """The error of a file that cannot be written. On a full disk the cure begins with making room."""
    reason = error.strerror or str(error) or type(error).__name__
    if is_temporary(path):
        cure = "set TMPDIR to another folder"
    if is_full(error):
        cure = f"free some space or {cure}"
    return OutputError(f"{what} cannot be written: {reason}", where=path, cure=cure)


def is_temporary(path: Path) -> bool:
    """Whether a path lies in the folder that all temporary ones of a user share."""
    return any(path.is_relative_to(home) for home in Path(tempfile.gettempdir()).glob(f"{SHARED}*"))


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, a quota or a limit on files is used up."""
    return isinstance(error, OSError) and error.errno in _FULL
