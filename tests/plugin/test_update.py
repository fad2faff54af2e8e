"""``--qdq-update``: written entries, reported entries, and obsolete entries."""

from __future__ import annotations

import json

import pytest
from baseline_entries import entry_of

from qdqspec.checks.baselines import read_baseline, update_baseline

SPEC = """\
qdqspec: 1
model: models/squeezenet.onnx
matrix: {batch: [1, 8]}
checks:
  - {kind: speedup, min: 1.1}
  - {kind: regression, max: 5%}
"""

# The interface that the plugin uses: the session has measured the checks, and the plugin writes baselines.
CONFTEST = """\
import os
import pytest
from pathlib import Path
from fake_session import FakeSession
from qdqspec.checks.baselines import Entry, Renewal, baseline_file, read_baseline
from qdqspec.types import DeviceKey

ENTRY = Path(__file__).with_name("entry.json").read_text()


class Measuring(FakeSession):
    def __init__(self, update):
        super().__init__()
        self.update = update
        self.found = []

    def judge(self, case, check):
        if check.kind == "regression" and self.update is not None:
            file = baseline_file(case, DeviceKey(key="sample device"))
            known = read_baseline(file)
            old = known.entry((case.id, "regression")) if known else None
            self.found.append(Renewal(
                file=file, device="sample device", name=(case.id, "regression"),
                old=old.ratio.median if old else None, entry=Entry.model_validate_json(ENTRY),
            ))
        return super().judge(case, check)

    def renewals(self):
        return tuple(self.found)


@pytest.fixture(scope="session")
def qdq_session(pytestconfig):
    session = Measuring(pytestconfig.getoption("qdq_update"))
    yield session
    session.close()
    if Path(__file__).with_name("blocked").exists():
        Path(__file__).with_name("specs").joinpath("__baselines__").write_text("a file, not a folder")
"""
ENTRY, OLD = entry_of(0.574), entry_of(0.6)


@pytest.fixture
def measured(project):
    """A project with two regression checks, and the path of its baseline."""
    project.spec("a.qdq.yaml", SPEC)
    (project.path / "conftest.py").write_text(CONFTEST)
    (project.path / "entry.json").write_text(ENTRY.model_dump_json())
    project.file = project.path / "specs" / "__baselines__" / "a" / "sample-device.json"
    return project


def names(project):
    known = read_baseline(project.file)
    return known.names() if known else ()


def test_new_entries_are_written_and_reported_with_the_option_only(measured):
    measured.run().assert_outcomes(passed=4)
    assert not measured.file.parent.parent.exists()
    result = measured.run("--qdq-update=new")
    result.assert_outcomes(passed=4)
    assert names(measured) == (("b1", "regression"), ("b8", "regression"))
    result.stdout.fnmatch_lines(
        [
            "Baseline: specs/__baselines__/a/sample-device.json",
            "  b1::regression  new, 0.574",
            "  b8::regression  new, 0.574",
        ]
    )


def test_renewed_entries_are_reported_with_the_difference(measured):
    update_baseline(measured.file, "sample device", {("b1", "regression"): OLD, ("b8", "regression"): OLD})
    result = measured.run("--qdq-update=all", "specs/a.qdq.yaml::b8")
    result.stdout.fnmatch_lines(["  b8::regression  0.600 -> 0.574 (-4.3 %)"])
    assert read_baseline(measured.file).entry(("b1", "regression")) == OLD


@pytest.fixture
def outdated(measured):
    """A baseline with an entry of a check that is no longer in the spec."""
    entries = {("b1", "regression"): OLD, ("b8", "regression"): OLD, ("b32", "regression"): OLD}
    update_baseline(measured.file, "sample device", entries)
    return measured


OBSOLETE = "Obsolete baseline: specs/__baselines__/a/sample-device.json: b32::regression"


def test_obsolete_entries_are_reported_with_the_command_that_removes_them(outdated):
    result = outdated.run("--qdq-update=changed")
    result.stdout.fnmatch_lines([OBSOLETE, "Remove with:", "  qdqspec baseline prune specs"])
    assert len(names(outdated)) == 3


WORKERS = ["-n", "2", "--dist", "loadscope"]


@pytest.mark.parametrize(
    "selection",
    [
        ["specs/a.qdq.yaml::b1"],
        ["--deselect", "specs/a.qdq.yaml::b1::speedup"],
        ["-k", "b8", *WORKERS],
    ],
)
def test_a_partial_run_does_not_report_or_remove_unselected_entries(outdated, selection):
    result = outdated.run_apart(*selection, "--qdq-update=all")
    assert "bsolete" not in result.stdout.str()
    assert len(names(outdated)) == 3


@pytest.mark.parametrize("workers", [[], WORKERS], ids=["one process", "workers"])
def test_update_all_removes_obsolete_entries_once_if_the_whole_spec_ran(outdated, workers):
    """Each worker collects the whole selection and runs a part of it; the controller writes once."""
    result = outdated.run_apart("specs", "--qdq-update=all", *workers)
    result.assert_outcomes(passed=4)
    assert result.stdout.str().count("Baseline: specs/") == 1
    assert result.stdout.str().count("b32::regression  removed, its spec does not ask for it") == 1
    assert names(outdated) == (("b1", "regression"), ("b8", "regression"))


def test_a_baseline_that_cannot_be_written_fails_the_run(measured):
    (measured.path / "blocked").touch()
    result = measured.run("--qdq-update=new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*sample-device.json: the baseline cannot be written: *"])


def test_update_in_ci_is_a_usage_error(measured, monkeypatch):
    monkeypatch.setenv("CI", "true")
    result = measured.run("--qdq-update=new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--qdq-update: baselines are not written in CI*", "*--qdq-update-in-ci*"])
    assert measured.calls() == []
    measured.run("--qdq-update=new", "--qdq-update-in-ci").assert_outcomes(passed=4)
    assert json.loads(measured.file.read_text())["device"] == "sample device"
