"""The end and the summary of a run: reports, and the baselines that ``--qdq-update`` requests.

`qdqspec.app.report` loads only if something was judged. Workers of pytest-xdist measure, the controller writes each
file once. A baseline entry counts as obsolete only if all checks of its spec were selected.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qdqspec import __version__
from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import percent_text
from qdqspec.app.cases import YAML, find_cases, is_spec
from qdqspec.app.plugin._compat import columns_of, has_collected
from qdqspec.app.plugin.hooks import modified_record
from qdqspec.app.plugin.run import CheckItem
from qdqspec.app.plugin.state import asked_for, settings_of, state_of
from qdqspec.errors import QdqspecError
from qdqspec.types import RunRecord


def compare_runtimes(config: pytest.Config) -> None:
    """Compare the runtimes of cases that this process judged; an error is reported with the results."""
    for session in state_of(config).sessions:
        try:
            if session.compare_runtimes():  # which starts processes again
                session.close()
        except QdqspecError as error:
            session.close()
            state_of(config).troubles.append(str(error))


def write_at_end(session: pytest.Session) -> None:
    """Write results and reports. A file that cannot be written makes the run fail; the rest is kept."""
    config, state = session.config, state_of(session.config)
    record, own = state.whole_record(), state.own_record()
    if record is not None:
        state.record = record = modified_record(config, record)
    elif asked_for(config) and not config.option.collectonly:
        # nothing was judged: files of an earlier run must not be taken for those of this one
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = RunRecord(version=__version__, started=now, seconds=0.0, cases=())
    if record is not None:
        from qdqspec.app.report import write

        def keep(path: Path | None, write_file: Callable[[], None]) -> None:
            """Write a file; an error does not prevent the next one."""
            try:
                write_file()
            except QdqspecError as error:
                state.troubles.append(str(error))
            else:
                state.reports += [path] if path is not None else []

        settings = settings_of(config)
        if own is not None:
            keep(None, partial(write.write_results, own))
        for path in settings.report:
            keep(None if write.is_github(path) else path, partial(write.write_reports, record, [path]))
        if settings.json is not None:
            keep(settings.json, partial(write.write_json, record, settings.json))
    if state.troubles:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


def find_obsolete(config: pytest.Config, selected: Sequence[CheckItem]) -> None:
    """Find the obsolete entries of each spec whose checks are all selected. Reads baselines, no model."""
    if config.option.collectonly:
        return
    counts = Counter(item.path for item in selected)
    for spec, cases in {item.path: item.cases for item in selected}.items():
        if (
            counts[spec] == sum(len(case.checks) for case in cases)
            and (spec.parent / "__baselines__").is_dir()
        ):
            from qdqspec.app.evidence.baselines import baseline_entries, baseline_folder, obsolete_entries

            folder = baseline_folder(spec)
            state_of(config).obsolete.update(obsolete_entries(folder, baseline_entries(cases)))


def write_baselines(config: pytest.Config) -> None:
    """Write the measured entries, remove obsolete ones with ``--qdq-update=all``; an error makes the run fail."""
    state = state_of(config)
    renewals = state.all_renewals()
    dropping = bool(state.obsolete) and settings_of(config).update == "all"
    devices = {file: "" for file, _ in state.obsolete} if dropping else {}
    for file, device in sorted((devices | {new.file: new.device for new in renewals}).items()):
        from qdqspec.app.evidence.baselines import update_baseline

        put = [renewal for renewal in renewals if renewal.file == file]
        dropped = sorted(name for other, name in state.obsolete if other == file) if dropping else []
        try:
            renewed = {renewal.name: renewal.entry for renewal in put}
            models = {renewal.entry.model_sha256: renewal.nodes for renewal in put}
            update_baseline(file, device, renewed, dropped, models)
        except QdqspecError as error:
            state.troubles.append(str(error))
        else:
            lines = [f"Baseline: {path_from_start(file, config)}"]
            for renewal in sorted(put, key=lambda renewal: renewal.name):
                new, old = renewal.entry.ratio.median, renewal.old
                moved = (
                    f"{old:.3f} -> {new:.3f} ({percent_text(new / old - 1)})" if old else f"new, {new:.3f}"
                )
                lines.append(f"  {'::'.join(renewal.name)}  {moved}")
            lines += [f"  {'::'.join(name)}  removed, its spec does not ask for it" for name in dropped]
            state.baseline_lines += lines
    if state.obsolete and not dropping:
        specs: dict[str, None] = {}
        for file, name in sorted(state.obsolete):
            state.baseline_lines.append(
                f"Obsolete baseline: {path_from_start(file, config)}: {'::'.join(name)}"
            )
            specs[path_from_start(file.parents[2], config)] = None
        state.baseline_lines.append(f"Remove with:\n  qdqspec baseline prune {' '.join(specs)}")


def path_from_start(path: Path, config: pytest.Config) -> str:
    """A path relative to where pytest was started, if it is below."""
    relative = os.path.relpath(path, config.invocation_params.dir)
    return str(path) if relative.startswith("..") else relative


class InterruptWatch:
    """A plugin that records Ctrl-C: the exit status alone also means errors during collection."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record it; ``pytest.exit`` and errors of collection are reported here too, as other classes."""
        state_of(self._config).interrupted = excinfo.type is KeyboardInterrupt


def print_summary(terminal: Any, config: pytest.Config) -> None:
    """The table of all cases, the paths of the reports, and after Ctrl-C how to resume."""
    state = state_of(config)
    # A run is meant for specs by its options, a folder or a file; one with errors of collection has found something.
    named = [Path(name.partition("::")[0]) for name in config.args]
    is_meant = asked_for(config) or any(path.name == "specs" or is_spec(path) for path in named)
    if state.record is not None:
        terminal.section("quantized models")
        _print_table(terminal, state.record, config)
    elif not has_collected(terminal) and (is_meant or any(path.suffix in YAML for path in named)):
        terminal.write_line(_nothing_text(config))
    for path in state.reports:
        terminal.write_line(f"Report: {path_from_start(path, config)}")
    for trouble in state.troubles:
        terminal.write_line(trouble, red=True)
    if state.interrupted and (state.record is not None or state.sessions or is_meant):
        words = shlex.join(("pytest", *config.invocation_params.args))
        terminal.write_line(f"The measurements are kept. Resume with:\n  {words}")
    for line in state.baseline_lines:
        terminal.write_line(line)


def _nothing_text(config: pytest.Config) -> str:
    """Why nothing was collected: a node id that a spec does not have, or no spec at all."""
    for name in config.args:
        file, _, rest = name.partition("::")
        case, _, check = rest.partition("::")
        if not (case and is_spec(Path(file)) and Path(file).is_file()):
            continue
        try:
            found = find_cases(f"{file}::{case}", settings_of(config), config.invocation_params.dir)
        except QdqspecError as error:
            return str(error)
        known = [one.id for one in found[0].checks]
        if check and check not in known:
            return f"{file}::{case} has no check '{check}'{did_you_mean(check, known)}: it has {', '.join(known)}"
    return (
        "no spec found: names of specs end in .qdq.yaml; to write one: "
        "qdqspec init model.onnx -o specs/model.qdq.yaml"
    )


def _print_table(terminal: Any, record: RunRecord, config: pytest.Config) -> None:
    from qdqspec.app.report.tables import summary_table, warning_lines
    from qdqspec.app.report.terminal import color_words
    from qdqspec.app.report.write import MOST_ANNOTATIONS, annotation_lines, is_github

    state, settings = state_of(config), settings_of(config)
    paint = color_words if terminal.hasmarkup else str
    terminal.write_line(paint(summary_table(record, width=columns_of(config))))
    if record.runtimes:
        from qdqspec.app.report.compare import runtimes_text

        terminal.write_line(f"\n{runtimes_text(record.runtimes)}\n")
    for line in warning_lines(record):
        terminal.write_line(line, yellow=True)
    if settings.output.is_dir():
        terminal.write_line(f"Models and measurements: {path_from_start(settings.output, config)}")
    if any(is_github(path) for path in settings.report):
        own = state.own_record()
        lines = state.annotations + (annotation_lines(own, config.rootpath) if own is not None else [])
        for line in lines[:MOST_ANNOTATIONS]:
            terminal.write_line(line)
