"""Starts the processes that serve engines, one for each engine.

`Zygote` forks children of a process that has the backend's library loaded (about a millisecond each); `Interpreters`
starts a fresh interpreter for each engine (a tenth of a second or more) where forking is unavailable or unsafe. To load
a library takes about a second, so that a zygote that is given back is kept for the next caller with the same backend
and environment. ``multiprocessing`` does not replace them: its fork server imports the caller's main module, has one
environment for all, and does not report the threads of a loaded library.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqspec._core.arrays import FrameStream
from qdqspec._core.files import TemporaryFolder, explained, shared_folder
from qdqspec._core.programs import Interpreter, python_command
from qdqspec.backends.isolation.worker import CONTROL_LIMIT, LOG
from qdqspec.errors import BackendError

_TAIL_BYTES, _TAIL_LINES = 4096, 8  # of a log, in a message
# A single thread until an engine is built: forking a process with threads may deadlock the child. OpenBLAS starts its
# threads when numpy is imported. A runtime that starts threads on import is prevented from it by its backend's package.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
START_TIMEOUT = 120.0  # seconds to import a backend's library, on a loaded machine with a cold disk cache
_MOST_IDLE = 4  # zygotes kept for later, of about 100 MB each
_CURE = "import the backend's library in a Python shell to see why"


@dataclass(frozen=True, slots=True)
class Child:
    """A process that serves one engine. ``folder`` holds its log and temporary files."""

    stream: FrameStream
    folder: Path
    end: Callable[[], int]  # kills the process and returns its exit code, negative for a signal
    pid: int = 0  # 0 for a thread, as in some tests

    def remove_process(self) -> int:
        """Kill the process and remove its folder; returns its exit code."""
        self.stream.close()
        code = self.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        return code


def engine_folder(scratch: Path) -> Path:
    """A new folder for the log and temporary files of one engine. Raises `OutputError` if it cannot be created."""
    with explained("the temporary folder", scratch, "set TMPDIR to another folder"):
        return Path(tempfile.mkdtemp(dir=scratch))


def last_lines(folder: Path) -> str:
    """The last lines of standard output and standard error of the process with this folder."""
    text = ""
    with contextlib.suppress(OSError):
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")[-_TAIL_BYTES:]
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:])


def _start_worker(
    role: str, backend: str, connection: socket.socket, folder: Path, interpreter: Interpreter | None
) -> subprocess.Popen[bytes]:
    """Start the worker module in a new interpreter: with the module search path of this one, or another one.

    The worker inherits the connection, and ends when its standard input does.
    """
    number = connection.fileno()
    words = "qdqspec.backends.isolation.worker", role, backend, str(number), str(folder)
    command, variables = python_command(*words, interpreter=interpreter)
    is_windows = sys.platform == "win32"
    with (folder / LOG).open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=() if is_windows else (number,),
            env={**variables, **_ENVIRONMENT},
        )
    if sys.platform == "win32":
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it ended early, which the first request detects
            process.stdin.write(connection.share(process.pid))
            process.stdin.flush()
    return process


def _kill(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and return its exit code, which is that of the crash if it had already crashed."""
    process.kill()
    code = process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    return code


class NotForkableError(Exception):
    """Importing the backend's library started threads, so that forking afterwards is not safe."""


class Zygote:
    """Forks children from a process with the backend's library loaded, by default in this environment."""

    def __init__(self, backend: str, interpreter: Interpreter | None = None) -> None:
        self.circumstances = _circumstances(backend) if interpreter is None else None
        self._own = TemporaryFolder()
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start_worker("zygote", backend, theirs, self._own.path, interpreter)
        try:
            if self._ask({"do": "count threads"})["threads"] != 1:
                raise NotForkableError
        except BaseException:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """Whether it can still start children."""
        return self._process.poll() is None

    def start(self) -> Child:
        """Fork one child."""
        folder = engine_folder(self._own.path)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                answer = self._ask({"do": "fork", "folder": str(folder)}, theirs)
            if "error" in answer:
                raise BackendError(f"no process could be started for an engine: {answer['error']}")
        except BaseException:  # a child that was forked nevertheless sees its connection close
            ours.close()
            raise
        return Child(FrameStream(ours), folder, lambda: self._end(answer["pid"]), answer["pid"])

    def close(self) -> None:
        """Stop the zygote, which kills its children first."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        _kill(self._process)
        self._own.close()

    def _end(self, pid: int) -> int:
        try:
            return os.waitstatus_to_exitcode(self._ask({"do": "end", "pid": pid})["status"])
        except (BackendError, OSError):  # the zygote has ended, and its children with it
            return -signal.SIGKILL

    def _ask(self, request: dict[str, Any], *sent: socket.socket) -> dict[str, Any]:
        """The answer to a request, over a connection of its own: requests of several threads do not mix.

        The garbage collector may close an engine in the middle of another request, and an interrupt may end one.
        """
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with ours:
            with theirs, contextlib.suppress(OSError):  # of a zygote that has ended, which gives no answer
                fds = [each.fileno() for each in (theirs, *sent)]
                socket.send_fds(self._control, [json.dumps(request).encode()], fds)
            return self._answer(ours)

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        connection.settimeout(START_TIMEOUT)
        message = b""
        try:
            with contextlib.suppress(ConnectionError):
                message = connection.recv(CONTROL_LIMIT)
        except TimeoutError:
            why = f"gave no answer for {START_TIMEOUT:.0f} s"
        else:
            if message:
                answer: dict[str, Any] = json.loads(message)
                return answer
            why = f"ended early\n{last_lines(self._own.path)}".rstrip()
        raise BackendError(f"the process that loads the backend's library {why}", cure=_CURE)


class Interpreters:
    """Starts one fresh interpreter per child."""

    is_running = True  # no intermediate process can end

    def __init__(self, backend: str, interpreter: Interpreter | None = None) -> None:
        self._backend = backend
        self._interpreter = interpreter
        self._own = TemporaryFolder()
        self._processes: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()

    def start(self) -> Child:
        """Start one interpreter."""
        folder = engine_folder(self._own.path)
        ours, theirs = socket.socketpair()
        with theirs:
            process = _start_worker("single", self._backend, theirs, folder, self._interpreter)
        self._processes.add(process)
        return Child(FrameStream(ours), folder, lambda: _kill(process), process.pid)

    def close(self) -> None:
        """Kill all children."""
        for process in self._processes:
            _kill(process)
        self._own.close()


def can_fork() -> bool:
    """Whether forking is available and known to be safe: only Linux lists the threads of native libraries."""
    return sys.platform == "linux"


def open_launcher(
    backend: str, *, fork: bool, interpreter: Interpreter | None = None
) -> Zygote | Interpreters:
    """The fast launcher if requested and safe, else the plain one. It belongs to the caller until `give_back`."""
    if fork:
        with _IDLE_LOCK:
            wanted = _circumstances(backend) if interpreter is None else None
            idle = [each for each in _IDLE if each.circumstances == wanted and each.is_running]
            if idle:
                _IDLE.remove(idle[-1])
                return idle[-1]
        with contextlib.suppress(NotForkableError):
            return Zygote(backend, interpreter)
    return Interpreters(backend, interpreter)


def give_back(launcher: Zygote | Interpreters) -> None:
    """Keep a zygote of this environment, whose children have all ended, for a later caller; close another launcher."""
    if not isinstance(launcher, Zygote) or launcher.circumstances is None or not launcher.is_running:
        launcher.close()
        return
    with _IDLE_LOCK:
        _IDLE.append(launcher)
    close_idle(_MOST_IDLE)


@atexit.register
def close_idle(but: int = 0) -> None:
    """Stop idle zygotes, except those that were given back last."""
    with _IDLE_LOCK:
        surplus = _IDLE[: max(0, len(_IDLE) - but)]
        _IDLE[: len(surplus)] = []
    for each in surplus:
        each.close()


_IDLE: list[Zygote] = []  # the one that was given back last is the last
_IDLE_LOCK = threading.Lock()


def _circumstances(backend: str) -> tuple[object, ...]:
    """The state of this process that a zygote inherits; pytest sets one of the variables for each test."""
    variables = frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")
    return backend, os.getpid(), sys.executable, tuple(sys.path), variables, shared_folder("runs")
