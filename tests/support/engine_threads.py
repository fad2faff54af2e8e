"""Engines served by threads of this process, where a test is about what is asked of them and not about processes.

A process for each engine is what a session has otherwise: that costs more than all that a small test asks of it.
What processes are for, crashes, hangs and their ends, is tested in ``unit/measurement``, ``contracts`` and ``faults``.
"""

from __future__ import annotations

import socket
import threading

from qdqspec.backends.base import backend_named
from qdqspec.measurement.isolate import Child, engine_folder
from qdqspec.measurement.worker import Service
from qdqspec.temporary import TemporaryFolder
from qdqspec.wire import FrameStream

PATIENCE = 60  # seconds for an answer that is under way when its engine is closed


class Threads:
    """A launcher like ``qdqspec.measurement.isolate.Zygote``."""

    is_running = True

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._own = TemporaryFolder()

    def start(self) -> Child:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        thread.start()

        def end() -> int:
            thread.join(PATIENCE)
            return 0

        return Child(FrameStream(ours), engine_folder(self._own.path), end)

    def close(self) -> None:
        self._own.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            Service(FrameStream(connection), backend_named(self._backend)).serve()
