"""A scheduler and workers as processes on this machine.

The tests wait for events: limits are long enough for a loaded machine, and a test of a limit shortens it when it
injects the fault.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from json_audit import audit
from processes import wait_until

PATIENCE = 600.0  # the limit for events that are certain to happen
LIMITS = (
    "from qdqspec.app.cluster import client, worker; "
    f"worker._START_S = worker._REACH_S = client._CONNECT = {PATIENCE}"
)
wait_for = partial(wait_until, seconds=PATIENCE)
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass
class Processes:
    """Processes started by the tests. Each prints one JSON object when it is ready."""

    folder: Path
    address: str = ""
    started: list[subprocess.Popen] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A separate folder, because locks of simulated devices in the user's folder are shared with other runs.
        (self.folder / "temporary").mkdir()

    def start(self, *words: str, prelude: str = "pass", variables: Mapping[str, str] = _NOTHING) -> dict:
        # The guard is needed because the process of the Nanny imports the main module again.
        run = f"import sys\n    from qdqspec.app.cli import main\n    sys.exit(main({list(words)!r}))"
        program = f"if __name__ == '__main__':\n    {LIMITS}\n    {prelude}\n    {run}\n"
        file = self.folder / f"process{len(self.started)}.py"
        file.write_text(program)
        with (self.folder / f"process{len(self.started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(file)],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                text=True,
                env={**os.environ, "TMPDIR": str(self.folder / "temporary"), **variables},
            )
        self.started.append(process)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                found: dict = json.loads("".join(lines))
                assert "error" not in found, found["error"]  # with --json an error is on standard output
                audit(found, "")
                return found
        raise AssertionError((self.folder / f"process{len(self.started) - 1}.log").read_text()[-3000:])

    def worker(self, name: str, *words: str, **more: object) -> dict:
        folder = str(self.folder / name)
        return self.start("worker", self.address, "--json", "--folder", folder, *words, **more)

    def connected(self, count: int) -> None:
        """Wait until this number of workers is connected; a killed worker is started again."""
        from qdqspec.app.cluster.address import Address
        from qdqspec.app.cluster.client import Cluster

        with closing(Cluster(Address.parse(self.address), self.folder)) as cluster:
            wait_for(lambda: len(cluster.workers()) == count)

    def stop(self, first: int = 0) -> None:
        """Stop the processes from this one on, the latest first."""
        ended, self.started = self.started[first:], self.started[:first]
        for process in reversed(ended):
            process.send_signal(signal.SIGTERM)
        for process in reversed(ended):
            assert process.wait(60) == 130, "SIGTERM ends a process in order, as Ctrl-C does"
            process.stdout.close()
