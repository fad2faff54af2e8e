"""The header, the end and the summary of a run. `qdqspec.app.report` loads only if something was judged."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qdqspec.app.cases import is_spec
from qdqspec.app.plugin._compat import columns_of, has_collected
from qdqspec.app.plugin.baselines import path_from_start
from qdqspec.app.plugin.collect import PYTHON_SPECS, CheckItem
from qdqspec.app.plugin.hooks import modified_record
from qdqspec.app.plugin.options import asked_for, settings_of
from qdqspec.app.plugin.state import state_of
from qdqspec.errors import QdqspecError
from qdqspec.types import RunRecord


def header(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    """One line with backend and device; nothing in a run without specs and ``--qdq-*`` options."""
    concerned = asked_for(config) or any(isinstance(item, CheckItem) for item in items)
    state_of(config).concerned = concerned
    if not concerned or config.get_verbosity() < 0:
        return None
    settings = settings_of(config)
    threads = f"{settings.threads} thread{'s' if settings.threads > 1 else ''}"
    cache = "no cache" if settings.no_cache else f"cache {path_from_start(settings.cache_dir, config)}"
    at = "" if settings.cluster is None else f" at {settings.cluster}"
    return f"qdqspec: {settings.backend}{at}, {threads}, mode {settings.mode}, {cache}"


def note_collected(config: pytest.Config, ids: Sequence[str]) -> None:
    """Note whether a worker has checks to judge."""
    files = (Path(name.partition("::")[0]) for name in ids)
    if asked_for(config) or any(is_spec(path) or path.match(PYTHON_SPECS) for path in files):
        state_of(config).concerned = True


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
        from qdqspec.app.report.write import (
            is_github,
            write_comparisons,
            write_json,
            write_reports,
            write_results,
        )

        state.record = record = modified_record(config, record)
        try:
            if own is not None:
                write_results(own)
                write_comparisons(own)
            settings = settings_of(config)
            write_reports(record, settings.report)
            state.reports = [path for path in settings.report if not is_github(path)]
            if settings.json is not None:
                write_json(record, settings.json)
                state.reports.append(settings.json)
        except QdqspecError as error:
            state.troubles.append(str(error))
    if state.troubles:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


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
    # A run is meant for specs by its options or a folder; one with errors of collection has found something.
    is_meant = asked_for(config) or any(Path(name).name == "specs" for name in config.args)
    if state.record is not None:
        terminal.section("quantized models")
        _print_table(terminal, state.record, config)
    elif is_meant and not has_collected(terminal):
        terminal.write_line(
            "no spec found: names of specs end in .qdq.yaml; to write one: "
            "qdqspec init model.onnx -o specs/model.qdq.yaml"
        )
    for trouble in state.troubles:
        terminal.write_line(trouble, red=True)
    if state.interrupted and (state.record is not None or state.concerned):
        words = shlex.join(("pytest", *config.invocation_params.args))
        terminal.write_line(f"The measurements are kept. Resume with:\n  {words}")
    for line in state.baseline_lines:
        terminal.write_line(line)


def _print_table(terminal: Any, record: RunRecord, config: pytest.Config) -> None:
    from qdqspec._core.units import wrapped
    from qdqspec.app.report.tables import summary_table, warning_lines
    from qdqspec.app.report.terminal import color_words
    from qdqspec.app.report.write import MOST_ANNOTATIONS, annotation_lines, is_github

    state, settings, width = state_of(config), settings_of(config), columns_of(config)
    paint = color_words if terminal.hasmarkup else str
    terminal.write_line(paint(summary_table(record, width=width)))
    if record.runtimes:
        from qdqspec.app.report.runtimes import runtimes_text

        terminal.write_line(f"\n{runtimes_text(record)}\n")
    for line in warning_lines(record):
        terminal.write_line(wrapped(line, width), yellow=True)
    if settings.output.is_dir():
        terminal.write_line(f"Models and measurements: {path_from_start(settings.output, config)}")
    for path in state.reports:
        terminal.write_line(f"Report: {path_from_start(path, config)}")
    if any(is_github(path) for path in settings.report):
        own = state.own_record()
        lines = state.annotations + (annotation_lines(own, config.rootpath) if own is not None else [])
        for line in lines[:MOST_ANNOTATIONS]:
            terminal.write_line(line)
