"""Launchers: start the worker processes that hold engines.

Two launchers with one interface: `Zygote` forks children of a process that has the backend's library loaded (about a
millisecond each); `Interpreters` starts a fresh interpreter for each engine (a tenth of a second or more) where forking
is unavailable or unsafe. To load a library takes about a second, so that a zygote that is given back is kept for the
next caller with the same backend and the same environment.
"""

from __future__ import annotations

import atexit
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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from qdqspec.errors import BackendError
from qdqspec.files import explained
from qdqspec.temporary import TemporaryFolder, shared_folder
from qdqspec.wire import FrameStream

LOG = "log.txt"
_TAIL_BYTES = 4096
_TAIL_LINES = 8

# A single thread until an engine is built: forking a process with threads may deadlock the child. OpenBLAS starts its
# threads when numpy is imported. A runtime that starts threads on import is prevented from it by its backend's package.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Child:
    """A process that serves one engine. ``folder`` holds its log and temporary files."""

    stream: FrameStream
    folder: Path
    end: Callable[[], int]  # kills the process and returns its exit code, negative for a signal
    pid: int = 0  # 0 for a thread, as in some tests

    def log(self) -> str:
        """The whole log: standard output and standard error."""
        return _text_of(self.folder / LOG)

    def last_lines(self) -> str:
        """The last lines of the log."""
        return last_lines(self.folder)

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


class Interpreter(Protocol):
    """An interpreter of another environment: `qdqspec.measurement.environment.Environment`."""

    @property
    def python(self) -> Path:
        """Its executable."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables that it needs."""
        ...


def start_worker(
    arguments: list[str],
    *,
    folder: Path,
    pass_fds: tuple[int, ...] = (),
    stdin: int = subprocess.DEVNULL,
    interpreter: Interpreter | None = None,
) -> subprocess.Popen[bytes]:
    """Start the worker module in a new interpreter: with the module search path of this one, or another one."""
    if interpreter is None:
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        python, variables = sys.executable, {"PYTHONPATH": paths}
    else:
        python, variables = str(interpreter.python), dict(interpreter.variables)
    with (folder / LOG).open("ab") as output:
        return subprocess.Popen(
            [python, "-P", "-m", "qdqspec.measurement.worker", *arguments, str(folder)],
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            env={**os.environ, **_ENVIRONMENT, **variables},
        )


def kill(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and return its exit code, which is that of the crash if it had already crashed."""
    process.kill()
    code = process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # it had died before reading its input
            process.stdin.close()
    return code


def last_lines(folder: Path) -> str:
    """The last log lines of the process with this folder."""
    lines = [line.rstrip() for line in _text_of(folder / LOG)[-_TAIL_BYTES:].splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:])


def _text_of(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace")
    return ""


START_TIMEOUT = 120.0  # seconds to import a backend's library, on a loaded machine with a cold disk cache
_CONTROL_LIMIT = 1 << 16  # bytes of one control message
_POLL_SECONDS = 0.2
_MOST_IDLE = 4  # zygotes kept for later, of about 100 MB each
_CURE = "import the backend's library in a Python shell to see why"


class NotForkableError(Exception):
    """Importing the backend's library started threads, so that forking afterwards is not safe."""


class Zygote:
    """Forks children from a process with the backend's library loaded, by default in this environment."""

    def __init__(self, backend: str, interpreter: Interpreter | None = None) -> None:
        self.circumstances = _circumstances(backend) if interpreter is None else None
        self._own = TemporaryFolder()
        self._scratch = self._own.path
        # The garbage collector may close an engine in the middle of another request of this thread.
        self._lock = threading.RLock()
        self._asked = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_worker(
                ["zygote", backend, str(theirs.fileno())],
                folder=self._scratch,
                pass_fds=(theirs.fileno(),),
                interpreter=interpreter,
            )
        try:
            threads = self._answer_to(0)["threads"]
        except BaseException:
            self.close()
            raise
        if threads != 1:
            self.close()
            raise NotForkableError

    @property
    def is_running(self) -> bool:
        """Whether it can still start children."""
        return self._process.poll() is None

    def start(self) -> Child:
        """Fork one child."""
        folder = engine_folder(self._scratch)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                answer = self._ask({"do": "fork", "folder": str(folder)}, [theirs.fileno()])
            if "error" in answer:
                raise BackendError(f"no process could be started for an engine: {answer['error']}")
        except BaseException:  # a child that was forked nevertheless sees its connection close
            ours.close()
            raise
        return Child(FrameStream(ours), folder, lambda: self._end(answer["pid"]), answer["pid"])

    def close(self) -> None:
        """Stop the zygote, which kills its children first."""
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            kill(self._process)
        self._own.close()

    def _end(self, pid: int) -> int:
        try:
            return os.waitstatus_to_exitcode(self._ask({"do": "end", "pid": pid})["status"])
        except (BackendError, OSError):  # the zygote has ended, and its children with it
            return -signal.SIGKILL

    def _ask(self, request: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        with self._lock:
            self._asked += 1
            number = self._asked
            message = json.dumps({**request, "number": number}).encode()
            try:
                socket.send_fds(self._control, [message], fds or [])
            except ConnectionError:
                raise self._ended_error() from None
            return self._answer_to(number)

    def _answer_to(self, number: int) -> dict[str, Any]:
        """The answer with that number. Other answers belong to requests that were interrupted."""
        while number not in self._answers:
            answer = self._receive()
            self._answers[answer["number"]] = answer
        return self._answers.pop(number)

    def _receive(self) -> dict[str, Any]:
        self._control.settimeout(START_TIMEOUT)
        try:
            message = self._control.recv(_CONTROL_LIMIT)
        except ConnectionError:
            message = b""
        except TimeoutError:
            raise BackendError(
                f"the process that loads the backend's library gave no answer for {START_TIMEOUT:.0f} s",
                cure=_CURE,
            ) from None
        if not message:
            raise self._ended_error()
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _ended_error(self) -> BackendError:
        words = last_lines(self._scratch)
        return BackendError(
            f"the process that loads the backend's library ended early\n{words}".rstrip(), cure=_CURE
        )


class Interpreters:
    """Starts one fresh interpreter per child, connected over the loopback interface."""

    def __init__(self, backend: str, interpreter: Interpreter | None = None) -> None:
        self._backend = backend
        self._interpreter = interpreter
        self._own = TemporaryFolder()
        self._scratch = self._own.path
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def is_running(self) -> bool:
        """Always true: no intermediate process can end."""
        return True

    def start(self) -> Child:
        """Start one interpreter and wait until it has connected and sent its token."""
        self._processes = [process for process in self._processes if process.poll() is None]
        folder = engine_folder(self._scratch)
        token = secrets.token_bytes(32)
        with socket.create_server(("127.0.0.1", 0)) as server:
            process = start_worker(
                ["single", self._backend, str(server.getsockname()[1])],
                folder=folder,
                stdin=subprocess.PIPE,
                interpreter=self._interpreter,
            )
            self._processes.append(process)
            connection = _accepted(server, process, token)
        if connection is None:
            code = kill(process)
            words = last_lines(folder)
            raise BackendError(
                f"the process for an engine did not start (exit code {code})\n{words}".rstrip(), cure=_CURE
            )
        return Child(FrameStream(connection), folder, lambda: kill(process), process.pid)

    def close(self) -> None:
        """Kill all children."""
        for process in self._processes:
            kill(process)
        self._own.close()


def can_fork() -> bool:
    """Whether forking is available and safe. Apple's frameworks do not support it, whatever the number of threads."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds") and sys.platform != "darwin"


def open_launcher(
    backend: str, *, fork: bool, interpreter: Interpreter | None = None
) -> Zygote | Interpreters:
    """The fast launcher if requested and safe, else the plain one. It belongs to the caller until `give_back`."""
    if fork:
        with contextlib.suppress(NotForkableError):
            idle = _idle_zygote(_circumstances(backend)) if interpreter is None else None
            return idle or Zygote(backend, interpreter)
    return Interpreters(backend, interpreter)


def give_back(launcher: Zygote | Interpreters) -> None:
    """Keep a zygote of this environment, whose children have all ended, for a later caller; close another launcher."""
    surplus: list[Zygote | Interpreters] = []
    with _IDLE_LOCK:
        if isinstance(launcher, Zygote) and launcher.circumstances and launcher.is_running:
            _IDLE.append(launcher)
            surplus += _IDLE[:-_MOST_IDLE]
            del _IDLE[:-_MOST_IDLE]
        else:
            surplus.append(launcher)
    for each in surplus:
        each.close()


@atexit.register
def close_idle() -> None:
    """Stop all idle zygotes."""
    with _IDLE_LOCK:
        idle = _IDLE.copy()
        _IDLE.clear()
    for each in idle:
        each.close()


_IDLE: list[Zygote] = []  # the one that was given back last is the last
_IDLE_LOCK = threading.Lock()


def _idle_zygote(circumstances: tuple[object, ...]) -> Zygote | None:
    """An idle zygote that was started under these circumstances."""
    with _IDLE_LOCK:
        for place in reversed(range(len(_IDLE))):
            if _IDLE[place].circumstances == circumstances:
                found = _IDLE.pop(place)
                if found.is_running:
                    return found
                found.close()
    return None


def _circumstances(backend: str) -> tuple[object, ...]:
    """The state of this process that a zygote inherits; pytest sets one of the variables for each test."""
    variables = frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")
    return backend, os.getpid(), sys.executable, tuple(sys.path), variables, shared_folder("runs")


def _accepted(server: socket.socket, process: subprocess.Popen[bytes], token: bytes) -> socket.socket | None:
    """The child's connection, or ``None``. Connections without the token are closed."""
    deadline = time.monotonic() + START_TIMEOUT
    server.settimeout(_POLL_SECONDS)
    with contextlib.suppress(BrokenPipeError):  # a child that has already ended is detected below
        _input_of(process).write(token)
        _input_of(process).flush()
    while process.poll() is None and time.monotonic() < deadline:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        if _has_token(connection, token):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection.close()
    return None


def _has_token(connection: socket.socket, token: bytes) -> bool:
    connection.settimeout(1.0)
    try:
        return hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token)
    except OSError:
        return False


def _input_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None  # it was started with a pipe
    return process.stdin
