"""Names of cases in reports, distinct over all specs of a run, without folders, which contain user names."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from qdqspec.types import BaselineFigure, Case, CaseRecord, DeviceKey, Evidence, RegressionEvidence, Verdict


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


def model_path(case: Case) -> str:
    """The model's path relative to the spec's folder, or its name alone if it is outside."""
    if case.spec is not None and case.model.is_relative_to(case.spec.parent):
        return case.model.relative_to(case.spec.parent).as_posix()
    return case.model.name


def spec_path(case: Case) -> str | None:
    """The spec's path relative to the working directory, or its name alone if it is outside."""
    if case.spec is None:
        return None
    if case.spec.is_relative_to(Path.cwd()):
        return case.spec.relative_to(Path.cwd()).as_posix()
    return case.spec.name if case.spec.is_absolute() else case.spec.as_posix()


class Redactor:
    """Replaces this machine's folders in free text: error messages of a runtime name temporary files.

    Names of nodes and tensors are not changed, although they look like paths.
    """

    def __init__(self, evidence: Evidence) -> None:
        case = evidence.case
        named = {
            "<output>": evidence.output,
            "<spec folder>": case.spec.parent if case.spec else None,
            "<model folder>": case.model.parent,
            "<here>": Path.cwd(),
            "<temporary>": Path(tempfile.gettempdir()),
            "<home>": Path.home(),
        }
        # The longest first: an output folder is often inside the spec's folder, and that inside the home
        # folder.
        folders = {str(path): name for name, path in named.items() if path is not None and path.is_absolute()}
        self._names = {folder: folders[folder] for folder in sorted(folders, key=len, reverse=True)}
        either = "|".join(re.escape(folder) for folder in self._names if len(folder) > 1)
        # Whole folders only: longer names with the same start, and node names that contain one, do not
        # change.
        self._pattern = re.compile(rf"(?<![\w/.-])({either})(?![\w.-])") if either else None

    def text(self, text: str) -> str:
        """The text with folders of this machine replaced."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._names[found[1]], text)

    def device(self, device: DeviceKey) -> DeviceKey:
        """The device, with folders replaced in its details."""
        return DeviceKey(
            key=device.key, details={name: self.text(value) for name, value in device.details.items()}
        )

    def regression(self, found: RegressionEvidence) -> RegressionEvidence:
        """The result for a baseline entry, with folders replaced in its free texts."""
        return replace(
            found,
            command=self.text(found.command),
            reason=self.text(found.reason),
            notes=tuple(map(self.text, found.notes)),
            history=tuple(map(self._figure, found.history)),
            elsewhere=tuple(map(self._figure, found.elsewhere)),
        )

    def _figure(self, figure: BaselineFigure) -> BaselineFigure:
        return replace(figure, changed=tuple(map(self.text, figure.changed)))

    def verdict(self, verdict: Verdict) -> Verdict:
        """The verdict with folders replaced in its free texts; table cells hold names and do not change."""
        return replace(
            verdict,
            headline=self.text(verdict.headline),
            advice=self.text(verdict.advice),
            sections=tuple(replace(section, text=self.text(section.text)) for section in verdict.sections),
        )
