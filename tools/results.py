"""Writes benchmarks/RESULTS.md from benchmarks/results: the figures of the last run of each benchmark.

    python tools/results.py
    python benchmarks/gate.py 300 | python tools/results.py record gate "python benchmarks/gate.py 300" \
        --figure "unchanged models that fail" "0.0 %" --bar "at most 1 %"

Each file of benchmarks/results is one benchmark: its command, date, version, machine, figures with their bars, and the
tables that the command printed. `record` replaces the file by the run on standard input.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "RESULTS.md"
HEAD = """# Results

The last run of each benchmark, one row a figure. Ratios are times over float, interleaved, on thread CPU time, one
thread, if nothing else is stated. Tables of whole runs are in `benchmarks/results`. This page is written by
`python tools/results.py`.
"""


def main() -> int:
    """Record a run, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="verb")
    record = commands.add_parser(
        "record", help="replace the file of a benchmark by the run on standard input"
    )
    record.add_argument("name")
    record.add_argument("command")
    record.add_argument("--figure", nargs=2, action="append", default=[], metavar=("FIGURE", "VALUE"))
    record.add_argument("--bar", action="append", default=[], help="of each figure, in their order")
    arguments = parser.parse_args()
    if arguments.verb == "record":
        _record(arguments)
    PAGE.write_text(page())
    return 0


def page() -> str:
    """The page of all benchmarks."""
    parts = [HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        run = json.loads(path.read_text())
        rows = [(each["figure"], each["value"], each.get("bar", "")) for each in run["figures"]]
        where = ", ".join(run[key] for key in ("date", "version", "machine") if run.get(key))
        table = tabulate(rows, ("figure", "value", "bar"), tablefmt="pipe", disable_numparse=True)
        parts.append(f"## {path.stem}\n\n`{run['command']}`: {where}.\n\n{_narrow(table)}\n")
    return "\n".join(parts)


def _narrow(table: str) -> str:
    """The table without the spaces that align its columns."""
    return re.sub(r":?-{3,}:?", "---", re.sub(r" {2,}\|", " |", table))


def _record(arguments: argparse.Namespace) -> None:
    bars = [*arguments.bar, *[""] * len(arguments.figure)]
    figures = [
        {"figure": figure, "value": value, **({"bar": bar} if bar else {})}
        for (figure, value), bar in zip(arguments.figure, bars, strict=False)
    ]
    version = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    run = {
        "command": arguments.command,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "version": version.stdout.strip(),
        "machine": machine(),
        "figures": figures,
        "tables": tables_of(sys.stdin.read()),
    }
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")


def machine() -> str:
    """The processor, its cores and the version of ONNX Runtime."""
    from importlib.metadata import version

    from qdqspec.backends._cpu import detect

    cpu = detect()
    return f"{cpu.slug}, {cpu.cores} cores, ONNX Runtime {version('onnxruntime')}"


def tables_of(text: str) -> list[list[dict[str, Any]]]:
    """The Markdown tables of a text: a list of rows each, by column."""
    found, rows = list[list[list[str]]](), list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            found.append(rows)
            rows = []
    return [[dict(zip(head, row, strict=False)) for row in body] for head, _, *body in found]


if __name__ == "__main__":
    sys.exit(main())
