"""The text of a failed check."""

from __future__ import annotations

import re

import pytest


def failure(result: pytest.RunResult) -> str:
    """The text below the line of underscores, up to the next section."""
    found = re.search(r"\n_+ [^\n]+ _+\n(.*?)\n=====", result.stdout.str(), re.DOTALL)
    assert found is not None, result.stdout.str()
    return found[1] + "\n"


def test_the_command_of_a_failure_is_relative_to_the_working_folder(project, monkeypatch):
    project.outcomes(**{"int8-b8::speedup": "fail"})
    monkeypatch.chdir(project.path / "specs")
    result = project.run(
        f"--rootdir={project.path}", "-c", str(project.path / "pyproject.toml"), "a.qdq.yaml"
    )
    result.stdout.fnmatch_lines(["Reproduce with:", "  pytest a.qdq.yaml::int8-b8::speedup --qdq-scheme=*"])


def test_the_command_of_a_failure_reproduces_it(project):
    project.outcomes(**{"int8-b8::speedup": "fail"})
    command = project.run("--qdq-backend=fake", "--qdq-backend-option=fake.integer=1.3").outlines
    words = command[command.index("Reproduce with:") + 1].split()
    assert words[0] == "pytest"
    assert words[-2:] == ["--qdq-backend=fake", "--qdq-backend-option=fake.integer=1.3"]
    result = project.run(*words[1:])
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"  {' '.join(words)}"])


def test_a_user_error_is_reported_without_a_traceback(project):
    project.outcomes(**{"int8-b8::speedup": "no model"})
    assert failure(project.run()) == "squeezenet.onnx: there is no such model file\n  check the path\n"


def test_an_internal_error_is_reported_with_its_traceback(project):
    project.outcomes(**{"int8-b8::speedup": "bug"})
    result = project.run()
    result.stdout.fnmatch_lines(["*raise ZeroDivisionError*", "E *ZeroDivisionError: a malfunction of ours"])


SETUP_FAILS = """
import pytest
from qdqspec.errors import ConfigError

@pytest.fixture(scope="session")
def qdq_session():
    raise ConfigError("no licence for this backend", cure="ask for one")
"""


def test_a_user_error_in_a_fixture_is_reported_without_a_traceback(project):
    (project.path / "conftest.py").write_text(SETUP_FAILS)
    result = project.run("specs/a.qdq.yaml::int8-b8::parity")
    result.assert_outcomes(errors=1)
    assert failure(result) == "no licence for this backend\n  ask for one\n"


def test_the_location_of_a_failure_is_in_the_spec(project):
    project.outcomes(**{"int8-b8::parity": "fail"})
    report = project.pytester.inline_run().getfailures()[0]
    assert report.location == ("specs/a.qdq.yaml", 7, "int8-b8::parity")
