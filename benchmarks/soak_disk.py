"""Runs on a disk without enough space: ``python benchmarks/soak_disk.py [RUNS] [--backend fake] [--seed 0]``.

``pytest specs`` on a small real model runs on a small memory disk with a random amount of free space, or, if mounting
is not permitted, with a random limit on the size of a file. It must end with one message that states what to do, leave
no incomplete file, and record no failed candidate because of the disk. With enough space, the next run must have the
result of an undisturbed run, and must not repeat measured builds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from soak_project import Project, left_behind, unreadable, wait_for_children

DISK = 96 << 20  # bytes
CURES = ("free some space", "free some disk space")


@contextmanager
def small_disk(home: Path, *, limit: bool) -> Iterator[bool]:
    """Mount a memory disk on a folder; whether this was requested and possible."""
    mounted = (
        not limit
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(home)],
            capture_output=True,
            check=False,
        ).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(home)], check=False)


class Soak:
    """Runs one project with little space, and then with enough."""

    def __init__(self, project: Project, seed: int, *, mounted: bool) -> None:
        self.project = project
        self.mounted = mounted
        self.random = random.Random(seed)
        self.faults: list[str] = []
        self.full: Counter[str] = Counter()  # files that could not be written
        code, printed = project.run()
        assert code == 0, printed
        self.expected, self.own = project.outcome(), project.own
        self.used = self._used()
        project.clear()

    def _used(self) -> int:
        """The space used by a run, or the size of its largest file."""
        if self.mounted:
            return DISK - self._free()
        return max(path.stat().st_size for path in self.project.home.rglob("*") if path.is_file())

    def _free(self) -> int:
        room = os.statvfs(self.project.home)
        return room.f_bavail * room.f_frsize

    def one(self) -> None:
        """One run with little space, and the next run."""
        room = int(self.used * self.random.uniform(0, 1.2) ** 2)
        with self._only(room) as words:
            code, printed = self.project.run(**words)
        measured = self.project.journal()
        if code == 0:
            self.full["nothing: the space was sufficient"] += 1
        else:
            self._stuck(code, printed)
        self._again(measured)

    @contextmanager
    def _only(self, room: int) -> Iterator[dict[str, Callable[[], None]]]:
        if not self.mounted:
            yield {"before": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))}
            return
        ballast = self.project.home / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self._free() - room))
        try:
            yield {}
        finally:
            ballast.unlink()

    def _stuck(self, code: int, printed: str) -> None:
        if code not in (1, 2, 3, 4) or "Traceback" in printed or "INTERNALERROR" in printed:
            self.faults.append(f"it ended with {code}: {printed[-3000:]}")
        elif not any(cure in printed for cure in CURES):
            self.faults.append(f"the message does not state what to do: {printed[-3000:]}")
        self.full[self._what(printed)] += 1
        self.faults += unreadable(self.project) + [str(pid) for pid in wait_for_children(self.project)]
        failed = [line["error"] for line in self._lines(self.project.journal()) if line["status"] == "failed"]
        self.faults += [f"a candidate failed because of the disk: {error}" for error in failed]

    def _what(self, printed: str) -> str:
        for line in printed.splitlines():
            if "cannot be written" in line or "No space left" in line:
                return line.rpartition(": ")[0].rpartition(": ")[2].removeprefix("E   ")[:70] or line[:70]
        return "?"

    def _lines(self, journal: bytes) -> list[dict[str, object]]:
        return [json.loads(line) for line in journal.splitlines(keepends=True) if line.endswith(b"\n")]

    def _again(self, measured: bytes) -> None:
        """Check that a run with enough space has the expected result and continues the journal."""
        complete = measured[: measured.rfind(b"\n") + 1]
        code, printed = self.project.run()
        if code != 0:
            self.faults.append(f"with enough space it ended with {code}: {printed[-2000:]}")
        elif self.project.outcome() != self.expected and self.project.backend == "fake":
            self.faults.append("with enough space the result differs")
        if not self.project.journal().startswith(complete):
            self.faults.append("complete lines of the journal are lost")
        if self.project.own != self.own:
            self.faults.append("a file of the user's was changed")
        self.faults += left_behind(self.project)
        self.project.clear()


def main() -> None:
    """Run with little space and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=int, nargs="?", default=40)
    parser.add_argument("--backend", default="fake")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", action="store_true", help="limit the size of files instead of mounting")
    given = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as home, small_disk(Path(home), limit=given.limit) as mounted:
        soak = Soak(Project(home=Path(home), backend=given.backend), given.seed, mounted=mounted)
        how = "a memory disk" if mounted else "a limit on files"
        print(f"{how}; an undisturbed run takes {soak.used / 2**20:.1f} MiB", flush=True)
        for _ in range(given.runs):
            soak.one()
    print(f"\n{given.runs} runs with little space and as many after them, {time.monotonic() - start:.0f} s")
    for what, count in soak.full.most_common():
        print(f"  {count:4d} {what}")
    print("\n".join(soak.faults) or "no fault")
    raise SystemExit(bool(soak.faults))


if __name__ == "__main__":
    main()
