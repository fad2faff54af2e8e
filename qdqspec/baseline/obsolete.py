"""Finds baseline entries that no check of a spec uses any more.

The spec decides, not the run: the entry of a check that is skipped on this machine is still in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qdqspec.baseline.store import Name, read_baseline
from qdqspec.errors import StateError
from qdqspec.types import Case


def entries_asked_for(cases: Sequence[Case]) -> frozenset[Name]:
    """The entries that the regression checks of a spec's cases compare with."""
    return frozenset(
        (case.id, check.params.evidence_key)
        for case in cases
        for check in case.checks
        if check.kind == "regression"
    )


def obsolete_entries(folder: Path, cases: Sequence[Case]) -> tuple[tuple[Path, Name], ...]:
    """Entries below a spec's baseline folder, for any device, that its cases do not use.

    A damaged file has none: it is reported when a check compares with it.
    """
    asked = entries_asked_for(cases)
    found: list[tuple[Path, Name]] = []
    for file in sorted(folder.glob("*.json")):
        try:
            known = read_baseline(file)
        except StateError:
            continue
        found += [(file, name) for name in (known.names() if known else ()) if name not in asked]
    return tuple(found)
