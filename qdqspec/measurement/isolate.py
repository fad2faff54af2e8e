"""Process isolation: a backend with every engine in a process of its own.

`Isolated` implements the interface of `qdqspec.backends.base` and passes each call to a child process, one per engine,
so that incumbent and challengers are open together and a crash, hang or memory exhaustion of one is a `BackendError`
here and does not affect the others. Output of children, also from native code, goes to their log.

Two launchers with one interface start the processes: `Zygote` forks children of a process that has the backend's
library loaded (about a millisecond each); `Interpreters` starts a fresh interpreter for each engine (a tenth of a
second or more) where forking is unavailable or unsafe. To load a library takes about a second, so that a zygote that is
given back is kept for the next caller with the same backend and the same environment.
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
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdqspec import errors
from qdqspec.arrays import Array, Reduction
from qdqspec.backends.base import PLAIN, Availability, Backend, BuildOptions, Capabilities, backend_named
from qdqspec.closing import Closing
from qdqspec.codec import from_data
from qdqspec.config import options_of
from qdqspec.errors import BackendError, OutputError
from qdqspec.files import explained
from qdqspec.graph.weights import WEIGHTS
from qdqspec.measurement.worker import CONTROL_LIMIT, LOG, options_to_json
from qdqspec.programs import Interpreter, python_command
from qdqspec.quantize.scales import as_real
from qdqspec.temporary import TemporaryFolder, shared_folder
from qdqspec.types import DeviceKey, LayerTime, Samples
from qdqspec.units import signal_text
from qdqspec.wire import FrameStream, Header, WireClosedError

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


def start_worker(
    arguments: list[str],
    *,
    folder: Path,
    pass_fds: tuple[int, ...] = (),
    stdin: int = subprocess.DEVNULL,
    interpreter: Interpreter | None = None,
) -> subprocess.Popen[bytes]:
    """Start the worker module in a new interpreter: with the module search path of this one, or another one."""
    module = "qdqspec.measurement.worker"
    command, variables = python_command(module, *arguments, str(folder), interpreter=interpreter)
    with (folder / LOG).open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            env={**variables, **_ENVIRONMENT},
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
            message = self._control.recv(CONTROL_LIMIT)
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
    assert process.stdin is not None  # it was started with a pipe
    with contextlib.suppress(BrokenPipeError):  # a child that has already ended is detected below
        process.stdin.write(token)
        process.stdin.flush()
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


CALL_TIMEOUT = 120.0
_PROFILE_BYTES = 16 << 20
_ACCOUNT = threading.Lock()  # several builds may end at once
_SLOWER_THAN_SEEN = 10  # factor over the slowest run so far from which a run counts as hung


class Isolated(Closing):
    """The given backend, or the one of that name, with every engine in its own child process.

    An instance answers `probe`, `device` and `capabilities` itself; children look it up by name. ``build_timeout`` (by
    default the limit in the options of each build) and ``call_timeout`` are in seconds; several runs in one call get
    more time, by the duration of earlier runs. ``fork`` selects the launcher: by default a process with the library
    loaded is forked if that is safe, else a fresh interpreter is started. ``cpu_seconds`` adds up the processor time of
    engines for ``build``, ``bind``, ``run``, ``time`` and ``layers``. Children run in ``interpreter``, which may have
    another version of the runtime, by default in this one. ``device_key`` determines the key of the device, by default
    the backend's.
    """

    def __init__(
        self,
        backend: str | Backend,
        *,
        build_timeout: float | None = None,
        call_timeout: float = CALL_TIMEOUT,
        fork: bool | None = None,
        interpreter: Interpreter | None = None,
        device_key: Callable[[DeviceKey], str] | None = None,
    ) -> None:
        self._device_key = device_key
        self._local: Backend = backend_named(backend) if isinstance(backend, str) else backend
        self._registered = backend if isinstance(backend, str) else backend.name
        self._build_timeout = build_timeout
        self._call_timeout = call_timeout
        self._fork = can_fork() if fork is None else fork
        self._interpreter = interpreter
        self._launcher: Zygote | Interpreters | None = None
        self._close_launcher: weakref.finalize[[], Isolated] | None = None
        self._engines: weakref.WeakSet[IsolatedEngine] = weakref.WeakSet()
        self._builds = 0
        self._starting = threading.RLock()
        self.cpu_seconds: Counter[str] = Counter()  # of engines, by kind of request
        self.name = self._local.name
        self.target = self._local.target
        self.options = options_of(self._local)

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """The availability reported by the backend."""
        return self._local.probe(options)

    def device(self, options: BuildOptions) -> DeviceKey:
        """The device reported by the backend, with the key that ``device_key`` determines."""
        found = self._local.device(options)
        return found if self._device_key is None else replace(found, key=self._device_key(found))

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """The capabilities reported by the backend."""
        return self._local.capabilities(options)

    def build(self, model: Path, options: BuildOptions) -> IsolatedEngine:
        """Build in a new child process.

        Raises `BackendError` with the backend's reason, or with the exit status of the child and its last log lines.
        Several threads may build at once.
        """
        with self._starting:
            serial, self._builds = self._builds, self._builds + 1
            if self._launcher is None or not self._launcher.is_running:
                self.close()
                self._launcher = open_launcher(
                    self._registered, fork=self._fork, interpreter=self._interpreter
                )
                self._close_launcher = weakref.finalize(self, self._launcher.close)
            launcher = self._launcher
        engine = IsolatedEngine(launcher.start(), model, self._call_timeout, self.cpu_seconds)
        with self._starting:
            self._engines.add(engine)
            closed = launcher is not self._launcher
        if closed:
            engine.close()
            raise BackendError("the backend was closed while an engine started", where=model)
        words = options_to_json(replace(options, serial=options.serial + serial))
        request = {"do": "build", "model": str(model.absolute()), "options": words}
        started = time.monotonic()
        answer, _ = engine.ask(request, timeout=self._build_timeout or options.build_seconds)
        engine.build_seconds = time.monotonic() - started
        engine.graph_hash = str(answer["graph_hash"])
        engine.on_device = bool(answer.get("on_device"))
        return engine

    def close(self) -> None:
        """Kill all children. A later build starts new ones."""
        with self._starting:
            launcher, self._launcher = self._launcher, None
            engines = list(self._engines)
        for engine in engines:
            engine.close()
        if launcher is not None and self._close_launcher is not None and self._close_launcher.detach():
            give_back(launcher)


class IsolatedEngine:
    """An engine in a child process. After any failure it is closed, and stays closed."""

    graph_hash: str = ""
    on_device: bool = False  # whether it has memory of its own on a device
    build_seconds: float = 0.0

    def __init__(self, child: Child, model: Path, call_timeout: float, spent: Counter[str]) -> None:
        """``spent`` accumulates the processor time of its answers, in seconds by kind of request."""
        self._cpu_seconds = 0.0  # of the child, as of its last answer
        self._spent = spent
        self._child = child
        self._model = model
        self._call_timeout = call_timeout
        self._slowest_run = 0.0  # seconds
        self._remove_process = weakref.finalize(self, child.remove_process)

    @property
    def pid(self) -> int:
        """Its process id, for measuring its memory; 0 if it has no process of its own."""
        return self._child.pid

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name; bfloat16 is returned as float32, which numpy supports."""
        return self.reduced(feeds, None)

    def reduced(self, feeds: Mapping[str, Array], how: Reduction | None) -> dict[str, Array]:
        """Run once and return the outputs by name, reduced before they are transferred."""
        found = self.ask({"do": "run", "reduce": how}, feeds)[1]
        return {name: as_real(value) for name, value in found.items()}

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Set the inputs that `time` and `layers` use. They are transferred once."""
        self.ask({"do": "bind", "profile": profile}, feeds)

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Time single runs on both clocks, in the child, in milliseconds."""
        return self._timed(runs, warmup, profile)

    def time_after_another(self, runs: int, warmup: int, profile: int = 0) -> Samples:
        """Time runs, the first of which follows a run of another model of the same size.

        Before the first timed run the process runs the model ``warmup`` times, then a second engine of it. A
        run right after a wait for another process would take longer, and no program that runs two models in one
        process has such a wait. Of a large model, or where a device computes, the first run after that of
        another process is timed.
        """
        return self._timed(runs, warmup, profile, after_another=True)

    def _timed(self, runs: int, warmup: int, profile: int, *, after_another: bool = False) -> Samples:
        request = {"do": "time", "runs": runs, "warmup": warmup, "profile": profile}
        request["after_another"] = after_another
        samples = from_data(Samples, self.ask(request, timeout=self._patience(runs + warmup))[0]["samples"])
        self._slowest_run = max(self._slowest_run, max(samples.wall_ms, default=0.0) / 1e3)
        return samples

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per executed kernel; empty if unknown. A runtime may build the model again for it."""
        request = {"do": "layers", "runs": runs, "profile": profile}
        answer, _ = self.ask(request, timeout=self._patience(runs) + _SLOWER_THAN_SEEN * self.build_seconds)
        return tuple(from_data(LayerTime, layer) for layer in answer["layers"])

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes that the engine holds on its device, and that are free there now; ``None`` without a device."""
        if not self.on_device:
            return None
        answer, _ = self.ask({"do": "memory"})
        return int(answer["held"]), int(answer["free"])

    def log(self) -> str:
        """The log of the child so far; empty once it is closed."""
        return self._child.log()

    def close(self) -> None:
        """Kill the child and free its resources; closing twice is harmless."""
        self._remove_process()

    def ask(
        self, request: Header, arrays: Mapping[str, Array] | None = None, timeout: float | None = None
    ) -> tuple[Header, dict[str, Array]]:
        """Send one request and wait for its answer. Any failure closes the engine and is a `BackendError`.

        If the disk lacks space for an engine's files, it is an `OutputError`, which does not count against the
        candidate.
        """
        if not self._remove_process.alive:
            raise BackendError("the engine is closed", where=self._model, cure="build the model again")
        seconds = self._call_timeout if timeout is None else timeout
        try:
            self._child.stream.send(request, arrays, seconds)
            answer, outputs = self._child.stream.receive(seconds)
        except TimeoutError:
            raise self._explained(self._unanswered(request["do"], seconds)) from None
        except WireClosedError:
            raise self._explained(self._unanswered(request["do"])) from None
        except BaseException:  # an interrupt leaves an unread answer in the connection
            self.close()
            raise
        if "error" in answer:
            self.close()
            found = answer["error"]
            is_missing = found["kind"] == "BackendUnavailableError"
            kind = errors.BackendUnavailableError if is_missing else BackendError
            where = found.get("where") or self._model
            raise self._explained(kind(found["what"], where=where, cure=found.get("cure")))
        with _ACCOUNT:
            self._spent[request["do"]] += answer["cpu_seconds"] - self._cpu_seconds
        self._cpu_seconds = answer["cpu_seconds"]
        return answer, outputs

    def _patience(self, runs: int) -> float:
        return self._call_timeout + _SLOWER_THAN_SEEN * self._slowest_run * runs

    def _unanswered(self, what: str, seconds: float | None = None) -> BackendError:
        """The error of a request without an answer within so many seconds, or of one during which the process ended."""
        words = self._child.last_lines()
        code, cure = self._remove_process() or 0, None
        if seconds is None:
            problem = f"the engine's process {_exit_text(code)} during '{what}'"
        else:
            problem = f"the engine gave no answer to '{what}' for {seconds:g} s and was ended"
            cure = "leave this candidate out"
            if what == "build":
                cure = "give it more time with --qdq-build-limit"
        if words:
            problem += f"; the end of its log:\n{words}"
        return BackendError(problem, where=self._model, cure=cure)

    def _explained(self, error: BackendError) -> BackendError | OutputError:
        """The error itself, or an `OutputError` if the disk lacked space for an engine's temporary files.

        Runtimes report a full disk with various messages, as a truncated profile, or not at all.
        """
        folder = self._child.folder.parent
        try:
            left = shutil.disk_usage(folder).free
        except OSError:
            return error
        # An engine may write its optimized model, a profile and a log.
        files = (self._model, self._model.with_name(WEIGHTS))
        if left >= _PROFILE_BYTES + sum(file.stat().st_size for file in files if file.exists()):
            return error
        return OutputError(
            f"{left / 2**20:.1f} MiB are left in the temporary folder, and an engine failed: {error.what}",
            where=folder,
            cure="free some space or set TMPDIR to another folder",
        )


def _exit_text(code: int) -> str:
    """The meaning of an exit code, as text."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal_text(-code)
    hint = " (often: the machine ran out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
