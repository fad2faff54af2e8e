"""The text of a failed check."""

from __future__ import annotations

import re

import pytest


def failures(result: pytest.RunResult) -> dict[str, str]:
    """The text below each line of underscores, by the name in that line."""
    found = re.findall(r"\n_+ ([^\n]+) _+\n(.*?)(?=\n_{3,} |\n=====)", result.stdout.str(), re.DOTALL)
    return {name: f"{text}\n" for name, text in found}


def test_only_an_internal_error_is_reported_with_its_traceback(project):
    project.outcomes(**{"int8-b8::speedup": "no model", "int8-b8::parity": "bug"})
    result = project.run()
    found = failures(result)
    assert found["int8-b8::speedup"] == "squeezenet.onnx: there is no such model file\n  check the path\n"
    assert "raise ZeroDivisionError" in found["int8-b8::parity"]
    result.stdout.fnmatch_lines(["E *ZeroDivisionError: a malfunction of ours"])


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
    assert [*failures(result).values()] == ["no licence for this backend\n  ask for one\n"]


def test_the_location_of_a_failure_is_in_the_spec(project):
    project.outcomes(**{"int8-b8::parity": "fail"})
    report = project.pytester.inline_run().getfailures()[0]
    assert report.location == ("specs/a.qdq.yaml", 7, "int8-b8::parity")
