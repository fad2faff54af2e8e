"""Starts the programs of backends so that they end when the process that started them ends."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from qdqspec.errors import BackendUnavailableError

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl


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
                preexec_fn=_dying_with_parent(),
                env=env,
            )
        except OSError as error:
            name = command[0].rpartition("/")[2]
            raise BackendUnavailableError(
                f"{name} cannot be run: {error}", where=command[0], cure=install
            ) from None


def _dying_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
