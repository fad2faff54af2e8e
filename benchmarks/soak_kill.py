"""Runs killed at random points: ``python benchmarks/soak_kill.py [KILLS] [--backend fake] [--seed 0]``.

``pytest specs`` on a small real model, with search, cache, results, reports and baseline, is killed by SIGKILL and
started again until it ends; then all its files are removed and it begins again. Half of the kills are at a random time,
half at a random change of the file system (an open for writing, a rename, a removal), which includes the short moments
when reports, cache and baselines are written.

After every kill: no process of the run is left, every file is valid, and no complete line of the journal is lost or
changed. After every run that ends: no incomplete file is left, the user's files are unchanged, and on the simulated
device the result is that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from soak_project import Project, left_behind, unreadable, wait_for_children

from qdqspec._core.locks import RunLock
from qdqspec.errors import QdqspecError

# Counts changes of the file system in the process of the run, and kills it at the requested one.
PROGRAM = """
import os, signal, sys
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
left = [int(os.environ["SOAK_KILL_AT"])]
def hook(event, args):
    changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile")
    if changes or (event == "open" and isinstance(args[2], int) and args[2] & writing):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
import pytest
code = pytest.main(sys.argv[1:])
with open(os.environ["SOAK_COUNT"], "w") as file:
    file.write(str(int(os.environ["SOAK_KILL_AT"]) - left[0]))
sys.exit(code)
"""
NEVER = 10**9


class Soak:
    """Kills runs of one project and checks their files."""

    def __init__(self, project: Project, seed: int) -> None:
        self.project = project
        self.random = random.Random(seed)
        self.own = project.own
        self.faults: list[str] = []
        self.met: Counter[str] = Counter()  # phases in which runs were killed
        self.kills = self.ended = 0
        self.changes, self.seconds = self._undisturbed()
        self.expected = project.outcome()
        project.clear()

    def _undisturbed(self) -> tuple[int, float]:
        start = time.monotonic()
        code, printed = self._run_to(NEVER)
        assert code == 0, printed
        return int((self.project.home / "count").read_text()), time.monotonic() - start

    def _run_to(self, change: int) -> tuple[int, str]:
        words = {"SOAK_KILL_AT": change, "SOAK_COUNT": self.project.home / "count"}
        return self.project.run(python=("-c", PROGRAM), words=words)

    def kill(self, total: int) -> None:
        """Kill this number of runs, and let the last one end."""
        while self.kills < total or self.project.journal():
            before = self.project.journal()
            code, printed = self._one(final=self.kills >= total)
            self._lines_kept(before)
            if code == -9:
                self.kills += 1
                self._after_a_kill()
            else:
                self._after_the_end(code, printed)

    def _one(self, *, final: bool) -> tuple[int, str]:
        if final:
            return self._run_to(NEVER)
        if self.random.random() < 0.5:
            return self._run_to(self.random.randrange(1, self.changes + 1))
        return self.project.run(self.random.uniform(0, self.seconds))

    def _lines_kept(self, before: bytes) -> None:
        """Check that complete lines are unchanged in the journal or a renamed one."""
        complete = before[: before.rfind(b"\n") + 1]
        now = [self.project.journal()]
        now += [path.read_bytes() for path in self.project.results.glob("trials.previous*.jsonl")]
        if not any(journal.startswith(complete) for journal in now):
            self.faults.append(
                f"{len(complete.splitlines())} complete lines of a journal are lost or changed"
            )

    def _after_a_kill(self) -> None:
        if left := wait_for_children(self.project):
            self.faults.append(f"processes of a killed run remain: {left}")
        self.faults += unreadable(self.project)
        if self.project.own != self.own:
            self.faults.append("a file of the user's was changed")
        self.met[self._where()] += 1
        try:
            if self.project.results.exists():
                with RunLock(self.project.results):
                    pass
        except QdqspecError as error:
            self.faults.append(f"a killed run holds a lock: {error}")

    def _where(self) -> str:
        results, home = self.project.results, self.project.home
        phases = self.project.journal().count(b'"phase":"confirm"')
        if not self.project.journal():
            return "before the first trial"
        if not (results / "tuned.onnx").exists():
            return "search"
        if not phases:
            return "writing results and cache"
        if not (results / "result.json").exists() or not (home / "run.json").exists():
            return "measuring the baseline, writing reports"
        return "at the end"

    def _after_the_end(self, code: int, printed: str) -> None:
        self.ended += 1
        if code != 0:
            self.faults.append(f"a run ended with {code}: {printed[-2000:]}")
        self.faults += unreadable(self.project) + [
            f"left behind: {path}" for path in left_behind(self.project)
        ]
        if self.project.backend == "fake" and self.project.outcome() != self.expected:
            self.faults.append(f"another result: {self.project.outcome()} and not {self.expected}")
        self.project.clear()


def main() -> None:
    """Kill runs and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("--backend", default="fake")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        soak = Soak(Project(home=Path(home), backend=given.backend), given.seed)
        print(f"undisturbed: {soak.seconds:.1f} s, {soak.changes} changes of the file system", flush=True)
        soak.kill(given.kills)
    print(f"\n{soak.kills} kills, {soak.ended} runs to the end, {time.monotonic() - start:.0f} s")
    for where, count in soak.met.most_common():
        print(f"  {count:4d} {where}")
    print("\n".join(soak.faults) or "no fault")
    raise SystemExit(bool(soak.faults))


if __name__ == "__main__":
    main()
