"""Hooks of pytest that a ``conftest.py`` or another plugin may implement.

After an exception in one, the run ends with exit code 4 and a message that names the hook and its file or plugin. An
exception in `pytest_qdq_device_key` is the failure of each check instead. The commands of ``qdqspec`` call no hooks.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from qdqspec.app.plugin.state import CaseName, name_of, state_of
from qdqspec.errors import ConfigError
from qdqspec.types import CaseRecord, DeviceKey, RunRecord


def pytest_qdq_case_finished(config: pytest.Config, record: CaseRecord) -> None:
    """Called after the last selected check of a case, with its evidence and the results of its checks.

    A case whose checks did not all run, after ``-x`` or Ctrl-C, and one that was only used by fixtures are passed at
    the end of the run. With pytest-xdist the hook is called in the worker. Models and ``trials.jsonl`` are in
    ``record.evidence.output``; ``result.json`` is written at the end of the run.
    """


@pytest.hookspec(firstresult=True)
def pytest_qdq_modify_record(config: pytest.Config, record: RunRecord) -> RunRecord | None:
    """Return another record of the run for the table, ``--qdq-json`` and ``--qdq-report``, or ``None`` to keep it.

    Records are frozen: use `dataclasses.replace`. Called once, at the end of the run, with the cases of all workers of
    pytest-xdist. The first record that is returned is used. The ``result.json`` of each case is not affected.
    """


@pytest.hookspec(firstresult=True)
def pytest_qdq_device_key(config: pytest.Config, device: DeviceKey) -> str | None:
    """Return another key of the device, or ``None`` to keep it.

    Baselines, the cache of searches, records and the limits of `latency` use the key. Devices with one key
    share their baselines and tuned models, such as the runners of a pool. ``device.details`` has the facts that are
    recorded. The first key that is returned is used. On a cluster the workers' own keys apply.
    """


# ---- calls ---------------------------------------------------------------------------------------


def finish_cases(config: pytest.Config, only: CaseName | None = None) -> None:
    """Call `pytest_qdq_case_finished` for a case, or for all with a record, unless it was called for it already."""
    hook = config.hook.pytest_qdq_case_finished
    state = state_of(config)
    record = state.own_record() if hook.get_hookimpls() else None
    for case in () if record is None else record.cases:
        name = name_of(case.evidence.case)
        if name not in state.finished and only in (None, name):
            state.finished.add(name)
            try:
                _call(hook, config=config, record=case)
            except ConfigError as error:
                state.troubles.append(str(error))


def modified_record(config: pytest.Config, record: RunRecord) -> RunRecord:
    """The record of the run as `pytest_qdq_modify_record` returns it; unchanged if no plugin returns one."""
    hook = config.hook.pytest_qdq_modify_record
    try:
        found = _call(hook, config=config, record=record)
        if found is not None and not isinstance(found, RunRecord):
            expected = "a RunRecord (dataclasses.replace(record, ...)) or None"
            raise _error(hook, f"returned {found!r}", f"return {expected}")
    except ConfigError as error:
        state_of(config).troubles.append(str(error))
        return record
    return found or record


def device_key(config: pytest.Config, device: DeviceKey) -> str:
    """The key of a device as `pytest_qdq_device_key` returns it. Raises `ConfigError` if a plugin fails."""
    hook = config.hook.pytest_qdq_device_key
    found = _call(hook, config=config, device=device)
    if found is None:
        return device.key
    if not isinstance(found, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", found):
        expected = "letters, digits, '.', '_' and '-': files are named after the key"
        raise _error(hook, f"returned {found!r}", f"return {expected}")
    return found


def _call(hook: Any, **arguments: object) -> Any:
    """Call a hook. Raises `ConfigError` that names the plugins if an implementation raised."""
    try:
        return hook(**arguments)
    except Exception as error:
        cure = "correct the hook of this plugin, or deselect it with -p no:NAME"
        raise _error(hook, f"raised {type(error).__name__}: {error}", cure) from error


def _error(hook: Any, what: str, cure: str) -> ConfigError:
    plugins = ", ".join(one.plugin_name for one in hook.get_hookimpls())
    return ConfigError(f"hook {hook.name} {what}", where=plugins, cure=cure)
