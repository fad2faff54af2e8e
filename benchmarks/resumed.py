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

GRACE_S = 5.0  # for a process to end after it was asked to
ROW = "--row"  # the option of a benchmark by which its own child writes one row


Row = TypeVar("Row")


def parser_of(doc: str | None, *, limit_s: float) -> argparse.ArgumentParser:
    """A parser with the options of each benchmark by rows."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="only these, by commas")
    parser.add_argument(
        "--limit", type=float, default=limit_s, metavar="SECONDS", help=f"of a row (default: {limit_s:g})"
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
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep rows and tuned models here")
    return parser


def words_of(arguments: argparse.Namespace, name: str) -> list[str]:
    """The words by which the child of one model gets the options of a `tuning_parser`."""
    given = {"only": name, **{key: getattr(arguments, key) for key in ("minutes", "limit", "results")}}
    named = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return [*map(str, arguments.folders), *named]


def write_row(path: Path, rows: TypeAdapter[Row], row: Row) -> int:
    """Write the row of a child; returns its exit status."""
    path.write_text(json.dumps(rows.dump_python(row, mode="json")))
    return 0


def kept_rows(path: Path) -> dict[str, Any]:
    """The rows in a file, by their keys; none where there is no file."""
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
    """Run ``script`` once for each key that ``path`` has no row of, with these words; all rows in the order wanted.

    ``failed`` makes the row of a key from the reason. The ``table`` of each row goes to standard error. After
    ``bound_s`` no further row begins: those that are missing are left out.
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
    """Run a command with all its children for so long at most; why it did not end well, or an empty text."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end with this process
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
    """End a process with its children, that it may end its own; what it wrote."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        written, _ = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        written, _ = process.communicate()
    return written
