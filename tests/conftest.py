"""Two tiers of tests, and an environment without the variables of CI runners, of pytest and of colours.

``pytest tests`` runs the first tier: units and contracts on the simulated device and small models. The second tier has
the marker `integration`: real runtimes, pytest runs of the plugin, commands, documents. ``pytest tests -m integration``
runs it, and so does a path to its tests.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from json_audit import audit

TESTS = Path(__file__).parent
SECOND_TIER = (
    "integration", "plugin", "typing", "unit/backends", "unit/cluster", "unit/api", "unit/cli",
    "unit/report/test_browser.py", "contracts/test_odd_models.py",
)  # fmt: skip

NAMES = ("CI", "PYTEST_ADDOPTS", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE")


@pytest.fixture(scope="session", autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each worker has its own locks of devices: a wait for another worker would be reported, which tests read."""
    tmp_path_factory.getbasetemp()  # stays where it is
    with (
        tempfile.TemporaryDirectory(prefix="qdq", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """A test of such a variable sets it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in NAMES or name.startswith("GITHUB_"):
                patch.delenv(name)
        yield


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Any]:
    """A session in an empty folder."""
    from qdqspec.app.session import Session

    with Session(root=tmp_path) as opened:
        yield opened


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def verb(tmp_path, monkeypatch, capsys):
    """``verb("doctor", "--json")`` in an empty project; JSON must contain all that the terminal shows."""
    for name in list(os.environ):
        if name.startswith("QDQSPEC_"):
            monkeypatch.delenv(name)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)

    from qdqspec.app.cli import main

    def run(*words: str | Path) -> Outcome:
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:  # argparse exits with it
            code = int(end.code or 0)
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        if "--json" in words and written.out:
            audit(json.loads(written.out), written.err)
        return Outcome(code, written.out, written.err)

    before = signal.getsignal(signal.SIGTERM)  # `cluster` replaces it
    yield run
    signal.signal(signal.SIGTERM, before)


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
