from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qdqspec.app.report.write import annotation_lines, write_reports
from qdqspec.errors import ConfigError, OutputError
from qdqspec.testing.records import faster_case, sample_run


def test_the_suffix_selects_the_report_format(tmp_path: Path) -> None:
    paths = [tmp_path / "deep" / name for name in ("a.md", "a.HTML", "a.csv", "a.json")]
    write_reports(sample_run(), paths)
    starts = [path.read_text(encoding="utf-8")[:9] for path in paths]
    assert starts == ["# Quantiz", "<!DOCTYPE", "spec,case", '{\n  "case']
    assert sorted((tmp_path / "deep").iterdir()) == sorted(paths)


@pytest.mark.parametrize(("name", "words"), [("a.docx", "suffix '.docx'"), ("report", "no suffix")])
def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        write_reports(sample_run(), [tmp_path / "a.md", tmp_path / name])
    assert caught.value.cure == "known: .csv, .html, .json, .md, and the word github"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_the_name_of_a_report_is_an_error_and_no_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.md").mkdir()
    with pytest.raises(OutputError, match=r"a\.md: the report cannot be written"):
        write_reports(sample_run(), [tmp_path / "a.md"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]


# ---- --qdq-report=github ------------------------------------------------------------------------


def test_failed_checks_are_annotations_at_their_lines_of_the_repository(monkeypatch):
    run = sample_run()
    failed = [r for case in run.cases for r in case.results if r.verdict.outcome == "fail"]
    project = next(
        case.evidence.case.spec for case in run.cases if case.evidence.case.spec is not None
    ).parent
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.parent))
    lines = annotation_lines(run, project)
    assert len(lines) == len(failed) > 0
    assert all(line.startswith(("::error ", "::warning ")) and "title=" in line for line in lines)
    assert f"file={project.name}/" in lines[0]
    monkeypatch.setenv("GITHUB_WORKSPACE", "/elsewhere")
    assert f"file={project.name}/" not in annotation_lines(run, project)[0]
    assert len(annotation_lines(replace(run, cases=run.cases * 30), project)) == 10


def test_text_of_annotations_is_escaped():
    case = faster_case()
    failed = next(r for r in case.results if r.verdict.outcome == "fail")
    bad = replace(failed, id="a,b:c", verdict=replace(failed.verdict, headline="100 %\n::stop-commands::x"))
    (line,) = annotation_lines(replace(sample_run(), cases=(replace(case, results=(bad,)),)), Path("/"))
    assert "\n" not in line
    assert "a%2Cb%3Ac" in line
    assert "100 %25" in line
