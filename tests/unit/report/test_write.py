from __future__ import annotations

import os
from pathlib import Path

import pytest

from qdqspec.app.report.write import write_report, write_reports
from qdqspec.errors import ConfigError, OutputError
from qdqspec.testing.records import sample_run


def test_the_suffix_selects_the_report_format(tmp_path: Path) -> None:
    paths = [tmp_path / "deep" / name for name in ("a.md", "a.HTML", "a.csv", "a.json")]
    write_reports(sample_run(), paths)
    starts = [path.read_text(encoding="utf-8")[:9] for path in paths]
    assert starts == ["# Quantiz", "<!DOCTYPE", "spec,case", '{\n  "case']
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == [
        "a.HTML",
        "a.csv",
        "a.json",
        "a.md",
    ]


@pytest.mark.parametrize(("name", "words"), [("a.docx", "suffix '.docx'"), ("report", "no suffix")])
def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        write_reports(sample_run(), [tmp_path / "a.md", tmp_path / name])
    assert caught.value.cure == "known: .csv, .html, .json, .md, and the word github"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_the_name_of_a_report_is_an_error_and_no_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.md").mkdir()
    with pytest.raises(OutputError, match=r"a\.md: the report cannot be written"):
        write_report(sample_run(), tmp_path / "a.md")
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]


def test_a_failed_write_keeps_the_old_report(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.md"
    path.write_text("old", encoding="utf-8")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_report(sample_run(), path)
    assert path.read_text(encoding="utf-8") == "old"
