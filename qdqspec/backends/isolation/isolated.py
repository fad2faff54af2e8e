"""Process isolation: a backend with every engine in a process of its own, and how these processes start.

`Isolated` implements the interface of `qdqspec.backends.base` and passes each call to a child process, one per engine,
so that incumbent and challengers are open together and a crash, hang or memory exhaustion of one is a `BackendError`
here and does not affect the others. Output of children, also from native code, goes to their log.

`Zygote` forks children of a process that has the backend's library loaded (about a millisecond each); `Interpreters`
starts a fresh interpreter for each engine (a tenth of a second or more) where forking is unavailable or unsafe. To load
a library takes about a second, so that callers with the same backend and environment share a zygote. It ends when
nothing refers to it, and a few are kept for later callers. ``multiprocessing`` does not replace them: its fork server
imports the caller's main module, has one environment for all, and does not report the threads of a loaded library.
"""

from __future__ import annotations

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
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdqspec._core.arrays import Array, FrameStream, Header, Reduction, WireClosedError, as_real
from qdqspec._core.files import Closing, TemporaryFolder, explained, shared_folder
from qdqspec._core.options import options_of
from qdqspec._core.programs import Interpreter, python_command
from qdqspec._core.records import from_data, to_data
from qdqspec._core.units import signal_text
from qdqspec.backends.base import PLAIN, Availability, Backend, BuildOptions, Capabilities, backend_named
from qdqspec.backends.isolation.worker import CONTROL_LIMIT, LOG
from qdqspec.errors import BackendError, BackendUnavailableError, OutputError
from qdqspec.graph import WEIGHTS
from qdqspec.types import DeviceKey, LayerTime, Samples

_TAIL_BYTES, _TAIL_LINES = 4096, 8  # of a log, in a message
# A single thread until an engine is built: forking a process with threads may deadlock the child. OpenBLAS starts its
# threads when numpy is imported. A runtime that starts threads on import is prevented from it by its backend's package.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
START_TIMEOUT = 120.0  # seconds to import a backend's library, on a loaded machine with a cold disk cache
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
        self.circumstances = _circumstances(backend)
        self._own = TemporaryFolder()
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start_worker("zygote", backend, theirs, self._own.path, interpreter)
        self._close = weakref.finalize(self, _end_zygote, self._control, self._process, self._own)
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
        self._close()

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


def _end_zygote(control: socket.socket, process: subprocess.Popen[bytes], own: TemporaryFolder) -> None:
    control.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    _kill(process)
    own.close()


class Interpreters:
    """Starts one fresh interpreter per child."""

    is_running = True  # no intermediate process can end

    def __init__(self, backend: str, interpreter: Interpreter | None = None) -> None:
        self._backend = backend
        self._interpreter = interpreter
        self._own = TemporaryFolder()

    def start(self) -> Child:
        """Start one interpreter."""
        folder = engine_folder(self._own.path)
        ours, theirs = socket.socketpair()
        with theirs:
            process = _start_worker("single", self._backend, theirs, folder, self._interpreter)
        return Child(FrameStream(ours), folder, lambda: _kill(process), process.pid)


def can_fork() -> bool:
    """Whether forking is available and known to be safe: only Linux lists the threads of native libraries."""
    return sys.platform == "linux"


def open_launcher(
    backend: str, *, fork: bool, interpreter: Interpreter | None = None
) -> Zygote | Interpreters:
    """The fast launcher if requested and safe, else the plain one. In this environment it may be shared."""
    with _STARTING, contextlib.suppress(NotForkableError):
        if fork and interpreter is not None:
            return Zygote(backend, interpreter)
        if fork:
            wanted = _circumstances(backend)
            idle = [each for each in RECENT if each.circumstances == wanted and each.is_running]
            if not idle:
                RECENT.append(Zygote(backend))
            return idle[-1] if idle else RECENT[-1]
    return Interpreters(backend, interpreter)


RECENT: deque[Zygote] = deque(maxlen=4)  # kept for later, of about 100 MB each
_STARTING = threading.Lock()


def _circumstances(backend: str) -> tuple[object, ...]:
    """The state of this process that a zygote inherits; pytest sets one of the variables for each test."""
    variables = frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")
    return backend, os.getpid(), sys.executable, tuple(sys.path), variables, shared_folder("runs")


# ---- the backend and its engines -----------------------------------------------------------------

CALL_TIMEOUT = 120.0
_PROFILE_BYTES = 16 << 20
_SLOWER_THAN_SEEN = 10  # factor over the slowest run so far from which a run counts as hung


class Isolated(Closing):
    """The given backend, or the one of that name, with every engine in its own child process.

    An instance answers `probe`, `device` and `capabilities` itself; children look it up by name. ``build_timeout`` (by
    default the limit in the options of each build) and ``call_timeout`` are in seconds; several runs in one call get
    more time, by the duration of earlier runs. ``fork`` selects the launcher: by default a process with the library
    loaded is forked if that is safe, else a fresh interpreter is started. Children run in ``interpreter``, which may
    have another version of the runtime, by default in this one. ``device_key`` determines the key of the device, by
    default the backend's.
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
        self._engines: weakref.WeakSet[IsolatedEngine] = weakref.WeakSet()
        self._builds = 0
        self._starting = threading.RLock()
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
            launcher = self._launcher
        engine = IsolatedEngine(launcher.start(), model, self._call_timeout)
        with self._starting:
            self._engines.add(engine)
            closed = launcher is not self._launcher
        if closed:
            engine.close()
            raise BackendError("the backend was closed while an engine started", where=model)
        options = replace(options, serial=options.serial + serial)
        engine.build(options, self._build_timeout or options.build_seconds)
        return engine

    def close(self) -> None:
        """Kill all children. A later build starts new ones."""
        with self._starting:
            self._launcher = None
            engines = list(self._engines)
        for engine in engines:
            engine.close()


class IsolatedEngine:
    """An engine in a child process. After any failure it is closed, and stays closed."""

    def __init__(self, child: Child, model: Path, call_timeout: float) -> None:
        self.graph_hash = ""
        self.pid = child.pid  # 0 if it has no process of its own
        self._stream, self._folder = child.stream, child.folder
        self._model = model
        self._call_timeout = call_timeout
        self._on_device = False  # whether it has memory of its own on a device
        self._build_seconds = 0.0
        self._slowest_run = 0.0  # seconds
        self._remove_process = weakref.finalize(self, child.remove_process)

    def build(self, options: BuildOptions, seconds: float) -> None:
        """Build the model, within so many seconds."""
        started = time.monotonic()
        state = None if options.state is None else options.state.absolute()
        request = {"do": "build", "model": str(self._model.absolute())}
        answer, _ = self.ask(request | {"options": to_data(replace(options, state=state))}, timeout=seconds)
        self._build_seconds = time.monotonic() - started
        self._on_device = answer["on_device"]
        self.graph_hash = answer["graph_hash"]

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

    def time(self, runs: int, warmup: int = 0, profile: int = 0, *, after_another: bool = False) -> Samples:
        """Time single runs on both clocks, in the child, in milliseconds."""
        request = {"do": "time", "runs": runs, "warmup": warmup, "profile": profile}
        request["after_another"] = after_another
        samples = from_data(Samples, self.ask(request, timeout=self._patience(runs + warmup))[0]["samples"])
        self._slowest_run = max(self._slowest_run, max(samples.wall_ms, default=0.0) / 1e3)
        return samples

    def time_after_another(self, runs: int, warmup: int, profile: int = 0) -> Samples:
        """Time one run after a run of another model of the same size, then ``runs`` after ``warmup`` untimed ones.

        For the one the process runs the model, then a second engine of it, then the model again. A run right
        after a wait for another process would take longer, and no program that runs two models in one process has
        such a wait. Of a large model, or where a device computes, the first run after that of another process is
        timed.
        """
        return self.time(runs, warmup, profile, after_another=True)

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per executed kernel; empty if unknown. A runtime may build the model again for it."""
        request = {"do": "layers", "runs": runs, "profile": profile}
        answer, _ = self.ask(request, timeout=self._patience(runs) + _SLOWER_THAN_SEEN * self._build_seconds)
        return tuple(from_data(LayerTime, layer) for layer in answer["layers"])

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes that the engine holds on its device, and that are free there now; ``None`` without a device."""
        if not self._on_device:
            return None
        answer, _ = self.ask({"do": "memory"})
        return answer["held"], answer["free"]

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
            self._stream.send(request, arrays, seconds)
            answer, outputs = self._stream.receive(seconds)
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
            kind = BackendUnavailableError if found["kind"] == "BackendUnavailableError" else BackendError
            where = found.get("where") or self._model
            raise self._explained(kind(found["what"], where=where, cure=found.get("cure")))
        return answer, outputs

    def _patience(self, runs: int) -> float:
        return self._call_timeout + _SLOWER_THAN_SEEN * self._slowest_run * runs

    def _unanswered(self, what: str, seconds: float | None = None) -> BackendError:
        """The error of a request without an answer within so many seconds, or of one during which the process ended."""
        words = last_lines(self._folder)
        code, cure = self._remove_process() or 0, None
        if seconds is not None:
            problem = f"the engine gave no answer to '{what}' for {seconds:g} s and was ended"
            given_up = "leave this candidate out"
            cure = "give it more time with --qdq-build-limit" if what == "build" else given_up
        elif code >= 0:
            problem = f"the engine's process ended with exit code {code} during '{what}'"
        else:
            name = signal_text(-code)
            hint = " (often: the machine ran out of memory)" if name == "SIGKILL" else ""
            problem = f"the engine's process was killed by {name}{hint} during '{what}'"
        if words:
            problem += f"; the end of its log:\n{words}"
        return BackendError(problem, where=self._model, cure=cure)

    def _explained(self, error: BackendError) -> BackendError | OutputError:
        """The error itself, or an `OutputError` if the disk lacked space for an engine's temporary files.

        Runtimes report a full disk with various messages, as a truncated profile, or not at all.
        """
        folder = self._folder.parent
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
