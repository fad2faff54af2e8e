"""``--qdq-report=github``: annotations for checks that failed, and the summary of the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qdqspec.app.report.write import annotation_lines, write_reports
from qdqspec.testing.records import sample_run


def test_a_failed_check_is_an_annotation_at_its_line():
    run = sample_run()
    failed = [r for case in run.cases for r in case.results if r.verdict.outcome == "fail"]
    lines = annotation_lines(run, Path("/repository"))
    assert len(lines) == len(failed) > 0
    assert all(line.startswith(("::error ", "::warning ")) and "title=" in line for line in lines)
    assert all("\n" not in line for line in lines)


def test_paths_of_annotations_are_relative_to_the_repository():
    run = sample_run()
    spec = next(case.evidence.case.spec for case in run.cases if case.evidence.case.spec is not None)
    project = spec.parent
    (line, *_) = annotation_lines(run, project, {"GITHUB_WORKSPACE": str(project.parent)})
    assert f"file={project.name}/" in line
    (line, *_) = annotation_lines(run, project, {"GITHUB_WORKSPACE": "/elsewhere"})
    assert f"file={spec.name}," in line


def test_text_of_annotations_is_escaped():
    run = sample_run()
    (case, *_) = (case for case in run.cases if any(r.verdict.outcome == "fail" for r in case.results))
    failed = next(r for r in case.results if r.verdict.outcome == "fail")
    bad = replace(failed, id="a,b:c", verdict=replace(failed.verdict, headline="100 %\n::stop-commands::x"))
    (line,) = annotation_lines(replace(run, cases=(replace(case, results=(bad,)),)), Path("/"))
    assert "\n" not in line
    assert "a%2Cb%3Ac" in line
    assert "100 %25" in line


def test_there_are_at_most_ten_annotations():
    run = sample_run()
    assert len(annotation_lines(replace(run, cases=run.cases * 30), Path("/"))) == 10


def test_the_summary_is_appended(tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    write_reports(sample_run(), [tmp_path / "github"])
    text = summary.read_text()
    assert text.startswith("before\n")
    assert "# Quantized models" in text
    assert not (tmp_path / "github").exists()
