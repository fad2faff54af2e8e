"""A case and its committed baselines, as tables of plain cells."""

from __future__ import annotations

from itertools import pairwise

from qdqspec.report.beside import day_text
from qdqspec.report.facts import LONG, Table
from qdqspec.types import BaselineFigure, Evidence, Interval, RegressionEvidence
from qdqspec.units import percent_text, plain

_STATES = {
    "written": "written by this run",
    "missing": "none for this device",
    "unlike": "not compared with",
    "damaged": "damaged",
}


def baseline_tables(found: Evidence) -> list[Table]:
    """For each baseline entry: its figures on this device, the oldest first, this run, and other devices."""
    tables = []
    for name, seen in found.regression.items():
        rows = (*_held(seen), *_now(seen), *(_elsewhere(figure) for figure in seen.elsewhere))
        if rows:
            state = f", {_STATES[seen.state]}" if seen.state in _STATES else ""
            title = f"Baseline of {plain(name, 40)} ({plain(seen.file, 100)}{state})"
            headers = ("recorded", "tuned / reference", "95 % interval", "change", "what was not as before")
            tables.append(Table(title, headers, rows, frozenset({1, 3})))
    return tables


def _held(seen: RegressionEvidence) -> list[tuple[str, ...]]:
    first, *later = seen.history or (None,)
    if first is None:
        return []
    moves = [percent_text(new.ratio.median / old.ratio.median - 1) for old, new in pairwise(seen.history)]
    return [
        (day_text(figure.recorded) or "undated", *_cells(figure.ratio), moved, _said(figure.changed))
        for figure, moved in zip((first, *later), ("", *moves), strict=True)
    ]


def _now(seen: RegressionEvidence) -> list[tuple[str, ...]]:
    if seen.state == "written" or seen.ratio is None:
        return []
    moved = "" if seen.change is None else percent_text(seen.change.builds.median - 1)
    return [("this run", *_cells(seen.ratio), moved, _said(seen.notes))]


def _elsewhere(figure: BaselineFigure) -> tuple[str, ...]:
    said = f"{plain(figure.device, 60)} {day_text(figure.recorded)}".rstrip()
    return (said, *_cells(figure.ratio), "", "another device")


def _cells(ratio: Interval) -> tuple[str, str]:
    return f"{ratio.median:.3f}", "" if ratio.low == ratio.high else f"{ratio.low:.3f} to {ratio.high:.3f}"


def _said(changed: tuple[str, ...]) -> str:
    return plain("; ".join(changed), LONG)
