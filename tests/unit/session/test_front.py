"""The folders ``front/`` (two objectives) and ``regions/`` (strategy `region`) contain the models of the search."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from sessions import Open

from qdqspec.types import Case, TuneRules


@pytest.fixture
def case(case: Case) -> Case:
    return replace(case, tune=TuneRules(trials=12, objective="pareto"))


def contents(output: Path, name: str = "front") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / name).iterdir()}


def test_a_front_is_written_as_models_and_a_table(open_session: Open, case: Case, tmp_path: Path) -> None:
    session = open_session()
    result = session.tune(case)
    front = result.search.front
    assert len(front) > 1
    names = {f"{number}.onnx" for number in range(1, len(front) + 1)}
    written = contents(session.output(case))
    assert set(written) == {*names, "front.csv"}
    assert contents(result.save(tmp_path / "saved")) == written
    again = open_session(output=tmp_path / "elsewhere")
    assert again.search(case).provenance.source == "cached"
    assert contents(again.output(case)) == written


def test_a_search_removes_the_front_of_an_earlier_one(open_session: Open, case: Case) -> None:
    session = open_session()
    session.search(case)
    front = session.output(case) / "front"
    longer = {"9.onnx": b"of yesterday", "9.onnx.data": b"its weights"}
    mine = {"notes.txt": b"of the user", "10.onnx": b"another model", "../beside.onnx": b"not in it"}
    for name, content in (longer | mine).items():
        (front / name).write_bytes(content)
    with (front / "front.csv").open("a") as table:
        table.write("9.onnx,b7c1,3,0.9,0.8,1.0,31.0,\n../beside.onnx,b7c1,3,0.9,0.8,1.0,31.0,\n")
    alone = replace(case, tune=replace(case.tune, objective="latency"))
    open_session().search(alone)
    assert contents(session.output(case)) == {"notes.txt": b"of the user", "10.onnx": b"another model"}
    assert (session.output(case) / "beside.onnx").exists()


def test_removing_a_front_keeps_the_input_model(open_session: Open, case: Case) -> None:
    session = open_session()
    session.search(case)
    model = session.output(case) / "front" / "2.onnx"
    again = replace(case, model=model, tune=TuneRules(trials=2))
    open_session(output=session.output(case), layout="").search(again)
    assert set(contents(session.output(case))) == {"2.onnx"}


def test_models_of_regions_are_written_on_request(open_session: Open, case: Case, tmp_path: Path) -> None:
    rules = TuneRules(trials=8, strategy="region", min_sqnr_db="none")
    session = open_session()
    session.search(replace(case, tune=rules))
    assert not (session.output(case) / "regions").exists()
    asked = replace(case, tune=replace(rules, region_models=True))
    open_session().search(asked)
    folder = session.output(case) / "regions"
    rows = list(csv.DictReader((folder / "regions.csv").read_text().splitlines()))
    assert {path.name for path in folder.iterdir()} == {"regions.csv", *(row["file"] for row in rows)}
    assert [row["pattern"] for row in rows] == list(dict.fromkeys(row["pattern"] for row in rows))
    again = open_session(output=tmp_path / "elsewhere")
    assert again.search(asked).provenance.source == "cached"
    assert contents(again.output(case), "regions") == contents(session.output(case), "regions")
    open_session().search(case)
    assert not folder.exists(), "a model of an earlier search"
