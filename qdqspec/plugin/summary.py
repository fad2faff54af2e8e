"""The header and the summary of a run. `qdqspec.report` loads only if something was judged."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qdqspec.cases import is_spec
from qdqspec.config import Settings
from qdqspec.errors import QdqspecError
from qdqspec.plugin._compat import columns_of, has_collected
from qdqspec.plugin.baselines import near
from qdqspec.plugin.collect import PYTHON_SPECS, CheckItem
from qdqspec.plugin.distribute import (
    TROUBLES,
    annotations_of,
    own_record,
    record_of,
    write_reports,
    write_results,
)
from qdqspec.plugin.hooks import modified_record
from qdqspec.plugin.options import asked_for, settings_of
from qdqspec.types import RunRecord

_RECORD = pytest.StashKey[RunRecord]()  # as reports show it
_REPORTS = pytest.StashKey[list[Path]]()
_INTERRUPTED = pytest.StashKey[bool]()
_CONCERNED = pytest.StashKey[bool]()  # whether this run has checks to judge, or an option of ours


def header(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    """One line with backend and device; nothing in a run without specs and ``--qdq-*`` options."""
    config.stash[_CONCERNED] = asked_for(config) or any(isinstance(item, CheckItem) for item in items)
    if not config.stash[_CONCERNED] or config.get_verbosity() < 0:
        return None
    settings = settings_of(config)
    threads = f"{settings.threads} thread{'s' if settings.threads > 1 else ''}"
    cache = "no cache" if settings.no_cache else f"cache {near(settings.cache_dir, config)}"
    at = "" if settings.cluster is None else f" at {settings.cluster}"
    return f"qdqspec: {settings.backend}{at}, {threads}, mode {settings.mode}, {cache}"


def note_collected(config: pytest.Config, ids: Sequence[str]) -> None:
    """Note whether a worker has checks to judge."""
    files = (Path(name.partition("::")[0]) for name in ids)
    concerned = asked_for(config) or any(is_spec(path) or path.match(PYTHON_SPECS) for path in files)
    config.stash[_CONCERNED] = concerned or config.stash.get(_CONCERNED, False)


def write_at_end(session: pytest.Session) -> None:
    """Write results and reports. A file that cannot be written makes the run fail; the rest is kept."""
    config = session.config
    record, own = record_of(config), own_record(config)
    if record is not None:
        config.stash[_RECORD] = record = modified_record(config, record)
    try:
        if own is not None:
            write_results(own)
        if record is not None:
            config.stash[_REPORTS] = write_reports(record, settings_of(config))
    except QdqspecError as error:
        config.stash.setdefault(TROUBLES, []).append(str(error))
    if config.stash.get(TROUBLES, []):
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


class InterruptWatch:
    """A plugin that records Ctrl-C: the exit status alone also means errors during collection."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record it; ``pytest.exit`` and errors of collection are reported here too, as other classes."""
        self._config.stash[_INTERRUPTED] = excinfo.type is KeyboardInterrupt


def print_summary(terminal: Any, config: pytest.Config) -> None:
    """The table of all cases, the paths of the reports, and after Ctrl-C how to resume."""
    record = config.stash.get(_RECORD, None)
    if record is not None:
        terminal.section("quantized models")
        _print_table(terminal, record, config)
    elif _found_no_spec(terminal, config):
        terminal.write_line(
            "no spec found: names of specs end in .qdq.yaml; to write one: "
            "qdqspec init model.onnx -o specs/model.qdq.yaml"
        )
    for trouble in config.stash.get(TROUBLES, []):
        terminal.write_line(trouble, red=True)
    interrupted = config.stash.get(_INTERRUPTED, False)
    if interrupted and (record is not None or config.stash.get(_CONCERNED, False)):
        words = shlex.join(("pytest", *config.invocation_params.args))
        terminal.write_line(f"The measurements are kept. Resume with:\n  {words}")


def _found_no_spec(terminal: Any, config: pytest.Config) -> bool:
    """Whether nothing was collected, errors included, in a run that is meant for specs by its options or a folder."""
    is_meant = asked_for(config) or any(Path(name).name == "specs" for name in config.args)
    return is_meant and not has_collected(terminal)


def _print_table(terminal: Any, record: RunRecord, config: pytest.Config) -> None:
    from qdqspec.report.tables import summary_table, warning_lines
    from qdqspec.report.terminal import colored
    from qdqspec.units import wrapped

    width = columns_of(config)
    paint = colored if terminal.hasmarkup else str
    terminal.write_line(paint(summary_table(record, width=width)))
    if record.runtimes or record.common:
        from qdqspec.report.runtimes import runtimes_text

        terminal.write_line(f"\n{runtimes_text(record)}\n")
    for line in warning_lines(record):
        terminal.write_line(wrapped(line, width), yellow=True)
    settings: Settings = settings_of(config)
    if settings.output.is_dir():
        terminal.write_line(f"Models and measurements: {near(settings.output, config)}")
    for path in config.stash.get(_REPORTS, []):
        terminal.write_line(f"Report: {near(path, config)}")
    from qdqspec.report.write import is_github

    if any(is_github(path) for path in settings.report):
        for line in annotations_of(config):
            terminal.write_line(line)
