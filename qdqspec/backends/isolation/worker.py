"""The worker processes of `qdqspec.backends.isolation.isolated`, which build and run engines.

Started with ``python -m``, in one of two roles. ``zygote``: load the backend's library once, then fork a child per
engine on request. ``single``: serve one engine in this process, where forking is not possible.

Safety rules: a child ends when its connection ends; the zygote ends when the connection to its parent ends, but kills
its children and removes the scratch folder first; interrupts of the terminal are ignored here, since the parent handles
them; nothing is written to the terminal.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from qdqspec._core.arrays import REDUCTIONS, Array, FrameStream, Header, WireClosedError, is_transferable
from qdqspec._core.programs import ending_with_parent
from qdqspec._core.records import from_data, to_data
from qdqspec.backends.base import PLAIN, Backend, BuildOptions, Engine, backend_named
from qdqspec.errors import BackendError, QdqspecError

LOG = "log.txt"  # standard output and standard error of a process, in its folder
CONTROL_LIMIT = 1 << 16  # bytes of one control message
MOST_TWICE = 64 << 20  # bytes of a model that is built twice, to be run between runs of itself

Reply = tuple[Header, Mapping[str, Array]]


class Service:
    """Answers the requests of one connection with one engine."""

    def __init__(self, stream: FrameStream, backend: Backend) -> None:
        self.stream = stream
        self.backend = backend
        self.engine: Engine | None = None
        self.where: Callable[[], AbstractContextManager[None]] = nullcontext  # context of timed runs
        # builds the model once more, to run it between runs of the engine; none for a large model or on a device
        self.build_other: Callable[[], Engine] | None = None
        self.other: Engine | None = None  # the second engine of the model, with the same inputs
        self.bound: dict[int, Mapping[str, Array]] = {}  # inputs by profile

    def serve(self) -> None:
        """Answer until the other end closes. Whatever the backend raises is sent as an answer."""
        with suppress(WireClosedError):
            while True:
                header, arrays = self.stream.receive()
                try:
                    self.stream.send(*getattr(self, f"_do_{header['do']}")(header, arrays))
                except WireClosedError:
                    raise
                except Exception as error:  # noqa: BLE001 - it belongs to the parent
                    self.stream.send({"error": error_to_json(error)})

    def _do_build(self, header: Header, _: Mapping[str, Array]) -> Reply:
        options = from_data(BuildOptions, header["options"])
        self.engine = self.backend.build(Path(header["model"]), options)
        if options.threads == 1 and self.backend.capabilities(options).one_processor:
            self.where = one_processor
            if Path(header["model"]).stat().st_size <= MOST_TWICE:
                other = replace(options, hashed=False)
                self.build_other = partial(self.backend.build, Path(header["model"]), other)
        return {"graph_hash": self.engine.graph_hash, "on_device": hasattr(self.engine, "device_memory")}, {}

    def _do_memory(self, _: Header, __: Mapping[str, Array]) -> Reply:
        held, free = getattr(self._built(), "device_memory")()  # noqa: B009 - not every engine has it
        return {"held": held, "free": free}, {}

    def _do_run(self, header: Header, arrays: Mapping[str, Array]) -> Reply:
        outputs = self._built().run(arrays)
        numeric = {name: value for name, value in outputs.items() if is_transferable(value)}
        if outputs and not numeric:
            raise BackendError(
                f"no output is a tensor of numbers ({', '.join(outputs)}), so there is nothing to compare",
                cure="give the model such an output",
            )
        if how := header.get("reduce"):
            numeric = {name: REDUCTIONS[how](value) for name, value in numeric.items()}
        return {}, numeric

    def _do_bind(self, header: Header, arrays: Mapping[str, Array]) -> Reply:
        self._built().bind(arrays, header["profile"])
        self.bound[header["profile"]] = arrays
        return {}, {}

    def _do_time(self, header: Header, _: Mapping[str, Array]) -> Reply:
        engine, runs, warmup, profile = self._built(), header["runs"], header["warmup"], header["profile"]
        with self.where():
            if not header["after_another"]:
                samples = engine.time(runs, warmup, profile)
            elif self.build_other is None:
                samples = engine.time(1, 0, profile) + engine.time(runs, warmup - 1, profile)
            else:
                warm = engine.time(runs, warmup, profile)
                if self.other is None:
                    self.other = self.build_other()
                    for number, feeds in self.bound.items():
                        self.other.bind(feeds, number)
                self.other.time(1, 0, profile)
                samples = engine.time(1, 0, profile) + warm
        return {"samples": to_data(samples)}, {}

    def _do_layers(self, header: Header, _: Mapping[str, Array]) -> Reply:
        with self.where():
            layers = self._built().layers(header["runs"], header["profile"])
        return {"layers": to_data(layers)}, {}

    def _built(self) -> Engine:
        if self.engine is None:
            raise BackendError("no engine is built in this process")
        return self.engine


def error_to_json(error: Exception) -> dict[str, Any]:
    """The content of an exception as JSON."""
    kind = type(error).__name__
    if isinstance(error, QdqspecError):
        return {"kind": kind, "what": error.what, "where": error.where, "cure": error.cure}
    if isinstance(error, MemoryError):
        return {"kind": kind, "what": f"the backend ran out of memory {error}".rstrip()}
    return {"kind": kind, "what": f"the backend failed: {kind}: {error}"}


# ---- role: zygote -------------------------------------------------------------------------------


def run_zygote(control: socket.socket, name: str, scratch: Path) -> None:
    """Load the backend, then fork and end children on request until the parent has ended."""
    children: set[int] = set()
    try:
        backend = backend_named(name)
        backend.probe()  # imports the heavy library
        importlib.import_module("qdqspec.graph.model")  # and onnx, with which backends read optimized models
        from_data(BuildOptions, to_data(PLAIN))  # the reader of options
        gc.freeze()  # objects loaded so far stay shared between the children
        with suppress(ConnectionError):
            while True:
                message, fds, _, _ = socket.recv_fds(control, CONTROL_LIMIT, 2)
                if not message:
                    break
                reply, *sent = (socket.socket(fileno=fd) for fd in fds)
                request, answer = json.loads(message), dict[str, Any]()
                if request["do"] == "count threads":
                    # forking is safe with one only, those of native libraries included; none is known without /proc
                    tasks = Path("/proc/self/task")
                    answer["threads"] = len([*tasks.iterdir()]) if tasks.is_dir() else 0
                elif request["do"] == "fork":
                    with sent[0] as connection:
                        try:
                            answer["pid"] = _fork(connection, control, backend, Path(request["folder"]))
                            children.add(answer["pid"])
                        except OSError as error:
                            answer["error"] = str(error)
                else:
                    children.discard(request["pid"])
                    answer["status"] = _end(request["pid"])
                with reply, suppress(ConnectionError):  # the request may have been interrupted
                    reply.send(json.dumps(answer).encode())
    finally:
        for pid in children:
            _end(pid)
        shutil.rmtree(scratch, ignore_errors=True)


def _fork(connection: socket.socket, control: socket.socket, backend: Backend, folder: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        control.close()
        if (request := ending_with_parent()) is not None:  # Linux kills this process when the zygote ends
            request()
            if os.getppid() != parent:  # it ended before the request took effect
                os._exit(1)
        _enter(folder)
        Service(FrameStream(connection), backend).serve()
        code = 0
    except BaseException:  # noqa: BLE001 - written to the log; the parent gets the exit code
        traceback.print_exc()
    finally:
        os._exit(code)  # do not unwind into the zygote's own loop and clean-up


def _end(pid: int) -> int:
    """Kill a child and return its wait status, which is that of the crash if it had already crashed."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


# ---- role: single -------------------------------------------------------------------------------


def run_single(connection: socket.socket, name: str, folder: Path) -> None:
    """Serve one engine, until the connection or standard input ends."""
    lifeline = os.dup(0)

    def exit_at_its_end() -> None:
        """End this process when the parent's end of the pipe closes, even during a hanging native call."""
        os.read(lifeline, 1)
        shutil.rmtree(folder.parent, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=exit_at_its_end, daemon=True).start()
    _enter(folder)
    stream = FrameStream(connection)
    try:
        backend = backend_named(name)
    except QdqspecError as error:
        stream.receive()
        stream.send({"error": error_to_json(error)})
        return
    Service(stream, backend).serve()


# ---- both ---------------------------------------------------------------------------------------


def _enter(folder: Path) -> None:
    """Use ``folder`` for temporary files and for all output of Python or native code."""
    tempfile.tempdir = str(folder)
    os.environ["TMPDIR"] = str(folder)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)


def main(arguments: list[str]) -> None:
    """``zygote BACKEND FD FOLDER`` or ``single BACKEND FD FOLDER``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role, name, number, folder = arguments
    if sys.platform == "win32":
        connection = socket.fromshare(os.read(0, CONTROL_LIMIT))
    else:
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core files
        with suppress(OSError):  # the kernel kills this process before the run
            Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
        connection = socket.socket(fileno=int(number))
    (run_zygote if role == "zygote" else run_single)(connection, name, Path(folder))


_SYSTEM = Path("/sys/devices/system/cpu")
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")  # Linux reports one of them if cores differ


@contextmanager
def one_processor() -> Iterator[None]:
    """Pin this thread to one core: the same one in every process with the same set of allowed cores.

    On a busy machine cores are not equally fast: another guest on the same core takes a third of one and nothing of the
    next, for seconds at a time, and a scheduler does not move processes that take turns. On a common core, disturbances
    affect both engines of a race (docs/decisions/0001). Does nothing if the system does not support it.
    """
    usable: set[int] = set()
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            usable = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {chosen(usable)})
    try:
        yield
    finally:
        if usable:
            with suppress(OSError):
                os.sched_setaffinity(0, usable)


def chosen(usable: Collection[int], system: Path = _SYSTEM) -> int:
    """The last of the fastest cores: interrupts are handled by the first."""

    def speed(number: int) -> int:
        """In an arbitrary unit; 0 if the system does not report it."""
        for name in _SPEEDS:
            with suppress(OSError, ValueError):
                return int((system / f"cpu{number}" / name).read_text(encoding="ascii"))
        return 0

    return max(usable, key=lambda number: (speed(number), number))


if __name__ == "__main__":
    main(sys.argv[1:])
