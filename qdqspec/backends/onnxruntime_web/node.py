"""Starts Node with the worker of this folder, alone or with a browser, sends it requests and explains its messages."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from qdqspec._core.arrays import Array, FrameStream, Header, WireClosedError
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.programs import end_of_log, start_program
from qdqspec.backends.onnxruntime import engine
from qdqspec.backends.onnxruntime_web.install import HERE, NODE, require_node, require_package
from qdqspec.errors import BackendError

_FLAGS = ("--single-threaded-gc", "--expose-gc")
_LAST_BYTES = 2000
_END_SECONDS = 5.0  # for a browser to end in order


class NodeProcess:
    """A process of Node with one model, which it runs itself or, with the path of a browser, in a page there.

    It ends with `close`, with this object, and with this process, which its caller ends after a time limit.
    """

    def __init__(self, model: Path, browser: str = "") -> None:
        node, _ = require_node()
        folder = require_package()
        self._model = model
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        scratch = TemporaryFolder()  # of the browser
        environment = {name: value for name, value in os.environ.items() if name != "NODE_OPTIONS"}
        ours, theirs = socket.socketpair()
        with theirs:
            command = [node, *_FLAGS, str(HERE / "worker.mjs"), str(theirs.fileno()), str(folder), browser]
            try:
                self._process = start_program(
                    command,
                    output=self._log,
                    env=environment | {"TMPDIR": str(scratch.path)},
                    install=NODE,
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
        self._follow_processors()
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

    def _follow_processors(self) -> None:
        """Let the thread that computes run on the processors that the calling thread may use."""
        if hasattr(os, "sched_setaffinity") and self._thread is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._thread, os.sched_getaffinity(0))

    def _ended(self, what: str) -> BackendError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code, words = self._process.poll(), _last_words(self._log)
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


def _last_words(log: IO[bytes]) -> str:
    if log.closed:
        return ""
    lines = [line.strip() for line in end_of_log(log, _LAST_BYTES).splitlines() if line.strip()]
    return " | ".join(lines[-6:])


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
    return engine.cure_for(text)
