"""Runs many specs as one pytest run: ``python benchmarks/zoo.py [--models 50] [--workers 0 2] [--backend fake]``.

One spec is written for each of this number of small models of four families, all different files, in one folder. For
each number of workers of pytest-xdist (0: without), ``pytest`` runs once with an empty cache and once with the cache of
that run. Printed are exit code, wall time, seconds per case, the largest memory of one process and the number of
printed lines. A run without faults has the exit code 1 (the last spec demands a speedup that no model has), one table
with one row per case, and each case in the run record, in the .csv and .html report and in a separate results folder.
The second run has no search.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from families import mobilenet, resnet, transformer
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from chains import chain_model

SPEC = """\
qdqspec: 1
model: models/{name}.onnx
tune: {{trials: {trials}}}
checks:
  - {{kind: speedup, min: {least}}}
  - {{kind: parity, min_sqnr_db: 10}}
"""
IMPOSSIBLE = 1000  # a speedup that no model has


def models(count: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Distinct small models: the families in turn, each with another depth and width."""
    for number in range(count):
        family, step = number % 4, number // 4
        name = f"{('resnet', 'mobilenet', 'transformer', 'chain')[family]}_{number:03}"
        if family == 0:
            yield name, resnet((1,) * (1 + step % 3), width=8 + 4 * step, side=16)
        elif family == 1:
            yield name, mobilenet((1,) * (1 + step % 3), width=8 + 4 * step, side=16)
        elif family == 2:
            yield name, transformer(1 + step % 2, width=16 + 8 * step, tokens=16)
        else:
            yield name, chain_model(step)


def write_specs(folder: Path, count: int, trials: int) -> list[str]:
    """Write the models and one spec each, of which the last one fails; the names."""
    (folder / "models").mkdir(parents=True)
    names = []
    for name, model in models(count):
        onnx.save(model, folder / "models" / f"{name}.onnx")
        names.append(name)
    for name in names:
        least = IMPOSSIBLE if name == names[-1] else 1.0
        (folder / f"{name}.qdq.yaml").write_text(SPEC.format(name=name, trials=trials, least=least))
    return names


@dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of a run."""

    code: int
    seconds: float
    megabytes: float  # the largest resident memory of one process
    printed: str


def run(home: Path, backend: str, workers: int) -> Run:
    """Run pytest once on the folder, with all reports."""
    words = ["specs", f"--qdq-backend={backend}", "-p", "no:cacheprovider", "--qdq-json=run.json"]
    words += [
        "--qdq-report=report.html",
        "--qdq-report=report.csv",
        *(["-n", str(workers)] if workers else []),
    ]
    begin = time.perf_counter()
    with (home / "printed.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words],
            cwd=home,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
        most: list[float] = [0.0]
        watching = threading.Thread(target=_watch, args=(process, most))
        watching.start()
        code = process.wait()
        seconds = time.perf_counter() - begin
        watching.join()
    return Run(
        code=code,
        seconds=seconds,
        megabytes=most[0],
        printed=(home / "printed.txt").read_text(encoding="utf-8"),
    )


def _watch(process: subprocess.Popen[bytes], most: list[float]) -> None:
    """The largest peak of pytest and its workers, whose processes are its children."""
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            pids = [str(process.pid), *children.read_text().split()]
        except OSError:
            return
        for pid in pids:
            try:
                found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            except OSError:
                continue
            if found:
                most[0] = max(most[0], int(found.group(1)) / 1000)
        time.sleep(0.2)


def faults(home: Path, names: list[str], found: Run, *, cached: bool) -> list[str]:
    """The deviations from the requirements in the docstring of the module."""
    wrong = []
    if found.code != 1:
        wrong.append(f"exit code {found.code}, not 1")
    rows = Counter(re.findall(r"^(\w+)::default +[\d.]+ ", found.printed, re.MULTILINE))
    if rows != Counter(names):
        wrong.append(f"rows of the table: {_difference(names, rows)}")
    tables = len(re.findall(r"^case +", found.printed, re.MULTILINE))
    if tables != 1:
        wrong.append(f"{tables} tables")
    record = json.loads((home / "run.json").read_text(encoding="utf-8"))
    cases = Counter(each["case"].partition("::")[0] for each in record["cases"])
    if cases != Counter(names):
        wrong.append(f"run record: {_difference(names, cases)}")
    sources = Counter(each["search"]["provenance"]["source"] for each in record["cases"])
    if cached and "measured" in sources:
        wrong.append(f"searched again: {dict(sources)}")
    listed = Counter(row["spec"] for row in csv.DictReader((home / "report.csv").open()))
    if set(listed) != set(names):
        wrong.append(f"report.csv: {_difference(names, listed)}")
    page = (home / "report.html").read_text(encoding="utf-8")
    if missing := [name for name in names if f"{name}::default" not in page]:
        wrong.append(f"report.html lacks {missing}")
    for name in names:
        folder = home / "reports" / name / "default"
        if not (folder / "tuned.onnx").is_file():
            wrong.append(f"{folder} has no tuned.onnx")
    return wrong


def _difference(names: list[str], found: Counter[str]) -> str:
    twice = [name for name, count in found.items() if count > 1]
    return f"{sum(found.values())}, missing {sorted({*names} - {*found})}, more than once {twice}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--backend", default="fake")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="folder for the specs, reports and output of the runs")
    asked = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as place:
        for workers in asked.workers:
            home = (asked.keep or Path(place)) / f"workers{workers}"
            home.mkdir(parents=True)
            names = write_specs(home / "specs", asked.models, asked.trials)
            for turn in ("searched", "cached"):
                found = run(home, asked.backend, workers)
                shutil.copy(home / "printed.txt", home / f"printed-{turn}.txt")
                wrong += [
                    f"{workers} workers, {turn}: {fault}"
                    for fault in faults(home, names, found, cached=turn == "cached")
                ]
                rows.append(
                    (
                        workers,
                        turn,
                        found.code,
                        found.seconds,
                        found.seconds / len(names),
                        found.megabytes,
                        found.printed.count("\n"),
                    )
                )
                print(rows[-1], file=sys.stderr)
    heads = ("workers", "", "exit code", "seconds", "a case", "most MB of a process", "lines printed")
    print(f"{asked.models} models, backend {asked.backend}, {asked.trials} trials each")
    print(tabulate(rows, heads, floatfmt=".1f"))
    print("\n".join(wrong) or "no fault")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
