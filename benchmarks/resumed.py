"""Benchmarks that take long: each row in a process of its own with a time limit, kept in a file as soon as it is there.

A benchmark that is started again with the same file goes on with the rows that are missing. A process that ends without
a row, or does not end in time, is a row with the reason in place of figures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 5.0  # for a process to end after it was asked to
ROW = "--row"  # the option of a benchmark by which its own child writes one row


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
    *,
    limit_s: float,
    failed: Callable[[str, str], Any],
    show: Callable[[Any], None],
) -> dict[str, Any]:
    """Run ``script`` once for each key that ``path`` has no row of, with these words; all rows in the order wanted.

    ``failed`` makes the row of a key from the reason.
    """
    rows = kept_rows(path)
    for key, words in wanted.items():
        if key not in rows:
            made = path.with_name(f"{path.stem}.row.json")
            made.unlink(missing_ok=True)
            why = run_limited([sys.executable, str(script), *words, ROW, str(made)], limit_s)
            rows[key] = json.loads(made.read_text()) if made.is_file() else failed(key, why)
            made.unlink(missing_ok=True)
            keep_rows(path, rows)
        show(rows[key])
    return {key: rows[key] for key in wanted}


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
