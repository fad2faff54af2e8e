"""The jobs of a worker: receives files, runs each case in a process, and answers the client's questions.

The client asks a running job for news every second (`ask`), which is also its lease: a job whose client does not ask
any more is stopped. Requests arrive on the worker's event loop, the case runs in its task thread and a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdqspec import __version__
from qdqspec._core.codec import from_data, to_data
from qdqspec._core.config import Settings
from qdqspec._core.files import file_digest, replace_file
from qdqspec._core.programs import end_program, python_command
from qdqspec.app.cluster.case_process import ANSWER, LOG, REQUEST, Answer, Failure
from qdqspec.app.cluster.content import ContentStore, read_chunk, write_chunk
from qdqspec.app.cluster.request import CACHE, INPUTS, OUTPUT, CaseRequest, FileEntry
from qdqspec.app.preparation.build_logs import HEADER
from qdqspec.app.preparation.cached import CORRECTIONS, JOURNAL
from qdqspec.errors import ConfigError, QdqspecError, StateError

_STEP = 0.2  # seconds between looks at the process of a case
_RENEWAL = 3.0  # seconds between renewals of the lease of a case's process
_LOG_BYTES = 4000


class StoppedError(Exception):
    """The client is gone, or asked to stop."""


@dataclass(slots=True)
class Job:
    """The state of one job, shared by its thread and the event loop."""

    request: CaseRequest
    folder: Path
    asked: float = field(default_factory=time.monotonic)  # when the client last asked
    phase: str = "waiting"  # waiting, receiving, running, done
    need: tuple[str, ...] = ()
    progress: Any = None
    files: tuple[FileEntry, ...] = ()
    answer: Any = None
    stopped: bool = False
    taken: bool = False  # the client has the results
    corrections: FileEntry | None = None  # those found by the case, for another attempt

    def require_client(self) -> None:
        """Raise `StoppedError` if the client has not asked for the time of the lease."""
        if self.stopped or time.monotonic() - self.asked > self.request.lease:
            raise StoppedError


class Jobs:
    """The jobs of one worker process. Its command line gave ``settings``; ``report`` sends a message to a topic."""

    def __init__(
        self, folder: Path, settings: Settings, report: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._report = report
        self._store = ContentStore(folder / "content")
        self._jobs: dict[str, Job] = {}
        self._partial: dict[tuple[str, str], Path] = {}  # by job and digest

    @property
    def free_bytes(self) -> int:
        """Free space of the worker's disk."""
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:
            return 0

    def run(self, text: str) -> str:
        """Run the job of a request; the task of the scheduler. Returns how it ended, in one word."""
        request = from_data(CaseRequest, json.loads(text))
        if request.version != __version__:
            raise ConfigError(f"the client has qdqspec {request.version}, this worker {__version__}")
        name = "".join(sign for sign in request.id if sign.isalnum())
        job = self._jobs[request.id] = Job(request, self._folder / "jobs" / f"{os.getpid()}-{name}")
        self._report(request.topic, {"job": request.id})
        try:
            self._receive(job)
            job.phase = "running"
            self._run(job)
            job.phase = "done"
            while not job.taken:
                job.require_client()
                time.sleep(_STEP / 4)
        except StoppedError:
            return "stopped"
        finally:
            del self._jobs[request.id]
            shutil.rmtree(job.folder, ignore_errors=True)
            self._store.evict()
        return "done"

    def _receive(self, job: Job) -> None:
        """Wait until all files are in the store of this machine, and link them into the job's folder."""
        lock = self._store.receiving()
        while not lock.is_locked:
            with suppress(TimeoutError):
                lock.acquire(timeout=1.0)
            job.require_client()
        try:
            job.phase = "receiving"
            while True:
                digests = dict.fromkeys(entry.sha256 for entry in job.request.files)
                job.need = tuple(digest for digest in digests if not self._store.has(digest))
                if not job.need:
                    break
                job.require_client()
                time.sleep(_STEP / 4)
            for entry in job.request.files:
                is_read_only = entry.path.startswith(f"{INPUTS}/")  # the case writes to the others
                self._store.place(entry.sha256, entry.below(job.folder), linked=entry.linked and is_read_only)
        finally:
            lock.release()

    def _run(self, job: Job) -> None:
        """Run the case's process until it ends, the client is gone, or it asks to stop.

        A process that was not renewed for its lease has ended itself: this worker was frozen; the case is run again.
        """
        job.require_client()
        job.folder.mkdir(parents=True, exist_ok=True)
        replace_file(job.folder / REQUEST, json.dumps(to_data(job.request)))
        words = str(job.folder), json.dumps(to_data(self._settings))
        command, env = python_command("qdqspec.app.cluster.case_process", *words)
        with (job.folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        try:
            threading.Thread(target=_read_progress, args=(process, job), daemon=True).start()
            assert process.stdin is not None
            renewed = time.monotonic()
            while process.poll() is None:
                job.require_client()
                silent = time.monotonic() - renewed
                if silent > job.request.lease:
                    raise StoppedError
                if silent > min(_RENEWAL, job.request.lease / 4):
                    renewed = time.monotonic()
                    with suppress(OSError):  # it has just ended
                        process.stdin.write(b"\n")
                        process.stdin.flush()
                job.corrections = job.corrections or _corrections(job.folder / OUTPUT)
                time.sleep(_STEP)
        finally:
            end_program(process)
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    if stream is not None:
                        stream.close()
        if process.returncode < 0 and time.monotonic() - renewed > job.request.lease:
            raise StoppedError
        job.answer = _read_answer(job, process.returncode)
        job.files = tuple(_results(job))

    async def ask(self, job: str, seen: int) -> dict[str, Any]:
        """News of a job: phase, digests of files it needs, progress, corrections, journal lines after ``seen``."""
        found = self._known(job)
        header, entries = _journal(found.folder / OUTPUT, seen) if found.phase != "waiting" else (None, [])
        done = found.phase == "done"
        return {
            "phase": found.phase,
            "need": list(found.need),
            "progress": found.progress,
            "header": header,
            "entries": entries,
            "corrections": None if done else to_data(found.corrections),
            "answer": found.answer if done else None,
            "files": to_data(found.files) if done else [],
        }

    async def put(self, job: str, digest: str, offset: int, data: bytes, last: bool) -> bool:
        """Write a chunk of a file; with the last one it is verified. False: its content does not match its digest."""
        found = self._known(job)
        if digest not in found.need:
            return True
        path = self._partial.setdefault((job, digest), self._store.partial())
        await asyncio.to_thread(write_chunk, path, offset, data)
        if not last:
            return True
        del self._partial[job, digest]
        return await asyncio.to_thread(self._store.take, path, digest)

    async def get(self, job: str, path: str, offset: int) -> bytes:
        """A chunk of a result."""
        found = self._known(job)
        entry = next((each for each in (*found.files, found.corrections) if each and each.path == path), None)
        if entry is None:
            raise StateError(f"the job has no file {path[:200]}")
        return await asyncio.to_thread(read_chunk, entry.below(found.folder), offset)

    async def stop(self, job: str, taken: bool) -> None:
        """End a job: its results are ``taken``, or it is not wanted any more."""
        found = self._jobs.get(job)
        if found is not None:
            found.taken, found.stopped = taken, not taken

    def _known(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            raise KeyError(name)
        job.asked = time.monotonic()
        return job


def _read_progress(process: subprocess.Popen[bytes], job: Job) -> None:
    assert process.stdout is not None
    with suppress(OSError, ValueError):
        for line in process.stdout:
            job.progress = json.loads(line)


def _read_answer(job: Job, code: int) -> Any:
    """The answer of a case's process, with paths as on the worker; a failure if it left none."""
    try:
        return json.loads((job.folder / ANSWER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        log = (job.folder / LOG).read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        what = f"the process of the case ended with exit code {code}; the end of its log:\n{log}"
        return to_data(Answer(failure=Failure.of(QdqspecError(what))))


def _results(job: Job) -> list[FileEntry]:
    """The files that the case wrote, except those that it was given."""
    given = {entry.path: entry.sha256 for entry in job.request.files}
    found = []
    for folder in (OUTPUT, CACHE):
        for path in sorted(each for each in (job.folder / folder).rglob("*") if each.is_file()):
            name, digest = path.relative_to(job.folder).as_posix(), file_digest(path)
            if given.get(name) != digest and not path.name.startswith("."):
                found.append(FileEntry(path=name, size=path.stat().st_size, sha256=digest))
    return found


def _journal(folder: Path, seen: int) -> tuple[Any, list[Any]]:
    """The header of the journal in a folder, and its complete lines after the first ``seen``.

    A received journal has no header until the case has opened it: it may be of another device, or finished.
    """
    try:
        header = json.loads((folder / HEADER).read_bytes())
        lines = (folder / JOURNAL).read_bytes().split(b"\n")[:-1]
        return header, [json.loads(line) for line in lines[seen:]]
    except (OSError, ValueError):
        return None, []


def _corrections(folder: Path) -> FileEntry | None:
    """The file of the corrections in a folder, once the first trial shows that they are of this search."""
    path = folder / CORRECTIONS
    try:
        if not (folder / JOURNAL).stat().st_size:
            return None
        return FileEntry(path=f"{OUTPUT}/{CORRECTIONS}", size=path.stat().st_size, sha256=file_digest(path))
    except OSError:
        return None
