"""The folders ``front/`` (two objectives) and ``regions/`` (strategy `region`) contain the models of the search."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from chains import chain_model

from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.types import Case, TuneRules

Open = Callable[..., Session]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    onnx.save(chain_model(), tmp_path / "chain.onnx")
    return Case(id="default", model=tmp_path / "chain.onnx", tune=TuneRules(trials=12, objective="pareto"))


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[Open]:
    sessions: list[Session] = []

    def open_it(**settings) -> Session:
        session = Session(**{"backend": "fake", "root": tmp_path / "root", **settings})
        session.runtime().options = BuildOptions(
            extra={"fake.run_noise": "0.005", "fake.build_noise": "0.002"}
        )
        sessions.append(session)
        return session

    yield open_it
    for session in sessions:
        session.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "front").iterdir()}


def test_a_front_is_written_as_one_file_per_placement_and_a_table(open_session: Open, case: Case) -> None:
    session = open_session()
    front = session.search(case).front
    assert len(front) > 1
    names = {f"{number}.onnx" for number in range(1, len(front) + 1)}
    assert set(contents(session.output(case))) == {*names, "front.csv"}


def test_a_cached_search_writes_the_same_front(open_session: Open, case: Case, tmp_path: Path) -> None:
    first, second = open_session(), open_session(output=tmp_path / "elsewhere")
    first.search(case)
    assert second.search(case).provenance.source == "cached"
    assert contents(second.output(case)) == contents(first.output(case))


def test_a_saved_result_includes_the_front(open_session: Open, case: Case, tmp_path: Path) -> None:
    result = open_session(no_cache=True).tune(case)
    assert result.evidence.output is not None
    assert contents(result.save(tmp_path / "saved")) == contents(result.evidence.output)


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


def test_the_best_model_of_each_region_is_written_on_request(
    open_session: Open, case: Case, tmp_path: Path
) -> None:
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
    kept = again.output(case) / "regions"
    assert {p.name: p.read_bytes() for p in kept.iterdir()} == {
        p.name: p.read_bytes() for p in folder.iterdir()
    }
    open_session().search(case)
    assert not folder.exists(), "a model of an earlier search"
