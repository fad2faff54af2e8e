"""What is said of a case beside its committed baseline."""

from __future__ import annotations

from qdqspec.types import Change, Evidence
from qdqspec.units import percent_text, plain


def baseline_notes(found: Evidence) -> tuple[str, ...]:
    """For each baseline entry that the case was compared with, how it fared, and what else is not as it was."""
    said = []
    for name, seen in found.regression.items():
        if seen.change is not None:
            of = f" of {day}" if (day := day_text(seen.recorded)) else ""
            said += [f"{plain(name, 60)}: {_moved(seen.change)} against the baseline{of}"]
            said += map(plain, seen.notes)
    return tuple(said)


def baseline_pairs(before: Evidence, after: Evidence) -> tuple[str, ...]:
    """How two runs fared beside their baselines. Each was interleaved with its reference, as the runs were not."""
    said = []
    for name in sorted(before.regression.keys() | after.regression.keys()):
        seen = {"A": before.regression.get(name), "B": after.regression.get(name)}
        told = [f"{_moved(one.change)} in {run}" for run, one in seen.items() if one and one.change]
        said += [f"{plain(name, 60)} against its baseline: {', '.join(told)}"] if told else []
    return tuple(said)


def day_text(recorded: str) -> str:
    """The day of an ISO 8601 time."""
    return plain(recorded, 40)[:10]


def _moved(change: Change) -> str:
    """``+9.8 % (95 %: +7.8 % to +11.8 %)``."""
    found = change.builds
    return f"{percent_text(found.median - 1)} (95 %: {percent_text(found.low - 1)} to {percent_text(found.high - 1)})"
