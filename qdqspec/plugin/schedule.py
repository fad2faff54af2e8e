"""Distributes checks over the workers of ``pytest -n`` such that all checks of a case run on one worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec.cases import find_specs, is_spec, load_cases
from qdqspec.config import Settings
from qdqspec.errors import QdqspecError
from qdqspec.plugin.options import settings_of

if TYPE_CHECKING:
    import pytest
    from xdist.scheduler import LoadScopeScheduling


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
    """The unit of work of a test: its case, its spec where that is ``one_unit``, or itself."""
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
