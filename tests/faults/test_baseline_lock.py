"""Concurrent runs that renew entries of one baseline file do not lose entries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from baseline_entries import entry_of

from qdqspec.checks.baselines import read_baseline

RENEWING = """
import sys
from pathlib import Path
from qdqspec.checks.baselines import Entry, update_baseline
entry = Entry.model_validate_json(sys.argv[4])
sys.stdin.readline()  # all begin together
for number in range(int(sys.argv[3])):
    update_baseline(Path(sys.argv[1]), "a-cpu", {(f"{sys.argv[2]}-{number}", "regression"): entry})
"""
RUNS, ENTRIES = 4, 12


def test_a_baseline_file_contains_the_entries_of_all_concurrent_runs(tmp_path: Path) -> None:
    file = tmp_path / "__baselines__" / "net" / "a-cpu.json"
    entry = entry_of().model_dump_json()
    commands = [
        [sys.executable, "-c", RENEWING, str(file), f"run{n}", str(ENTRIES), entry] for n in range(RUNS)
    ]
    runs = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for command in commands]
    for run in runs:
        run.stdin.write("\n")
        run.stdin.close()
    assert [run.wait(120) for run in runs] == [0] * RUNS
    known = read_baseline(file)
    assert known is not None
    assert len(known.names()) == RUNS * ENTRIES
    assert [path.name for path in file.parent.iterdir()] == ["a-cpu.json"], "no other file is left"
