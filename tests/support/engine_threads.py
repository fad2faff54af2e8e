"""Engines served by threads of this process, for tests of the calls of engines, not of processes.

Otherwise a session starts a process for each engine, which takes longer than the rest of a small test.
"""

from __future__ import annotations

import socket
import threading

from qdqspec._core.arrays import FrameStream
from qdqspec._core.files import TemporaryFolder
from qdqspec.backends.base import backend_named
from qdqspec.backends.isolation.isolated import Child, engine_folder
from qdqspec.backends.isolation.worker import Service

PATIENCE = 60  # seconds to wait for a pending response when an engine is closed


class Threads:
    """A launcher like ``qdqspec.backends.isolation.isolated.Zygote``."""

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

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            Service(FrameStream(connection), backend_named(self._backend)).serve()
