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
from qdqspec.graph.save import write_text
from qdqspec.search.journal import Journal
from qdqspec.types import Trial

HEADER = "trials.header.json"
LOGS = "logs"  # a folder, one file a build


@contextmanager
def open_journal(folder: Path, header: Mapping[str, object], notes: list[str]) -> Iterator[BuildLogs]:
    """The journal of this run: an unfinished one with the same header, else a new one.

    A finished journal, one of another model, spec or device, and a damaged one, whose sound lines are reused, are
    renamed to ``trials.previous.jsonl``; ``notes`` receives the reason, unless the old one is finished.
    """
    path = folder / JOURNAL
    if _is_finished(path):
        _set_aside(path)
        (folder / CORRECTIONS).unlink(missing_ok=True)  # a new search finds its own
    try:
        journal = Journal.open(path, header)
    except StateError as error:
        aside = _set_aside(path)
        sound = Journal.recover(aside, path, header)
        kept = f", and its first {sound} lines are kept" if sound else ""
        name = Path(error.where or path).name
        notes.append(f"{name}: {error.what}; it was set aside as {aside.name}{kept}")
        journal = Journal.open(path, header)
    notes.extend(journal.notes)
    with journal:
        yield BuildLogs(journal, folder)


class BuildLogs:
    """Writes each trial to the journal, and a readable file for each build to ``logs/``."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal = journal
        self._folder = folder / LOGS
        make_folder(self._folder)
        remove_partial(self._folder)  # the previous run may have been killed while writing
        if not journal.trials():  # a new search: logs of an earlier one must not be taken for its own
            for old in self._folder.glob("*.log"):
                old.unlink()

    def trials(self) -> tuple[Trial, ...]:
        """The trials in the journal."""
        return self._journal.trials()

    def append(self, trial: Trial, **more: object) -> None:
        """Append a trial to the journal, then write its log."""
        self._journal.append(trial, **more)
        name = f"{trial.number:03d}-{trial.phase}-{trial.placement.digest}.log"
        write_text(self._folder / name, _log_text(trial))


def _log_text(trial: Trial) -> str:
    race = trial.race
    lines = [
        f"trial      {trial.number} ({trial.phase})",
        f"placement  {trial.placement.digest}, {trial.placement.pairs} activation pairs",
        f"status     {trial.status}, built in {trial.build_seconds:.3f} s, optimized graph {trial.graph_hash or '-'}",
        f"ratio      {'-' if trial.ratio is None else f'{trial.ratio:.4f}'} of the reference's time",
    ]
    if trial.sqnr_db is not None:
        lines.append(f"accuracy   {trial.sqnr_db:.1f} dB SQNR")
    if trial.accuracy is not None:
        lines.append(f"metric     {trial.accuracy:.6g}")
    if race is not None:
        reach = "" if race.interval is None else f" [{race.interval.low:.4f}, {race.interval.high:.4f}]"
        figures = f"{race.ratio:.4f}{reach}, {race.pairs} pairs, p = {race.p_value:.2g}"
        lines.append(f"race       {race.verdict} against {race.opponent}: {figures}")
    for clock, times in (("wall", trial.samples.wall_ms), ("cpu", trial.samples.cpu_ms)):
        if times:
            lines.append(f"{f'{clock} ms':<10} {' '.join(f'{value:.4f}' for value in times)}")
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
