"""Files that are written completely or not at all, and temporary folders that are removed even after a killed run.

A file is written under a temporary name in the same folder and then renamed, so that no process, and no run
after a kill, reads an incomplete file. A kill leaves a hidden folder ``.qdqspec-*.part``, named after its process,
which the next writer in that folder removes. The temporary folders of a user are such folders in a shared one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from qdqspec.errors import OutputError

RESULT = "result.json"  # of a case; written last: if it exists, the files beside it are complete

_PREFIX, _SUFFIX = ".qdqspec-", ".part"
OTHER_FOLDER = "choose another output folder: --qdq-output DIR of pytest, -o DIR of a verb"  # a cure
_SHARED = "qdqspec-"  # prefix of a user's folder for temporary files
_CURE = "set TMPDIR to another folder"


def write_whole(
    path: Path, content: bytes | str, *, what: str = "the file", make_folder: bool = False
) -> None:
    """Replace a file in one step, on disk before this returns. Text is encoded as UTF-8.

    ``make_folder`` creates missing folders. Raises `OutputError`, which calls the file ``what``, if it cannot
    be written; the previous content is intact then.
    """
    path = Path(path)
    with explained(what, path):
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def write_text(path: Path, text: str) -> None:
    """Write a text file that a user named, atomically. Raises `OutputError` if it cannot be written."""
    path = Path(path).absolute()
    require_space(path)
    write_whole(path, text)


def refuse_overwriting(path: Path, inputs: Sequence[Path]) -> None:
    """Raise `OutputError` if ``path`` is one of ``inputs``, by any name or link."""
    for given in inputs:
        same = path.resolve() == given.resolve()
        if same or (path.exists() and given.exists() and path.samefile(given)):
            raise OutputError(
                f"the output would overwrite the input {given}",
                where=path,
                cure="choose another name with -o",
            )


def require_space(path: Path) -> None:
    """Raise `OutputError` if a path that a user named is no place for a file."""
    if not path.parent.is_dir():
        raise OutputError("there is no such folder to write to", where=path.parent, cure="make it first")
    if path.is_dir():
        raise OutputError("this is a folder, not a file to write", where=path, cure="name a file in it")


def replace_file(path: Path, content: bytes | str) -> None:
    """Replace a file as `write_whole` does, but raise ``OSError``."""
    with PartialFolder(path.parent) as folder:
        _written(folder / "whole", content).replace(path)


def create_file(path: Path, content: bytes | str) -> None:
    """Create a file as `replace_file` does. Raises ``FileExistsError`` if it exists."""
    with PartialFolder(path.parent) as folder:
        beside = _written(folder / "whole", content)
        try:
            os.link(beside, path)  # unlike a rename, a link never replaces
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            with path.open("xb"):
                beside.replace(path)


def _written(path: Path, content: bytes | str) -> Path:
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    return path


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file of any size so that the target is either complete or unchanged. Raises ``OSError``."""
    with PartialFolder(target.parent) as folder:
        shutil.copyfile(source, folder / "whole").replace(target)


class PartialFolder:
    """A hidden folder in ``parent``, removed when closed or collected, as those of killed runs are before.

    Raises ``OSError``.
    """

    def __init__(self, parent: Path) -> None:
        remove_partial(parent)
        name = f"{_PREFIX}{_machine()}-{os.getpid()}-"
        self.path = Path(tempfile.mkdtemp(prefix=name, suffix=_SUFFIX, dir=parent))
        self.close = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


class TemporaryFolder(PartialFolder):
    """A folder of this process among a user's temporary files. Raises `OutputError`."""

    def __init__(self) -> None:
        home = shared_folder("runs")
        with explained("the temporary folder", home, _CURE):
            super().__init__(home)


def remove_partial(folder: Path) -> None:
    """Remove incomplete files that killed runs left in a folder.

    These are files named after a process of this machine that has ended, whatever their age; if the process
    may be another machine's, files older than two days, which exceeds the time of any write and the error of clocks.
    """
    with suppress(OSError):
        for left in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            runs = _process_runs(left.name)
            if runs is False or (runs is None and time.time() - left.stat().st_mtime > 2 * 86400):
                shutil.rmtree(left, ignore_errors=True)


def _machine() -> str:
    """Eight characters for this machine and container: on a shared disk, a process may be another one's."""
    numbering = ""
    with suppress(OSError):  # of processes, where a system has several
        numbering = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{platform.node()}{numbering}".encode()).hexdigest()[:8]


def _process_runs(name: str) -> bool | None:
    """Whether the process in a file name still runs; ``None`` if that is unknown."""
    machine, pid, *_ = f"{name.removeprefix(_PREFIX)}--".split("-")
    if os.name != "posix" or machine != _machine() or not pid.isdecimal():
        return None  # other systems offer no such query without side effects
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return None
    except OSError:  # it belongs to another user
        pass
    return True


@contextmanager
def explained(what: str, path: Path, cure: str = "choose another folder") -> Iterator[None]:
    """Convert an ``OSError`` about writing ``what`` to ``path`` to an `OutputError`."""
    try:
        yield
    except OSError as error:
        raise unwritable(what, path, error, cure) from None


def unwritable(what: str, path: Path, error: OSError, cure: str = "choose another folder") -> OutputError:
    """The error of a file that cannot be written. On a full disk the cure begins with freeing space."""
    reason = error.strerror or str(error) or type(error).__name__
    if any(path.is_relative_to(home) for home in Path(tempfile.gettempdir()).glob(f"{_SHARED}*")):
        cure = _CURE
    cure = f"free some space or {cure}" if is_full(error) else cure
    return OutputError(f"{what} cannot be written: {reason}", where=path, cure=cure)


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk, a quota or a limit on files is exhausted."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Closing:
    """A base for classes with a method ``close``, which releases their resources: ``with`` calls it."""

    __slots__ = ()

    def close(self) -> None:
        """Release the resources of the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shared_folder(name: str) -> Path:
    """A folder that all processes of this user share, such as one for locks. Raises `OutputError`."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    own = Path(tempfile.gettempdir()) / f"{_SHARED}{user}"
    with explained("the temporary folder", own, _CURE):
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Names here are predictable, and others may write to the parent.
        if hasattr(os, "getuid") and own.lstat().st_uid != os.getuid():
            raise PermissionError("its folder belongs to another user")
        (own / name).mkdir(exist_ok=True)
    return own / name
