"""A project with one spec and the fake session."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import qdqspec.app.report.tables
import qdqspec.app.report.write
import qdqspec.app.session

# Pytester unloads modules that its runs have loaded first; numpy cannot be loaded twice, and the others take up to
# one second in each test.
import qdqspec.backends.base
import qdqspec.spec.models  # noqa: F401

SPEC = """\
qdqspec: 1
model: models/squeezenet.onnx
title: SqueezeNet for the door camera
tags: [vision, smoke]
matrix: {quant: [int8], batch: [1, 8]}
checks:
  - {kind: speedup, min: 1.1}
  - {kind: parity, min_sqnr_db: 25}
"""

CONFTEST = """\
import pytest
from fake_session import FakeSession


@pytest.fixture(scope="session")
def qdq_session():
    session = FakeSession()
    yield session
    session.close()
"""


class Project:
    """A folder with specs; ``run`` drives a real pytest in it."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path
        (self.path / "fake_session.py").write_text((Path(__file__).parent / "fake_session.py").read_text())
        (self.path / "conftest.py").write_text(CONFTEST)
        (self.path / "pyproject.toml").write_text("[tool.pytest]\nstrict = true\n")
        self.spec("a.qdq.yaml", SPEC)

    def spec(self, name: str, text: str) -> Path:
        path = self.path / "specs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def add_to_conftest(self, text: str) -> None:
        with (self.path / "conftest.py").open("a") as file:
            file.write(text)

    def outcomes(self, **words: str) -> None:
        """Set outcomes of checks: ``outcomes(**{"int8-b1::speedup": "fail"})``."""
        (self.path / "outcomes.json").write_text(json.dumps(words))

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess(*arguments)

    def run_apart(self, *arguments: str) -> pytest.RunResult:
        """Run in a separate process, for tests of processes, signals or imports."""
        return self.pytester.runpytest_subprocess(*arguments)

    def calls(self) -> list[str]:
        """The calls of the session, without process ids."""
        file = self.path / "calls.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" ")[2] for line in lines]

    def processes(self) -> dict[str, set[str]]:
        """The process ids that judged each case."""
        found: dict[str, set[str]] = {}
        for line in (self.path / "calls.txt").read_text().splitlines():
            pid, verb, *rest = line.split()
            if verb == "judge":
                found.setdefault(rest[0].partition("::")[0], set()).add(pid)
        return found


@pytest.fixture
def simulated(pytester: pytest.Pytester, models: Path) -> pytest.Pytester:
    """A project on the simulated device, with the model ``specs/digits_resnet.onnx``."""
    (pytester.path / "pyproject.toml").write_text(
        '[tool.pytest]\nstrict = true\n[tool.qdqspec]\nbackend = "fake"\n'
    )
    shutil.copy(models / "digits_resnet.onnx", pytester.mkdir("specs"))
    return pytester


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)
