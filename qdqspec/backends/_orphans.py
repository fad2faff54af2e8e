"""Ends the programs that a backend starts when the process that started them ends."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl


def dying_with_parent() -> Callable[[], None] | None:
    """For ``preexec_fn``: on Linux the program is killed when this process ends; elsewhere None."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
