"""The header and the summary of a run, and the files that it writes, among them junit XML."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest


def test_nothing_is_read_or_reported_if_no_spec_is_collected(project, monkeypatch):
    monkeypatch.setenv("QDQSPEC_BACKND", "x")
    (project.path / "test_plain.py").write_text("def test_plain(): pass\n")
    result = project.run("test_plain.py")
    result.assert_outcomes(passed=1)
    assert not any(line.startswith(("qdqspec:", "===== quantized")) for line in result.outlines)


def test_reports_are_written_and_their_paths_printed(project):
    result = project.run("--qdq-report=out/a.json", "--qdq-report=out/b.json", "--qdq-json=record.txt")
    result.stdout.fnmatch_lines(["Report: out?a.json", "Report: out?b.json", "Report: record.txt"])
    record = json.loads((project.path / "record.txt").read_text())
    assert len(record["cases"]) == 2
    assert json.loads((project.path / "out" / "a.json").read_text())["cases"] == record["cases"]


def test_the_record_of_a_run_that_judges_nothing_replaces_an_earlier_one(project):
    files = ("--qdq-json=record.json", "--qdq-report=page.md")
    project.run(*files)
    page, record = project.path / "page.md", project.path / "record.json"
    assert len(json.loads(record.read_text())["cases"]) == 2
    project.run("--collect-only", *files)
    assert len(json.loads(record.read_text())["cases"]) == 2
    result = project.run("-k", "nothing", *files)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert json.loads(record.read_text())["cases"] == []
    assert "No case was run." in page.read_text()
    result.stdout.fnmatch_lines(["Report: page.md", "Report: record.json"])


BROKEN_FORMAT = """

from qdqspec.app.report.formats.csv import CsvFormat

CsvFormat.render = lambda self, record: 1 / 0
"""


def test_a_report_that_cannot_be_written_does_not_prevent_the_others(project):
    project.add_to_conftest(BROKEN_FORMAT)
    (project.path / "folder.md").mkdir()
    reports = [f"--qdq-report={name}" for name in ("page.csv", "folder.md", "page.html")]
    result = project.run_apart(*reports, "--qdq-json=record.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(
        [
            "Report: page.html",
            "Report: record.json",
            "*page.csv: the report cannot be made: ZeroDivisionError: division by zero",
            "*folder.md: the report cannot be written*",
        ]
    )


WITH_FOLDER = """

from dataclasses import replace

plain = FakeSession._evidence
FakeSession._evidence = lambda self, case: replace(plain(self, case), output=HERE / case.id)
"""


@pytest.fixture
def with_folders(project):
    """The project with a folder of models for each case."""
    project.add_to_conftest("from fake_session import HERE\n" + WITH_FOLDER)
    for name in ("int8-b1", "int8-b8"):
        (project.path / name).mkdir()
    return project


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]])
def test_a_result_that_cannot_be_written_fails_the_run(with_folders, arguments):
    (with_folders.path / "int8-b1" / "result.json").mkdir()
    result = with_folders.run_apart(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*int8-b1/result.json: the result cannot be written*"])
    assert (with_folders.path / "int8-b8" / "result.json").is_file()


def test_ctrl_c_prints_how_to_resume(project):
    project.outcomes(**{"int8-b8::speedup": "interrupt"})
    result = project.run_apart("specs", "--qdq-seed=3", "-k", "int8 and vision")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["The measurements are kept. Resume with:"])
    line = result.outlines[result.outlines.index("The measurements are kept. Resume with:") + 1]
    assert line.strip().startswith("pytest ")
    assert line.endswith("specs --qdq-seed=3 -k 'int8 and vision'")


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]])
def test_the_junit_properties_of_a_check(project, arguments):
    result = project.run_apart("--junitxml=out.xml", "-W", "error", *arguments)
    result.assert_outcomes(passed=4)
    cases = list(ET.parse(project.path / "out.xml").iter("testcase"))
    assert {case.get("classname") for case in cases} == {
        "specs.a.qdq.yaml.int8-b1",
        "specs.a.qdq.yaml.int8-b8",
    }
    for case in cases:
        found = {p.get("name"): p.get("value") for p in case.iter("property")}
        assert found["qdq.latency_ms"] == "2.0"
        assert found["qdq.reference_ms"] == "3.0"
        assert found["qdq.speedup"] == "1.5"
        assert found["qdq.sqnr_db"] == "31.5"
        assert found["qdq.backend"] == "fake-cpu"
        assert found["qdq.scheme"] == "e3b0c44298fc1c14"
        assert found["qdq.provenance"] == "measured"
        assert found["qdq.verdict"] == "pass"
