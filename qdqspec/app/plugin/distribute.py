"""pytest-xdist: all checks of a case run on one worker, and a worker sends its results to the controller."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qdqspec._core.config import Settings
from qdqspec._core.records import from_data, to_data
from qdqspec.app.cases import find_specs, is_spec, load_cases
from qdqspec.app.plugin.options import settings_of
from qdqspec.app.plugin.state import state_of
from qdqspec.errors import OutputError, QdqspecError

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

_SENT = "qdqspec"  # key in a worker's output


def hand_over(config: pytest.Config) -> None:
    """In a worker: write the results of its cases; send its record and its baseline entries."""
    state = state_of(config)
    record, sent = state.own_record(), dict[str, Any]()
    if record is not None:
        from qdqspec.app.report.record import record_to_json
        from qdqspec.app.report.write import annotation_lines, write_results

        # Paths of specs and lines of checks are not part of a record.
        sent["annotations"] = annotation_lines(record, config.rootpath)
        sent["record"] = json.dumps(record_to_json(record))
        try:
            write_results(record)
        except OutputError as error:
            state.troubles.append(str(error))
    worker: Any = config
    worker.workeroutput[_SENT] = {
        **sent,
        "troubles": state.troubles,
        "renewals": to_data(state.all_renewals()),
        "obsolete": [[str(file), *name] for file, name in sorted(state.obsolete)],
    }


def receive(config: pytest.Config, worker_output: dict[str, Any]) -> None:
    """In the controller: receive the message of a worker. A worker that crashed has sent none."""
    sent = worker_output.get(_SENT)
    if sent is None:
        return
    state = state_of(config)
    state.troubles += sent["troubles"]
    state.obsolete.update((Path(file), (case, check)) for file, case, check in sent["obsolete"])
    if "record" in sent:
        from qdqspec.app.report.record import record_from_json

        state.received.append(record_from_json(json.loads(sent["record"])))
        state.annotations += sent["annotations"]
    if sent["renewals"]:
        from qdqspec.checks.baselines import Renewal

        state.renewals += [from_data(Renewal, data) for data in sent["renewals"]]


def case_scheduling(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """The scheduler for ``--dist load``, which ``-n`` implies, if the run has specs; else ``None``.

    A case is one unit of work, and so is a spec whose cases choose their runtimes, because these are timed together at
    the end. Every other test is a unit of its own, as with pytest-xdist's scheduler. Another ``--dist`` is not changed.
    """
    named = (config.invocation_params.dir / arg.partition("::")[0] for arg in config.args)
    if config.getoption("dist") != "load" or not any(map(is_spec, find_specs(filter(Path.exists, named)))):
        return None
    from xdist.scheduler import LoadScopeScheduling

    settings = settings_of(config)

    @lru_cache
    def one_unit(spec: str) -> bool:
        return chooses_runtimes(config.rootpath / spec, settings)

    class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
        """Tests in units of work."""

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid, one_unit)

    return CaseScheduling(config, log)


def unit_of(nodeid: str, one_unit: Callable[[str], bool]) -> str:
    """The unit of work of a test: its spec if the spec is ``one_unit``, else its case; a plain test is its own unit."""
    file, _, rest = nodeid.partition("::")
    if not rest or not is_spec(Path(file)):
        return nodeid
    return file if one_unit(file) else nodeid.rpartition("::")[0]


def chooses_runtimes(spec: Path, settings: Settings) -> bool:
    """Whether cases of a spec name their runtimes; false for a spec with errors."""
    try:
        return any(case.backend is not None for case in load_cases(spec, settings))
    except QdqspecError:  # the worker that collects the spec reports it
        return False
