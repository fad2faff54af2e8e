"""Other programs: the cores they may use, the command of a Python module, and how programs are started and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from qdqspec.errors import BackendUnavailableError


def usable_cores() -> int:
    """The number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def own_cores() -> int:
    """The part of the usable cores that is left for this process beside the other processes of its test run."""
    return max(1, usable_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


class Interpreter(Protocol):
    """An interpreter of another environment: `qdqspec.backends.isolation.environment.Environment`."""

    @property
    def python(self) -> Path:
        """Its executable."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables that it needs."""


def python_command(
    module: str, *arguments: str, interpreter: Interpreter | None = None
) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module in a new interpreter, by default this one, and its environment variables."""
    if interpreter is None:
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        python, variables = sys.executable, {"PYTHONPATH": paths}
    else:
        python, variables = str(interpreter.python), dict(interpreter.variables)
    return [python, "-P", "-m", module, *arguments], {**os.environ, **variables}


def start_program(
    command: Sequence[str],
    *,
    output: IO[bytes],
    env: Mapping[str, str],
    install: str,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, without input; on Linux it is killed when this process ends.

    Raises `BackendUnavailableError`, with ``install`` as the remedy, if it cannot be run.
    """
    with warnings.catch_warnings():
        # From 3.12 on Python warns of code between fork and exec if there are threads; here it is one system call.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=ending_with_parent(),
                env=env,
            )
        except OSError as error:
            what = f"{command[0].rpartition('/')[2]} cannot be run: {error}"
            raise BackendUnavailableError(what, where=command[0], cure=install) from None


def end_of_log(log: IO[bytes], most_bytes: int) -> str:
    """The last bytes of an open file as text."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - most_bytes))
    return log.read().decode("utf-8", "replace")


def end_program(process: subprocess.Popen[bytes]) -> None:
    """Kill a program of `start_program` with all processes that it started, and wait for its end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending_with_parent() -> Callable[[], None] | None:
    """A function that lets Linux kill its process when the parent ends; ``None`` on other systems."""
    if sys.platform != "linux":
        return None
    libc, death_signal = ctypes.CDLL(None), 1  # PR_SET_PDEATHSIG
    return lambda: libc.prctl(death_signal, signal.SIGKILL, 0, 0, 0)
