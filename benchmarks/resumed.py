"""Support for long benchmarks: each row has a separate process with a time limit, and is stored when it is complete.

Contains the common options, writing a row in the child process, and collecting all rows.

A benchmark that is started again with the same file continues with missing rows. If a process ends without a row, or
does not end in time, its row contains the reason instead of figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

GRACE_S = 5.0  # seconds to wait for the end of a terminated process
ROW = "--row"  # the option by which a child process writes one row


Row = TypeVar("Row")


def parser_of(doc: str | None, *, limit_s: float) -> argparse.ArgumentParser:
    """A parser with the options of each benchmark by rows."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], help="only these, separated by commas"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=limit_s,
        metavar="SECONDS",
        help=f"seconds for a row (default: {limit_s:g})",
    )
    parser.add_argument(ROW, type=Path, help=argparse.SUPPRESS)
    return parser


def tuning_parser(doc: str | None, *, limit_s: float, minutes: float) -> argparse.ArgumentParser:
    """A parser of a benchmark that tunes the models of folders."""
    parser = parser_of(doc, limit_s=limit_s)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of models with data")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"of each search (default: {minutes:g})"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder for rows and tuned models")
    return parser


def words_of(arguments: argparse.Namespace, name: str) -> list[str]:
    """The arguments that pass the options of a `tuning_parser` to the child process of one model."""
    given = {"only": name, **{key: getattr(arguments, key) for key in ("minutes", "limit", "results")}}
    named = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return [*map(str, arguments.folders), *named]


def write_row(path: Path, rows: TypeAdapter[Row], row: Row) -> int:
    """Write the row of a child process; its exit status."""
    path.write_text(json.dumps(rows.dump_python(row, mode="json")))
    return 0


def kept_rows(path: Path) -> dict[str, Any]:
    """The rows of a file by key; none without a file."""
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def keep_rows(path: Path, rows: Mapping[str, Any]) -> None:
    """Replace the file by one with these rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.replace(path)


def run_rows(
    script: Path,
    wanted: Mapping[str, Sequence[str]],
    path: Path,
    rows: TypeAdapter[Row],
    *,
    limit_s: float,
    failed: Callable[[str, str], Row],
    table: Callable[[Sequence[Row]], str],
    bound_s: float = math.inf,
) -> list[Row]:
    """Run ``script`` with these arguments for each key without a row in ``path``; all rows in the given order.

    ``failed`` makes the row of a key from the reason. The ``table`` of each row goes to standard error. After
    ``bound_s`` no further row is started, and missing rows are omitted.
    """
    kept = kept_rows(path)
    print(f"{len(wanted)} rows, {len(kept.keys() & wanted)} of them known", file=sys.stderr)
    found = []
    started = time.monotonic()
    for key, words in wanted.items():
        if key not in kept:
            if time.monotonic() - started > bound_s:
                continue
            made = path.with_name(f"{path.stem}.row.json")
            made.unlink(missing_ok=True)
            why = run_limited([sys.executable, str(script), *words, ROW, str(made)], limit_s)
            missing = None if made.is_file() else rows.dump_python(failed(key, why), mode="json")
            kept[key] = missing or json.loads(made.read_text())
            made.unlink(missing_ok=True)
            keep_rows(path, kept)
        found.append(rows.validate_python(kept[key]))
        print(table(found[-1:]), file=sys.stderr, flush=True)
    return found


def run_limited(words: Sequence[str], limit_s: float, log: Path | None = None) -> str:
    """Run a command and its children with a time limit; the reason of a failure, or an empty text."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children end together with this process
    started = time.monotonic()
    process = subprocess.Popen(
        [*words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        written, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        written = _ended(process)
        why = f"stopped after {time.monotonic() - started:.0f} s"
    except BaseException:
        _ended(process)
        raise
    else:
        lines = [line.strip() for line in written.splitlines() if line.strip()]
        why = f"exit {process.returncode}: {lines[-1] if lines else ''}"[:160] if process.returncode else ""
    if log is not None:
        log.write_text(written)
    return why


def _ended(process: subprocess.Popen[str]) -> str:
    """Terminate a process, which may terminate its children; its output."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        written, _ = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        written, _ = process.communicate()
    return written
