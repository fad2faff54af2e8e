"""A scheduler and workers as processes on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

LEASE = 4.0  # seconds; short, so that a fault is noticed within a test
PATIENCE = 90.0  # for the start of processes on a loaded machine


@dataclass
class Processes:
    """Processes started by the tests. Each prints one JSON object when it is ready."""

    folder: Path
    address: str = ""
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, *words: str, prelude: str = "") -> dict:
        # Guarded, because the Nanny's process imports the main module again.
        run = f"import sys\n    from qdqspec.cli import main\n    sys.exit(main({list(words)!r}))"
        program = f"if __name__ == '__main__':\n    {prelude or 'pass'}\n    {run}\n"
        file = self.folder / f"process{len(self.started)}.py"
        file.write_text(program)
        with (self.folder / f"process{len(self.started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=log, cwd=self.folder, text=True
            )
        self.started.append(process)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                return json.loads("".join(lines))
        raise AssertionError((self.folder / f"process{len(self.started) - 1}.log").read_text()[-3000:])

    def worker(self, name: str, *words: str, prelude: str = "") -> dict:
        folder = str(self.folder / name)
        return self.start("worker", self.address, "--json", "--folder", folder, *words, prelude=prelude)

    def listed(self) -> list[dict]:
        """The workers that the scheduler knows."""
        words = [sys.executable, "-m", "qdqspec", "cluster", "list", self.address, "--json"]
        run = subprocess.run(words, cwd=self.folder, check=True, capture_output=True, text=True)
        return json.loads(run.stdout)["workers"]

    def stop(self, first: int = 0) -> None:
        """Stop the processes from this one on, the latest first."""
        ended, self.started = self.started[first:], self.started[:first]
        for process in reversed(ended):
            process.send_signal(signal.SIGTERM)
        for process in reversed(ended):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def wait_for(what, seconds: float = PATIENCE) -> None:
    """Wait until ``what()`` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
