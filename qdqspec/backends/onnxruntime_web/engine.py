"""The backend `onnxruntime-web`, and its engine: a session in a Node process, or in a browser that Node starts."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import external_data_helper

from qdqspec._core.arrays import Array, FrameStream, Header, WireClosedError
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.options import declare, one_of, option
from qdqspec._core.programs import end_of_log, start_program
from qdqspec.backends import _cpu
from qdqspec.backends._engine import TimedEngine, check_names, known_cure, profile_warmup
from qdqspec.backends._source import read_given, read_source
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities
from qdqspec.backends.onnxruntime import engine
from qdqspec.backends.onnxruntime.layers import graph_hash, layer_times, map_kernels, parse_profile
from qdqspec.backends.onnxruntime.ops import BLOCKED_4, capabilities
from qdqspec.backends.onnxruntime_web import install
from qdqspec.backends.onnxruntime_web.install import PACKAGE, pinned_version
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph import Model
from qdqspec.types import DeviceKey, LayerTime, Samples

_FLAGS = ("--single-threaded-gc", "--expose-gc")
_LAST_BYTES = 2000
_END_SECONDS = 5.0  # for a browser to end in order


class NodeProcess:
    """A process of Node with one model, which it runs itself or, with the path of a browser, in a page there.

    It ends with `close`, with this object, and with this process, which its caller ends after a time limit.
    """

    def __init__(self, model: Path, browser: str = "") -> None:
        node, _ = install.require_node()
        folder = install.require_package()
        self._model = model
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        scratch = TemporaryFolder()  # of the browser
        environment = {name: value for name, value in os.environ.items() if name != "NODE_OPTIONS"}
        ours, theirs = socket.socketpair()
        with theirs:
            worker = [str(install.HERE / "worker.mjs"), str(theirs.fileno()), str(folder), browser]
            try:
                self._process = start_program(
                    [node, *_FLAGS, *worker],
                    output=self._log,
                    env=environment | {"TMPDIR": str(scratch.path)},
                    install=install.NODE,
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                ours.close()
                self._log.close()
                scratch.close()
                raise
        self._stream = FrameStream(ours)
        patience = _END_SECONDS if browser else 0.0
        self._end = weakref.finalize(self, _end, self._process, self._stream, self._log, scratch, patience)
        self._thread: int | None = self._receive("start")[0]["thread"]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(
        self, request: Header, arrays: Mapping[str, Array] | None = None
    ) -> tuple[Header, dict[str, Array]]:
        """Send a request and wait for its answer. Raises `BackendError` for a refusal and a crash."""
        if hasattr(os, "sched_setaffinity") and self._thread is not None:
            # the thread that computes may use the processors that the calling thread may use
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._thread, os.sched_getaffinity(0))
        try:
            self._stream.send(request, arrays)
        except (WireClosedError, OSError):
            raise self._ended(request["do"]) from None
        answer, values = self._receive(request["do"])
        if "error" in answer:
            why = plainly(str(answer["error"]))
            raise BackendError(f"ONNX Runtime Web: {why}", where=self._model, cure=cure_for(why))
        return answer, values

    def close(self) -> None:
        """End the process; closing twice has no effect."""
        self._end()

    def _receive(self, what: str) -> tuple[Header, dict[str, Array]]:
        try:
            return self._stream.receive()
        except (WireClosedError, OSError):
            raise self._ended(what) from None
        except BaseException:  # an interrupt leaves an unread answer in the connection
            self.close()
            raise

    def _ended(self, what: str) -> BackendError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code, words = self._process.poll(), ""
        if not self._log.closed:
            log = end_of_log(self._log, _LAST_BYTES).splitlines()
            words = " | ".join([line.strip() for line in log if line.strip()][-6:])
        self.close()
        problem = f"Node ended with code {code} during '{what}': {plainly(words) if words else 'it printed nothing'}"
        return BackendError(problem, where=self._model, cure=cure_for(words))


def _end(
    process: subprocess.Popen[bytes],
    stream: FrameStream,
    log: IO[bytes],
    scratch: TemporaryFolder,
    patience: float,
) -> None:
    """End Node, which ends its browser when the connection is closed; ``patience`` is the time for that."""
    stream.close()
    if patience:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    process.kill()
    process.wait()
    log.close()
    scratch.close()


# "Can't create a session. ERROR_CODE: 1, ERROR_MESSAGE: Why"; an exception of wasm without a message is a number
_CODE = re.compile(r"ERROR_CODE: -?\d+, ERROR_MESSAGE: ")
_OUT_OF_MEMORY = re.compile(r"failed to allocate|out of memory|memory access out of bounds", re.IGNORECASE)


def plainly(text: str) -> str:
    """The message on one line."""
    text = _CODE.sub("", text).strip()
    if text.isdecimal():
        return f"an exception of the WebAssembly code without a message ({text})"
    return engine.plainly(RuntimeError(text))


def cure_for(text: str) -> str | None:
    """The remedy for an error, if known."""
    if _OUT_OF_MEMORY.search(text):
        return "take a smaller model: WebAssembly has 4 GiB of memory at most"
    return known_cure(text, engine.CURES)


# ---- the backend and its engine --------------------------------------------------------------------

# The package's own names.
LEVELS = {"all": "all", "extended": "extended", "basic": "basic", "off": "disabled"}
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRuntimeWebOptions:
    """The options after ``onnxruntime-web.`` in the configuration."""

    optimization: str = option(
        one_of(*LEVELS), "How far ONNX Runtime rewrites a model before it runs it.", "all"
    )
    browser: str = option(
        one_of(NONE, "chromium"),
        "The browser that runs the models, without a window; none: Node runs them.",
        NONE,
    )


OPTIONS = declare("onnxruntime-web", OnnxRuntimeWebOptions)


class OnnxRuntimeWeb:
    """The WebAssembly build with SIMD of ONNX Runtime in Node or headless Chromium, on one thread."""

    name = "onnxruntime-web"
    target = "onnxruntime-web-wasm"
    options = OPTIONS

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Report whether Node, the pinned packages and, if it is wanted, a browser are installed."""
        cpu = _cpu.detect()
        facts = {"cpu": cpu.product, "cores": str(cpu.cores)}
        try:
            if sys.platform == "win32":
                raise BackendUnavailableError("this backend needs Linux or macOS", cure="run it in WSL")
            facts = {"node": install.require_node()[1]} | facts
            package, folder = {PACKAGE: pinned_version()}, {"installed in": str(install.require_package())}
            facts = package | folder | facts
            try:
                path, version = install.require_browser()
                driver = f"{install.PLAYWRIGHT} {pinned_version(install.PLAYWRIGHT)}"
                facts["browser"] = f"Chromium {version} ({path}, {driver})"
            except BackendUnavailableError as error:
                if OPTIONS.of(options.extra).browser != NONE:
                    raise
                facts["browser"] = f"none ({error.what}; {error.cure})"
        except BackendUnavailableError as error:
            cure = error.cure or install.INSTALL
            return Availability(usable=False, why=error.what, install=cure, facts=facts)
        return Availability(usable=True, facts=facts)

    def device(self, options: BuildOptions) -> DeviceKey:
        """Processor, major version of Node or the browser, major.minor of the package: V8 compiles the kernels."""
        cpu, node = _cpu.detect(), install.require_node()[1]
        details = cpu.details(threads=1, **{PACKAGE: pinned_version()}, node=node)
        host = f"node{node.split('.')[0]}"
        if OPTIONS.of(options.extra).browser != NONE:
            details["chromium"] = install.require_browser()[1]
            host = f"chromium{details['chromium'].split('.')[0]}"
        return DeviceKey(key=cpu.key(PACKAGE, pinned_version(), host), details=details)

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:  # noqa: ARG002 - there is one device only
        """The operators that run in integers: the optimizer is that of ONNX Runtime, and so is the table.

        It is verified entry by entry against the installed package in ``tests/unit/backends/test_ort_web.py``.
        """
        return capabilities(BLOCKED_4)

    def build(self, model: Path, options: BuildOptions) -> OnnxRuntimeWebEngine:
        """Start Node or a browser and open a session; raise `BackendError` with ONNX Runtime's reason on one line."""
        return OnnxRuntimeWebEngine(model, options)


class OnnxRuntimeWebEngine(TimedEngine[NodeProcess, bool]):
    """A session in Node or in a page of a browser. The model file must exist as long as `layers` is used."""

    def __init__(self, model: Path, options: BuildOptions) -> None:
        if options.threads != 1:
            raise BackendError(
                f"onnxruntime-web runs on one thread, {options.threads} were asked for",
                where=model,
                cure="give --threads 1",
            )
        source, words = read_given(model), OPTIONS.of(options.extra)
        apart = (t for t in source.proto.graph.initializer if external_data_helper.uses_external_data(t))
        names = dict.fromkeys(external_data_helper.ExternalDataInfo(t).location for t in apart)
        request = {
            "do": "build",
            "model": str(model.absolute()),
            "optimization": LEVELS[words.optimization],
            "external": [[name, str((model.parent / name).absolute())] for name in names],
        }
        node = NodeProcess(model, install.require_browser()[0] if words.browser != NONE else "")
        super().__init__(model, node)
        self._inputs = source.inputs
        try:
            _, values = node.ask(request)
        except BaseException:
            self.close()
            raise
        self._optimized = onnx.load_from_string(values["optimized"].tobytes())
        self.graph_hash = graph_hash(self._optimized.graph, model.parent)
        for tensor in self._optimized.graph.initializer:  # only the structure is used after this
            tensor.ClearField("raw_data")

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        node, values = self._require_open(), self._checked(feeds)
        return node.ask({"do": "run"}, values)[1]

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use, and run until V8 has compiled all hot code."""
        values = self._checked(feeds)
        self._bound.pop(profile, None)
        self._require_open().ask({"do": "bind", "profile": profile}, values)
        self._bind(profile, True)

    def _timed(self, runs: int, warmup: int, profile: int) -> Samples:
        answer = self._asked("time", runs, warmup, profile)
        return Samples(wall_ms=tuple(answer["wall"]), cpu_ms=tuple(answer["cpu"]))

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per kernel, from a second session with profiling; its sum is scaled to the unprofiled latency."""
        events = parse_profile(self._asked("layers", runs, profile_warmup(runs), profile)["profile"])
        origins = map_kernels(self._optimized.graph, read_source(self.model))
        kernels = Model(self._optimized, path=self.model)
        total_ms = self._latency_ms(runs, profile)
        return layer_times(kernels, origins, events, runs=runs, total_ms=total_ms)

    def close(self) -> None:
        """End Node; closing twice has no effect."""
        if self._native is not None:
            self._native.close()
        super().close()

    def _asked(self, what: str, runs: int, warmup: int, profile: int) -> Header:
        """Node's answer on runs with the inputs of a profile."""
        self._require_bound(profile)
        request = {"do": what, "runs": runs, "warmup": warmup, "profile": profile}
        return self._require_open().ask(request)[0]

    def _checked(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        check_names(self._inputs, feeds, self.model)
        return {name: np.asarray(value) for name, value in feeds.items()}


backend = OnnxRuntimeWeb
