"""Notes that compare a case with its committed baseline."""

from __future__ import annotations

from qdqspec.types import Evidence, TimeChange
from qdqspec.units import percent_text, plain


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
