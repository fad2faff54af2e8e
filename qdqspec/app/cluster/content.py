"""Files of jobs: their transfer in chunks, and the content store of a machine, from which they are linked into jobs.

The store holds files by SHA-256. It is shared by the workers of the machine, and evicted by age and size.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from qdqspec._core.files import explained, file_digest

MOST_BYTES = 50 << 30
MOST_SECONDS = 30 * 86400.0
CHUNK = 32 << 20
IN_FLIGHT = 3  # chunks
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PARTIAL = "receiving"


def read_chunk(path: Path, offset: int) -> bytes:
    """A chunk of a file, at most `CHUNK` bytes."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK)


def write_chunk(path: Path, offset: int, data: bytes) -> None:
    """Write a chunk. Chunks may arrive in any order and together, so that none of them truncates the file."""
    path.touch()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


async def send_file(remote: Any, job: str, digest: str, path: Path, seconds: float) -> bool:
    """Send a file to a job in chunks, a few at a time; the last one, which lets it be verified, after the others.

    ``remote`` are the handlers of the job's worker; a chunk may take ``seconds``. False: the file has another digest.
    """
    limit = asyncio.Semaphore(IN_FLIGHT)
    *offsets, last = range(0, path.stat().st_size, CHUNK) or (0,)

    async def send(offset: int, *, is_last: bool) -> bool:
        async with limit:
            data = await asyncio.to_thread(read_chunk, path, offset)
            words = {"job": job, "digest": digest, "offset": offset, "data": data, "last": is_last}
            found: bool = await asyncio.wait_for(remote.qdqspec_put(**words), seconds)
            return found

    await asyncio.gather(*(send(offset, is_last=False) for offset in offsets))
    return await send(last, is_last=True)


async def fetch_file(remote: Any, job: str, name: str, size: int, path: Path, seconds: float) -> str:
    """Fetch a result of a job by its name to ``path``, as `send_file` sends one; returns its digest."""
    limit = asyncio.Semaphore(IN_FLIGHT)

    async def fetch(offset: int) -> None:
        async with limit:
            data = await asyncio.wait_for(remote.qdqspec_get(job=job, path=name, offset=offset), seconds)
            await asyncio.to_thread(write_chunk, path, offset, data)

    path.write_bytes(b"")
    await asyncio.gather(*(fetch(offset) for offset in range(0, size, CHUNK)))
    return await asyncio.to_thread(file_digest, path)


class ContentStore:
    """Files by their SHA-256 below ``folder``. A file appears only when it is complete and verified.

    Jobs use hard links to the files, or copies, so that eviction does not disturb a running job. ``clock`` gives
    seconds since the epoch.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock

    def path(self, digest: str) -> Path:
        """The path of the file of a digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"'{digest[:80]}' is not a SHA-256")
        return self.folder / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether a file is present; its age begins anew."""
        path = self.path(digest)
        if not path.is_file():
            return False
        with suppress(OSError):
            os.utime(path, (self._clock(),) * 2)
        return True

    def receiving(self) -> FileLock:
        """The lock under which one job of the machine receives files; others wait, and then find them."""
        with explained("the content store", self.folder):
            (self.folder / _PARTIAL).mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / _PARTIAL / ".lock", thread_local=False)

    def partial(self) -> Path:
        """A path to receive a file at."""
        return self.folder / _PARTIAL / secrets.token_hex(8)

    def take(self, partial: Path, digest: str) -> bool:
        """Move a received file to its place; returns false, and removes it, if its content is not that digest."""
        if file_digest(partial) != digest:
            partial.unlink()
            return False
        path = self.path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.chmod(0o444)
        partial.replace(path)
        return True

    def place(self, digest: str, target: Path, *, linked: bool = True) -> None:
        """Make the file available at ``target``; a copy unless it may be ``linked`` and the file system has links."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if linked:
            with suppress(OSError):
                os.link(self.path(digest), target)
                return
        shutil.copyfile(self.path(digest), target)

    def evict(self, most_bytes: int = MOST_BYTES, most_seconds: float = MOST_SECONDS) -> int:
        """Remove files unused for ``most_seconds``, then the longest unused until all fit; returns their number.

        Incomplete files of killed workers are removed after a day.
        """
        files = [(path, path.stat()) for path in self.folder.glob("??/*") if _DIGEST.fullmatch(path.name)]
        files.sort(key=lambda pair: pair[1].st_mtime)
        total, removed, now = sum(stat.st_size for _, stat in files), 0, self._clock()
        for path, stat in files:
            if total > most_bytes or now - stat.st_mtime > most_seconds:
                path.unlink(missing_ok=True)
                total, removed = total - stat.st_size, removed + 1
        for path in (self.folder / _PARTIAL).glob("[0-9a-f]*"):
            with suppress(OSError):
                if now - path.stat().st_mtime > 86400:
                    path.unlink()
        return removed
