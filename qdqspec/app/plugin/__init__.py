"""The pytest plugin: hooks that call the modules of this package.

Each pytest run of an environment with qdqspec imports it, so it imports pytest and the standard library only,
and does nothing until a spec is collected or a ``--qdq-*`` option given.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qdqspec._core.config import add_options
from qdqspec.app.plugin import collect, fixtures, hooks, state, summary
from qdqspec.app.plugin._compat import is_worker
from qdqspec.app.plugin.run import without_traceback

MARKERS = (
    "qdq(case): judges a quantized model; on a plain test, the case that its qdq_* fixtures use",
    "tune: may start a search for the best placement, which takes minutes",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ``--qdq-*`` options."""
    add_options(parser.getgroup("qdqspec", "quantized models (qdqspec)").addoption, prefix="--qdq-")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(args: list[str]) -> None:
    """Reject misspelt ``--qdq-*`` options with a suggestion, before pytest does without one."""
    state.refuse_unknown_options(args)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hooks that a conftest may implement, and the fixtures that a later plugin may replace."""
    pluginmanager.add_hookspecs(hooks)
    pluginmanager.register(fixtures, "qdqspec-fixtures")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; reject invalid options."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    state.refuse_wrong_options(config)
    config.pluginmanager.register(summary.InterruptWatch(config), "qdqspec-interrupt")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect specs."""
    return collect.collector_for(file_path, parent)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect ``spec_*.py`` once if it was named on the command line."""
    return collect.module_for(module_path, parent)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the checks of each case, and find baseline entries that no check uses any more."""
    checks = [item for item in session.items if isinstance(item, collect.CheckItem)]
    state.state_of(session.config).unfinished.update(state.name_of(item.case) for item in checks)
    summary.find_obsolete(session.config, checks)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Print the backend and the device."""
    line = summary.header(config, items)
    return [line] if line is not None else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Report a case after its last check."""
    result = yield
    hooks.finish_check(item)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print verdicts and input errors without a traceback, and place skips in the spec."""
    report = yield
    if isinstance(item, collect.CheckItem) and call.excinfo is not None:
        path, line, _ = item.reportinfo()
        error = call.excinfo.value
        if isinstance(error, pytest.skip.Exception):
            report.longrepr = (str(path), line + 1, f"Skipped: {error.msg}")
        elif report.failed:
            report.longrepr = without_traceback(error, path, line + 1) or report.longrepr
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """Compare runtimes, report the remaining cases, then send the results to the controller, or write the reports."""
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        summary.compare_runtimes(session.config)
    hooks.finish_cases(session.config)
    if is_worker(session.config):
        state.hand_over(session.config)
    else:
        summary.write_baselines(session.config)
        summary.write_at_end(session)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the checks of a case on one worker."""
    return state.case_scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:  # noqa: ARG001 - the hook's own arguments
    """Receive the results of a worker of pytest-xdist."""
    state.receive(node.config, getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the summary table."""
    summary.print_summary(terminalreporter, config)
