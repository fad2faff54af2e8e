"""Writes the baselines that ``--qdq-update`` requests, and reports obsolete entries.

Workers of pytest-xdist measure, the controller writes each file once. A baseline entry counts as obsolete
only if all checks of its spec were selected.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qdqspec._core.units import percent_text
from qdqspec.app.plugin.collect import CheckItem
from qdqspec.app.plugin.options import settings_of
from qdqspec.app.plugin.state import state_of
from qdqspec.errors import QdqspecError

if TYPE_CHECKING:
    from qdqspec.checks.baseline.store import Name, Renewal


def find_obsolete(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Find the obsolete entries of each spec whose checks are all selected. Reads baselines, no model."""
    if config.option.collectonly:
        return
    selected = [item for item in items if isinstance(item, CheckItem)]
    counts = Counter(item.path for item in selected)
    for spec, cases in {item.path: item.cases for item in selected}.items():
        folder = spec.parent / "__baselines__" / cases[0].spec_name
        if counts[spec] == sum(len(case.checks) for case in cases) and folder.is_dir():
            from qdqspec.checks.base import baseline_entries
            from qdqspec.checks.baseline.store import obsolete_entries

            state_of(config).obsolete.update(obsolete_entries(folder, baseline_entries(cases)))


def write_baselines(config: pytest.Config) -> None:
    """Write the measured entries, and with ``--qdq-update=all`` remove obsolete ones.

    A file that cannot be written is recorded as a trouble, which makes the run fail.
    """
    state = state_of(config)
    renewals = state.all_renewals()
    dropping = bool(state.obsolete) and settings_of(config).update == "all"
    devices = {file: "" for file, _ in state.obsolete} if dropping else {}
    for file, device in sorted((devices | {new.file: new.device for new in renewals}).items()):
        from qdqspec.checks.baseline.store import update_baseline

        put = [renewal for renewal in renewals if renewal.file == file]
        dropped = sorted(name for other, name in state.obsolete if other == file) if dropping else []
        try:
            renewed = {renewal.name: renewal.entry for renewal in put}
            models = {renewal.entry.model_sha256: renewal.nodes for renewal in put}
            update_baseline(file, device, renewed, dropped, models)
        except QdqspecError as error:
            state.troubles.append(str(error))
        else:
            state.baseline_lines += _written_lines(path_from_start(file, config), put, dropped)
    if state.obsolete and not dropping:
        entries = sorted(state.obsolete)
        state.baseline_lines += [
            f"Obsolete baseline: {path_from_start(file, config)}: {'::'.join(name)}" for file, name in entries
        ]
        specs = dict.fromkeys(path_from_start(file.parent.parent.parent, config) for file, _ in entries)
        state.baseline_lines.append(f"Remove with:\n  qdqspec baseline prune {' '.join(specs)}")


def _written_lines(file: str, renewals: Sequence[Renewal], dropped: Sequence[Name]) -> list[str]:
    lines = [f"Baseline: {file}"]
    for renewal in sorted(renewals, key=lambda renewal: renewal.name):
        new, old = renewal.entry.ratio.median, renewal.old
        moved = f"{old:.3f} -> {new:.3f} ({percent_text(new / old - 1)})" if old else f"new, {new:.3f}"
        lines.append(f"  {'::'.join(renewal.name)}  {moved}")
    return lines + [f"  {'::'.join(name)}  removed, its spec does not ask for it" for name in dropped]


def path_from_start(path: Path, config: pytest.Config) -> str:
    """A path relative to where pytest was started, if it is below."""
    relative = os.path.relpath(path, config.invocation_params.dir)
    return str(path) if relative.startswith("..") else relative
