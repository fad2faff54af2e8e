"""Starts and ends the worker processes that hold engines. May import floor 0 and the wire.

Two launchers with one face: `Zygote` forks children of a process that has the backend's library
loaded (about a millisecond each), `Interpreters` starts a fresh interpreter per engine (a tenth of a
second and more) where forking is missing or unsafe.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qdqspec.errors import BackendError
from qdqspec.measure._wire import Stream

START_TIMEOUT = 120.0  # seconds to import a backend's library, on a loaded machine and a cold disk
_CONTROL_LIMIT = 1 << 16
_TAIL_BYTES = 4096
_TAIL_LINES = 8

# One thread only until an engine is built: forking a process with threads may deadlock the child.
# OpenBLAS starts its threads when numpy is imported. ONNX Runtime from 1.31 on starts a telemetry
# thread on import, also on Linux, which sends events home; it stays off here for that reason too.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}


@dataclass(frozen=True, slots=True)
class Child:
    """A process that serves one engine. ``folder`` is its own, for its log and temporary files."""

    stream: Stream
    folder: Path
    end: Callable[[], int]  # kills it and returns its exit code, negative for a signal

    def log(self) -> str:
        """All that it printed, on both outputs."""
        with contextlib.suppress(OSError):
            return (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        return ""

    def last_words(self) -> str:
        """The last lines it printed."""
        lines = [line.rstrip() for line in self.log()[-_TAIL_BYTES:].splitlines() if line.strip()]
        return "\n".join(lines[-_TAIL_LINES:])

    def bury(self) -> int:
        """End it and remove what it leaves behind; return its exit code."""
        self.stream.close()
        code = self.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        return code


class Launcher(Protocol):
    """Starts children until closed."""

    def start(self) -> Child:
        """Start one child; raise `BackendError` where the machine does not allow it."""
        ...

    def close(self) -> None:
        """End everything it started."""
        ...


class NotForkableError(Exception):
    """Importing the backend's library started threads, so that forking after it is not safe."""


class Zygote:
    """Forks children from a process with the backend's library loaded."""

    def __init__(self, backend: str) -> None:
        self._scratch = _scratch_folder()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start_worker(
                ["zygote", backend, str(theirs.fileno()), str(self._scratch)],
                log=self._scratch / "log.txt",
                pass_fds=(theirs.fileno(),),
            )
        try:
            threads = self._receive()["threads"]
        except BaseException:
            self.close()
            raise
        if threads != 1:
            self.close()
            raise NotForkableError

    @property
    def alive(self) -> bool:
        """Whether it can still start children."""
        return self._process.poll() is None

    def start(self) -> Child:
        """Fork one child."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            answer = self._ask({"do": "fork", "folder": str(folder)}, [theirs.fileno()])
        if "error" in answer:
            ours.close()
            raise BackendError(f"no process could be started for an engine: {answer['error']}")
        return Child(Stream(ours), folder, lambda: self._end(answer["pid"]))

    def close(self) -> None:
        """End the zygote; it kills its children first."""
        self._control.close()
        _wait_or_kill(self._process)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _end(self, pid: int) -> int:
        try:
            return os.waitstatus_to_exitcode(self._ask({"do": "end", "pid": pid})["status"])
        except (BackendError, OSError):  # the zygote is gone, and its children with it
            return -signal.SIGKILL

    def _ask(self, request: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], fds or [])
            except (ConnectionError, BrokenPipeError):
                raise self._gone() from None
            return self._receive()

    def _receive(self) -> dict[str, Any]:
        self._control.settimeout(START_TIMEOUT)
        try:
            message = self._control.recv(_CONTROL_LIMIT)
        except ConnectionError:
            message = b""
        except TimeoutError:
            raise BackendError(
                f"the backend's library did not load within {START_TIMEOUT:.0f} s",
                cure="import it in a Python shell to see what it waits for",
            ) from None
        if not message:
            raise self._gone()
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _gone(self) -> BackendError:
        log = self._scratch / "log.txt"
        words = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_BYTES:] if log.is_file() else ""
        return BackendError(
            f"the process that loads the backend's library ended early\n{words.strip()}".rstrip(),
            cure="import the library in a Python shell to see why",
        )


class Interpreters:
    """Starts one fresh interpreter per child, connected over the loopback interface."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._scratch = _scratch_folder()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def alive(self) -> bool:
        """Always: there is no process in between that could die."""
        return True

    def start(self) -> Child:
        """Start one interpreter and wait until it has connected and shown its token."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        token = secrets.token_bytes(32)
        with socket.create_server(("127.0.0.1", 0)) as server:
            process = _start_worker(
                ["single", self._backend, str(server.getsockname()[1]), str(folder)],
                log=folder / "log.txt",
                stdin=subprocess.PIPE,
            )
            self._processes.append(process)
            return Child(Stream(_accepted(server, process, token)), folder, lambda: _killed(process))

    def close(self) -> None:
        """End all children."""
        for process in self._processes:
            _killed(process)
        shutil.rmtree(self._scratch, ignore_errors=True)


def can_fork() -> bool:
    """Whether forking is there and safe. Apple's frameworks do not survive it, whatever the thread count."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds") and sys.platform != "darwin"


def open_launcher(backend: str, *, fork: bool) -> Zygote | Interpreters:
    """The fast launcher where it is asked for and safe, else the plain one."""
    if fork:
        with contextlib.suppress(NotForkableError):
            return Zygote(backend)
    return Interpreters(backend)


def _scratch_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="qdqspec-"))


def _start_worker(
    arguments: list[str], *, log: Path, pass_fds: tuple[int, ...] = (), stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start the worker module in a new interpreter that finds modules where this one does."""
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "qdqspec.measure.worker", *arguments],
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": paths},
        )


def _accepted(server: socket.socket, process: subprocess.Popen[bytes], token: bytes) -> socket.socket:
    """The child's connection. Whoever else connects first does not know the token and is turned away."""
    stdin = process.stdin
    if stdin is None:  # never: it was started with a pipe
        raise BackendError("the worker process has no input")
    stdin.write(token)
    stdin.flush()
    server.settimeout(START_TIMEOUT)
    while True:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            _killed(process)
            raise BackendError(f"the worker process did not answer within {START_TIMEOUT:.0f} s") from None
        connection.settimeout(START_TIMEOUT)
        if hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection.close()


def _killed(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    code = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return code


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        _killed(process)
