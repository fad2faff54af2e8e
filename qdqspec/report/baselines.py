"""A case beside its committed baselines: notes, and tables of plain cells."""

from __future__ import annotations

from itertools import pairwise

from qdqspec.report.facts import LONG, Table
from qdqspec.types import BaselineFigure, Evidence, Interval, RegressionEvidence, TimeChange
from qdqspec.units import percent_text, plain

_STATES = {
    "written": "written by this run",
    "missing": "none for this device",
    "unlike": "not compared with",
    "damaged": "damaged",
}


def baseline_notes(found: Evidence) -> tuple[str, ...]:
    """For each baseline entry that the case was compared with: the change, and other differences."""
    said = []
    for name, seen in found.regression.items():
        if seen.change is not None:
            of = f" of {day}" if (day := day_text(seen.recorded)) else ""
            said += [f"{plain(name, 60)}: {_moved(seen.change)} against the baseline{of}"]
            said += map(plain, seen.notes)
    return tuple(said)


def baseline_pairs(before: Evidence, after: Evidence) -> tuple[str, ...]:
    """The change against the baseline in each of two runs. Each run was interleaved with its reference."""
    said = []
    for name in sorted(before.regression.keys() | after.regression.keys()):
        seen = {"A": before.regression.get(name), "B": after.regression.get(name)}
        told = [f"{_moved(one.change)} in {run}" for run, one in seen.items() if one and one.change]
        said += [f"{plain(name, 60)} against its baseline: {', '.join(told)}"] if told else []
    return tuple(said)


def day_text(recorded: str) -> str:
    """The date of an ISO 8601 time."""
    return plain(recorded, 40)[:10]


def _moved(change: TimeChange) -> str:
    """``+9.8 % (95 %: +7.8 % to +11.8 %)``."""
    found = change.builds
    return f"{percent_text(found.median - 1)} (95 %: {percent_text(found.low - 1)} to {percent_text(found.high - 1)})"


def baseline_tables(found: Evidence) -> list[Table]:
    """For each baseline entry: its figures on this device, the oldest first, this run, and other devices."""
    tables = []
    for name, seen in found.regression.items():
        rows = (*_held(seen), *_now(seen), *(_elsewhere(figure) for figure in seen.elsewhere))
        if rows:
            state = f", {_STATES[seen.state]}" if seen.state in _STATES else ""
            title = f"Baseline of {plain(name, 40)} ({plain(seen.file, 100)}{state})"
            headers = (
                "recorded",
                "tuned / reference",
                "95 % interval",
                "change",
                "differences from the baseline",
            )
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
