"""The pytest plugin: hooks that call the modules of this package.

Each pytest run of an environment with qdqspec imports it, so it imports pytest and the standard library only,
and does nothing until a spec is collected or a ``--qdq-*`` option given.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from qdqspec._core.config import OPTIONS, add_options
from qdqspec._core.registry import did_you_mean
from qdqspec.app.cases import is_spec
from qdqspec.app.plugin import fixtures, hooks, state, summary
from qdqspec.app.plugin._compat import is_worker
from qdqspec.app.plugin.collect import PythonSpecFile, SpecFile
from qdqspec.app.plugin.run import CheckFailed, CheckItem, without_traceback
from qdqspec.errors import ConfigError

PYTHON_SPECS = "spec_*.py"
MARKERS = (
    "qdq(case): judges a quantized model; on a plain test, the case that its qdq_* fixtures use",
    "tune: may start a search for the best placement, which takes minutes",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ``--qdq-*`` options."""
    add_options(parser.getgroup("qdqspec", "quantized models (qdqspec)").addoption, prefix="--qdq-")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(args: list[str]) -> None:
    """Reject misspelt ``--qdq-*`` options, naming the closest one, before pytest does without one."""
    known = [f"--qdq-{option.name}" for option in OPTIONS]
    given = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", args)]
    unknown = [name for name in given if name.startswith("--qdq-") and name not in known]
    if unknown:
        problems = "; ".join(f"unknown option '{name}'{did_you_mean(name, known)}" for name in unknown)
        raise pytest.UsageError(f"{problems}\n  all options: pytest --help, group qdqspec")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hooks that a conftest may implement, and the fixtures that a later plugin may replace."""
    pluginmanager.add_hookspecs(hooks)
    pluginmanager.register(fixtures, "qdqspec-fixtures")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; reject invalid values of ``--qdq-*`` options before collection."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    try:
        if state.asked_for(config) and (reports := state.settings_of(config).report):
            from qdqspec.app.report.write import refuse_unknown_formats

            refuse_unknown_formats(reports)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(summary.InterruptWatch(config), "qdqspec-interrupt")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect specs by their names, and ``spec_*.py`` modules."""
    if is_spec(file_path):
        return SpecFile.from_parent(parent, path=file_path)
    patterns = parent.config.getini("python_files")
    # pytest collects such a file anyway, and calls `pytest_pycollect_makemodule`
    if parent.session.isinitpath(file_path) or any(fnmatch(file_path.name, pattern) for pattern in patterns):
        return None
    return pytest_pycollect_makemodule(file_path, parent)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect a ``spec_*.py`` that pytest itself collects once: its specs along with its tests."""
    is_python_spec = fnmatch(module_path.name, PYTHON_SPECS)
    return PythonSpecFile.from_parent(parent, path=module_path) if is_python_spec else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the checks of each case, and find baseline entries that no check uses any more."""
    checks = [item for item in session.items if isinstance(item, CheckItem)]
    state.state_of(session.config).unfinished.update(state.name_of(item.case) for item in checks)
    summary.find_obsolete(session.config, checks)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Print the backend and the device; nothing in a run without specs and ``--qdq-*`` options."""
    has_checks = any(isinstance(item, CheckItem) for item in items)
    if not (has_checks or state.asked_for(config)) or config.get_verbosity() < 0:
        return []
    settings = state.settings_of(config)
    threads = f"{settings.threads} thread{'s' if settings.threads > 1 else ''}"
    folder = summary.path_from_start(settings.cache_dir, config)
    cache = "no cache" if settings.no_cache else f"cache {folder}"
    at = "" if settings.cluster is None else f" at {settings.cluster}"
    return [f"qdqspec: {settings.backend}{at}, {threads}, mode {settings.mode}, {cache}"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Report a case after its last check."""
    result = yield
    if isinstance(item, CheckItem):
        name, left = state.name_of(item.case), state.state_of(item.config).unfinished
        left[name] -= 1
        if not left[name]:
            hooks.finish_cases(item.config, name)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Print verdicts and input errors without a traceback, place skips in the spec, and record errors of fixtures."""
    report = yield
    if not isinstance(item, CheckItem):
        return report
    found, fixtures_of_item = state.state_of(item.config), dict[str, Any](item.funcargs)
    if "qdq_session" in fixtures_of_item:  # also if a later fixture failed
        found.add_session(fixtures_of_item["qdq_session"])
    if call.excinfo is not None:
        path, line, _ = item.reportinfo()
        error = call.excinfo.value
        if isinstance(error, pytest.skip.Exception):
            report.longrepr = (str(path), line + 1, f"Skipped: {error.msg}")
        elif report.failed:
            report.longrepr = without_traceback(error, path, line + 1) or report.longrepr
            if call.when != "teardown" and not isinstance(error, CheckFailed):
                found.note_error(item.case, item.check, state.settings_of(item.config).backend, error)
    elif call.when == "call":  # repeated by pytest-rerunfailures, after an error
        found.errors.pop((state.name_of(item.case), item.check.id), None)
    if call.when == "teardown" and is_worker(item.config):
        report.qdqspec = state.case_so_far(item.config, item.case)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_from_serializable(config: pytest.Config, data: dict[str, Any]) -> None:
    """Receive the record of a case with the report of a check from a worker of pytest-xdist."""
    if sent := data.pop("qdqspec", None):
        state.receive_case(config, sent)


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
