"""Run records in JSON, and the files that are written of them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from qdqspec.app.report.formats.csv import report_format
from qdqspec.app.report.record import (
    case_from_json,
    case_to_json,
    json_text,
    record_from_json,
    record_to_json,
)
from qdqspec.app.report.write import annotation_lines, write_reports
from qdqspec.errors import ConfigError, OutputError, StateError
from qdqspec.testing.records import alone_case, bare_run, faster_case, hostile_run, sample_run
from qdqspec.types import RuntimeComparison, RuntimeModel

SAMPLE = record_to_json(sample_run())


LOST = RuntimeModel(case="a", backend="b", target="t", model="tuned", failure="it ended")
RUNTIMES = RuntimeComparison(name="n", clock="cpu", builds=1, models=(LOST,), reference="r", winner="w")


@pytest.mark.parametrize("run", [sample_run, bare_run, hostile_run])
def test_a_record_read_from_json_is_written_as_the_same_json(run) -> None:
    data = record_to_json(replace(run(), runtimes=(RUNTIMES,)))
    after = record_from_json(json.loads(json_text(data)))
    assert after.runtimes == (RUNTIMES,)
    assert record_to_json(after) == data
    for old, new in zip(run().cases, after.cases, strict=True):
        assert new.results == old.results
        for part in ("latency", "parity", "accuracy", "pairs", "node_ops", "regression"):
            assert getattr(new.evidence, part) == getattr(old.evidence, part)


def test_equal_outputs_are_written_as_strict_json() -> None:
    text = json_text(case_to_json(alone_case()))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(text, parse_constant=refuse)
    assert data["parity"]["sqnr_db"] == 200.0
    assert data["parity"]["outputs"][0]["sqnr_db"] == "Infinity"
    restored = case_from_json(data).evidence.parity
    assert restored.sqnr_db == 200.0
    assert restored.outputs[0].sqnr_db == float("inf")


def test_a_record_contains_no_absolute_path(tmp_path: Path) -> None:
    case = faster_case()
    found = case.evidence
    home = tmp_path / "somebody" / "work"
    broken = f"cannot open {home}/out/candidate.onnx: node /block/conv in {Path.home()}/x"
    failed = replace(found.search.trials[5], error=broken)
    evidence = replace(
        found,
        case=replace(found.case, spec=home / "a.qdq.yaml", model=home / "models" / "a.onnx"),
        output=home / "out",
        search=replace(found.search, trials=(failed,), reason=f"see {home}/out/logs"),
        warnings=(f"no data in {home}",),
    )
    lost = replace(LOST, case=evidence.case.name, failure=f"{home}/m.onnx: broken")
    runtimes = (replace(RUNTIMES, models=(lost,)),)
    run = replace(sample_run(), cases=(replace(case, evidence=evidence),), runtimes=runtimes)
    text = json_text(record_to_json(run))
    assert "m.onnx: broken" in text
    assert str(tmp_path) not in text
    assert str(Path.home()) + "/" not in text
    assert '"spec": "a.qdq.yaml"' in text
    assert '"path": "models/a.onnx"' in text
    assert "cannot open <output>/candidate.onnx: node /block/conv in <home>/x" in text


# ---- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "no schema_version"),
        ({"schema_version": 2}, "it has schema_version 2"),
        ({**SAMPLE, "cases": [{**SAMPLE["cases"][0], "speedup": 3}]}, r"cases\.0\.speedup"),
        ({name: value for name, value in SAMPLE.items() if name != "cases"}, "cases: Field required"),
    ],
)
def test_data_that_is_no_record_is_one_error(data: object, words: str) -> None:
    with pytest.raises(StateError, match=words):
        record_from_json(data)


def paths(data: Any, at: tuple = ()) -> list[tuple]:
    """The paths of all values of JSON data, of lists only those in the first element."""
    inner = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    return [at, *(path for key, value in inner for path in paths(value, (*at, key)))]


JSON = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.just([]) | st.just({})


@given(st.sampled_from([path for path in paths(SAMPLE) if path]), JSON)
def test_damaged_data_is_read_as_a_record_or_raises_one_error(path: tuple, value: object) -> None:
    data = json.loads(json.dumps(SAMPLE))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        record = record_from_json(data)
    except StateError:
        return
    record_to_json(record)


def test_unknown_keys_of_later_versions_are_ignored() -> None:
    later = {**SAMPLE, "weather": "fine"}
    assert record_to_json(record_from_json(later)) == SAMPLE


def test_the_suffix_selects_the_report_format(tmp_path: Path) -> None:
    paths = [tmp_path / "deep" / name for name in ("a.md", "a.HTML", "a.csv", "a.json")]
    write_reports(sample_run(), paths)
    starts = [path.read_text(encoding="utf-8")[:9] for path in paths]
    assert starts == ["# Quantiz", "<!DOCTYPE", "spec,case", '{\n  "case']
    assert sorted((tmp_path / "deep").iterdir()) == sorted(paths)


def test_a_failure_of_severity_warn_is_no_failed_check_of_a_table() -> None:
    case = faster_case()
    failed = [replace(result, severity="warn") for result in case.results if result.verdict.outcome == "fail"]
    (row,) = csv.DictReader(
        report_format.render(replace(sample_run(), cases=(replace(case, results=failed),))).splitlines()
    )
    assert (len(failed) > 0, row["checks_failed"]) == (True, "0")


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
