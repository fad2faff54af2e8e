"""Writes the baselines that ``--qdq-update`` requests, and reports obsolete entries.

Workers of pytest-xdist measure, the controller writes each file once. A baseline entry counts as obsolete
only if all checks of its spec were selected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qdqspec.codec import from_data, to_data
from qdqspec.errors import QdqspecError
from qdqspec.plugin.collect import CheckItem
from qdqspec.plugin.distribute import TROUBLES, sessions_of
from qdqspec.plugin.options import settings_of
from qdqspec.types import Case
from qdqspec.units import percent_text

if TYPE_CHECKING:
    from qdqspec.baseline.store import Name, Renewal

_SENT = "qdqspec_baselines"  # key in a worker's output


@dataclass(slots=True)
class Ledger:
    """The baselines of this run: entries to write, entries that are obsolete, and lines to print."""

    renewals: list[Renewal] = field(default_factory=list)
    obsolete: set[tuple[Path, Name]] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)


_LEDGER = pytest.StashKey[Ledger]()


def note_selection(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Find obsolete entries of the specs of which all checks are selected. Reads baselines, no model."""
    if config.option.collectonly:
        return
    for spec, (cases, selected) in _specs_of(items).items():
        if selected == sum(len(case.checks) for case in cases):
            _ledger(config).obsolete.update(_obsolete(spec, cases))


def hand_over(config: pytest.Config) -> None:
    """In a worker of pytest-xdist: send the entries to write and the obsolete ones."""
    ledger = _ledger(config)
    _gather(config)
    worker: Any = config
    worker.workeroutput[_SENT] = {
        "renewals": to_data(ledger.renewals),
        "obsolete": [[str(file), *name] for file, name in sorted(ledger.obsolete)],
    }


def receive(config: pytest.Config, worker_output: dict[str, Any]) -> None:
    """In the controller: receive the message of a worker."""
    sent = worker_output.get(_SENT)
    if not sent:
        return
    ledger = _ledger(config)
    ledger.obsolete.update((Path(file), (case, check)) for file, case, check in sent["obsolete"])
    if sent["renewals"]:
        from qdqspec.baseline.store import Renewal

        ledger.renewals += [from_data(Renewal, data) for data in sent["renewals"]]


def write_at_end(config: pytest.Config) -> None:
    """Write the measured entries, and with ``--qdq-update=all`` remove obsolete ones.

    A file that cannot be written is recorded as a trouble, which makes the run fail.
    """
    ledger = _ledger(config)
    _gather(config)
    dropping = bool(ledger.obsolete) and settings_of(config).update == "all"
    files = {renewal.file: renewal.device for renewal in ledger.renewals}
    if dropping:
        files |= {file: "" for file, _ in ledger.obsolete if file not in files}
    for file, device in sorted(files.items()):
        renewals = [renewal for renewal in ledger.renewals if renewal.file == file]
        dropped = sorted(name for other, name in ledger.obsolete if other == file) if dropping else []
        try:
            _write(file, device, renewals, dropped)
        except QdqspecError as error:
            config.stash.setdefault(TROUBLES, []).append(str(error))
        else:
            ledger.lines += _written_lines(near(file, config), renewals, dropped)
    if not dropping:
        ledger.lines += _obsolete_lines(ledger, config)


def print_lines(terminal: Any, config: pytest.Config) -> None:
    """Print the entries written, old and new, and the obsolete ones."""
    for line in _ledger(config).lines:
        terminal.write_line(line)


def _ledger(config: pytest.Config) -> Ledger:
    return config.stash.setdefault(_LEDGER, Ledger())


def _gather(config: pytest.Config) -> None:
    for session in sessions_of(config):
        _ledger(config).renewals += session.renewals()


def _specs_of(items: Iterable[pytest.Item]) -> dict[Path, tuple[tuple[Case, ...], int]]:
    """The specs of the selected items: all their cases, and how many of their checks are selected."""
    found: dict[Path, tuple[tuple[Case, ...], int]] = {}
    for item in items:
        if isinstance(item, CheckItem):
            _, count = found.get(item.path, ((), 0))
            found[item.path] = (item.cases, count + 1)
    return found


def _obsolete(spec: Path, cases: Sequence[Case]) -> Iterable[tuple[Path, Name]]:
    folder = spec.parent / "__baselines__" / cases[0].spec_name
    if not folder.is_dir():
        return ()
    from qdqspec.baseline.store import obsolete_entries
    from qdqspec.checks.base import baseline_entries

    return obsolete_entries(folder, baseline_entries(cases))


def _write(file: Path, device: str, renewals: Sequence[Renewal], dropped: Sequence[Name]) -> None:
    from qdqspec.baseline.store import update_baseline

    update_baseline(file, device, {renewal.name: renewal.entry for renewal in renewals}, dropped)


def _written_lines(file: str, renewals: Sequence[Renewal], dropped: Sequence[Name]) -> list[str]:
    lines = [f"Baseline: {file}"]
    for renewal in sorted(renewals, key=lambda renewal: renewal.name):
        new, old = renewal.entry.ratio.median, renewal.old
        moved = f"{old:.3f} -> {new:.3f} ({percent_text(new / old - 1)})" if old else f"new, {new:.3f}"
        lines.append(f"  {'::'.join(renewal.name)}  {moved}")
    return lines + [f"  {'::'.join(name)}  removed, its spec does not ask for it" for name in dropped]


def _obsolete_lines(ledger: Ledger, config: pytest.Config) -> list[str]:
    lines = [
        f"Obsolete baseline: {near(file, config)}: {'::'.join(name)}"
        for file, name in sorted(ledger.obsolete)
    ]
    specs = sorted({str(file.parent.parent.parent) for file, _ in ledger.obsolete})
    folders = " ".join(near(Path(spec), config) for spec in specs)
    return [*lines, f"Remove with:\n  qdqspec baseline prune {folders}"] if lines else []


def near(path: Path, config: pytest.Config) -> str:
    """A path relative to where pytest was started, if it is below."""
    relative = os.path.relpath(path, config.invocation_params.dir)
    return str(path) if relative.startswith("..") else relative
