"""Hooks of pytest that a ``conftest.py`` or another plugin may implement.

After an exception in one, the run ends with exit code 4 and a message that names the hook and its file or plugin. An
exception in `pytest_qdq_device_key` is the failure of each check instead. The commands of ``qdqspec`` call no hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
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
