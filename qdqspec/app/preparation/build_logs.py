"""The journal of a run, which it resumes from, and a readable file for each build."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from qdqspec._core.files import explained, remove_partial
from qdqspec.app.preparation.cached import CORRECTIONS, JOURNAL
from qdqspec.app.preparation.files import make_folder
from qdqspec.errors import StateError
from qdqspec.graph.storage import write_text
from qdqspec.search.journal import Journal, trial_to_json
from qdqspec.types import Trial

HEADER = "trials.header.json"
LOGS = "logs"  # a folder, one file a build


@contextmanager
def open_journal(folder: Path, header: Mapping[str, object], notes: list[str]) -> Iterator[LoggedJournal]:
    """The journal of this run: an unfinished one with the same header, else a new one.

    A finished journal, one of another model, spec or device, and a damaged one, whose sound lines are reused, are
    renamed to ``trials.previous.jsonl``; ``notes`` receives the reason, unless the old one is finished.
    """
    path = folder / JOURNAL
    if _is_finished(path):
        _set_aside(path)
        (folder / CORRECTIONS).unlink(missing_ok=True)  # a new search finds its own
    try:
        journal = LoggedJournal.open(path, header)
    except StateError as error:
        aside = _set_aside(path)
        sound = Journal.recover(aside, path, header)
        kept = f", and its first {sound} lines are kept" if sound else ""
        name = Path(error.where or path).name
        notes.append(f"{name}: {error.what}; it was set aside as {aside.name}{kept}")
        journal = LoggedJournal.open(path, header)
    notes.extend(journal.notes)
    with journal:
        yield journal


class LoggedJournal(Journal):
    """A journal that also writes a readable file for each build to ``logs/``."""

    def __init__(self, path: Path, run: str, trials: list[Trial], notes: tuple[str, ...]) -> None:
        self._logs = path.parent / LOGS
        make_folder(self._logs)
        remove_partial(self._logs)  # the previous run may have been killed while writing
        if not trials:  # a new search: logs of an earlier one must not be taken for its own
            for old in self._logs.glob("*.log"):
                old.unlink()
        super().__init__(path, run, trials, notes)

    def append(self, trial: Trial, **more: object) -> None:
        """Append a trial to the journal, then write its log."""
        super().append(trial, **more)
        name = f"{trial.number:03d}-{trial.phase}-{trial.placement.digest}.log"
        write_text(self._logs / name, _log_text(trial))


def _log_text(trial: Trial) -> str:
    """The fields of the journal without placement and kernels, one a line, and the error."""
    fields = {**trial_to_json(trial), "scheme": None, "layers": None, "error": None}
    lines = [f"{name:<14} {json.dumps(value)}" for name, value in fields.items() if value]
    return "\n".join([*lines, *(["", trial.error] if trial.error else [])]) + "\n"


def _is_finished(path: Path) -> bool:
    """Whether a journal ends with a confirmation, or comes from the cache."""
    try:
        last = json.loads(path.read_bytes().splitlines()[-1])
        return last["phase"] == "confirm" or "run" not in last
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return False  # missing or damaged: reported when it is opened


def _set_aside(path: Path) -> Path:
    """Rename a journal without overwriting an unfinished one, and return the new path."""
    for number in itertools.count(1):
        aside = path.with_name(f"trials.previous{f'-{number}' if number > 1 else ''}.jsonl")
        if not aside.exists() or _is_finished(aside):
            with explained("the old journal", aside):
                path.replace(aside)
            break
    return aside
