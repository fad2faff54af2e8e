"""A worker process that serves one engine, with functions to start and end it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qdqspec.files import explained
from qdqspec.wire import FrameStream

LOG = "log.txt"
_TAIL_BYTES = 4096
_TAIL_LINES = 8

# A single thread until an engine is built: forking a process with threads may deadlock the child. OpenBLAS starts its
# threads when numpy is imported. ONNX Runtime from 1.31 on starts a telemetry thread on import, also on Linux, which
# sends events over the network; another reason to disable it here.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}


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

    def last_words(self) -> str:
        """The last lines of the log."""
        return last_words(self.folder)

    def bury(self) -> int:
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


def last_words(folder: Path) -> str:
    """The last log lines of the process with this folder."""
    lines = [line.rstrip() for line in _text_of(folder / LOG)[-_TAIL_BYTES:].splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:])


def _text_of(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace")
    return ""
