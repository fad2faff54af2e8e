"""Two tiers of tests, and an environment without the variables of CI runners, of pytest and of colours.

``pytest tests`` runs the first tier: units and contracts on the simulated device and small models. The second tier has
the marker `integration`: real runtimes, pytest runs of the plugin, commands, documents. ``pytest tests -m integration``
runs it, and so does a path to its tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SECOND_TIER = (
    "integration", "plugin", "typing", "unit/backends", "unit/cluster", "unit/api", "unit/cli",
    "unit/report/test_browser.py", "contracts/test_odd_models.py",
)  # fmt: skip

NAMES = ("CI", "PYTEST_ADDOPTS", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE")


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """A test of such a variable sets it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in NAMES or name.startswith("GITHUB_"):
                patch.delenv(name)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the second tier, and leave it out if the whole folder was requested without ``-m`` or ``-k``."""
    folders = tuple((TESTS / name).as_posix() for name in SECOND_TIER)
    second = [item for item in items if item.path.as_posix().startswith(folders)]
    for item in second:
        item.add_marker(pytest.mark.integration)
    is_whole = {Path(argument).resolve() for argument in config.args} <= {TESTS, TESTS.parent}
    if is_whole and not config.option.markexpr and not config.option.keyword:
        config.hook.pytest_deselected(items=second)
        items[:] = [item for item in items if item not in set(second)]
