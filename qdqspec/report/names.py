"""Names of cases in reports, distinct over all specs of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from qdqspec.report.private import spec_path
from qdqspec.types import Case, CaseRecord


def distinct_names(records: Sequence[CaseRecord]) -> tuple[str, ...]:
    """``net::default``; ``specs/door/net::default`` if specs in several folders have that name.

    The name of a private folder is not written; specs in such folders are numbered.
    """
    cases = [record.evidence.case for record in records]
    specs: dict[str, dict[Path | None, int]] = {}
    for case in cases:
        known = specs.setdefault(case.name, {})
        known.setdefault(case.spec, len(known) + 1)
    return tuple(
        case.name if len(known := specs[case.name]) == 1 else _told_apart(case, known[case.spec])
        for case in cases
    )


def _told_apart(case: Case, number: int) -> str:
    folder = PurePosixPath(spec_path(case) or "").parent
    if folder != PurePosixPath():
        return f"{folder}/{case.name}"
    return f"{case.name} ({number})" if number > 1 else case.name
