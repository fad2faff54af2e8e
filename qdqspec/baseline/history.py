"""The present and past figures of the baselines of a spec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from qdqspec.baseline.store import Entry, Figure, Name, read_baseline
from qdqspec.errors import StateError
from qdqspec.types import BaselineFigure


def history_of(entry: Entry, device: str) -> tuple[BaselineFigure, ...]:
    """The past figures of an entry, the oldest first, and its present one."""
    return tuple(_figure(figure, device) for figure in (*entry.history, entry))


def figures_elsewhere(file: Path, name: Name) -> tuple[BaselineFigure, ...]:
    """The figures of the same check on other devices, from the files beside this one, sorted."""
    return tuple(_beside(file, name))


def _beside(file: Path, name: Name) -> Iterator[BaselineFigure]:
    for other in sorted(file.parent.glob("*.json")):
        if other != file:
            try:
                known = read_baseline(other)
            except StateError:
                continue  # reported in a run on that device
            entry = known.entry(name) if known else None
            if known is not None and entry is not None:
                yield _figure(entry, known.device)


def _figure(figure: Figure, device: str) -> BaselineFigure:
    return BaselineFigure(
        device=device, ratio=figure.ratio.interval, recorded=figure.recorded, changed=figure.changed
    )
