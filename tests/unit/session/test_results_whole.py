"""The output of a run is the complete old or new set of files, and an unfinished journal is never lost."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from sessions import contents, interrupted

from qdqspec.app.preparation.stored import JOURNAL
from qdqspec.app.report.write import write_results
from qdqspec.errors import OutputError

SET = ("reference.onnx", "tuned.onnx", "tuned_raw.onnx", "scheme.json", "layers.csv")


def other_model(project: Path) -> None:
    proto = onnx.load(project / "chain.onnx")
    weights = proto.graph.initializer[0]
    weights.raw_data = np.frombuffer(weights.raw_data, np.float32)[::-1].tobytes()
    onnx.save(proto, project / "chain.onnx")


@pytest.mark.parametrize("cached", [False, True])
def test_a_full_disk_does_not_change_the_old_results(
    open_session, case, project, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    session = open_session()
    session.search(case)
    folder = session.output(case)
    (folder / "result.json").write_text("the old result")
    if not cached:
        other_model(project)
    before = {name: content for name, content in contents(folder).items() if name != JOURNAL}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    writer = "app.preparation.stored.shutil.copyfile" if cached else "qdq.scheme_file.write_text"
    with monkeypatch.context() as patch:
        patch.setattr(f"qdqspec.{writer}", full)
        with pytest.raises(OutputError, match="No space left") as caught:
            open_session().search(case)
    assert caught.value.where == str(folder)
    assert "free some space" in str(caught.value.cure)
    after = contents(folder)
    assert [after[name] for name in (*SET, "result.json")] == [before[name] for name in (*SET, "result.json")]
    assert not [path for path in folder.iterdir() if path.name.endswith(".part")]
    open_session().search(case)
    assert "result.json" not in contents(folder), "reports write it after all other files"


def test_an_interrupted_replacement_of_results_removes_the_old_result_json(
    open_session, case, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session()
    session.search(case)
    folder = session.output(case)
    (folder / "result.json").write_text("the old result")
    move = Path.replace

    def killed(source: Path, target: Path) -> Path:
        if Path(target).name == "scheme.json" and Path(target).parent == folder:
            raise KeyboardInterrupt
        return move(source, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        open_session().search(case)
    monkeypatch.undo()
    assert not (folder / "result.json").exists()
    open_session().search(case)
    assert set(SET) <= contents(folder).keys()


def test_weights_of_an_older_model_are_removed(open_session, case) -> None:
    session = open_session()
    folder = session.output(case)
    folder.mkdir(parents=True)
    (folder / "tuned.onnx").write_text("an old model")
    (folder / "tuned.onnx.data").write_text("its weights")
    session.search(case)
    assert not (folder / "tuned.onnx.data").exists()
    onnx.checker.check_model(folder / "tuned.onnx")


def test_weights_of_a_user_model_are_never_removed(open_session, case, project: Path) -> None:
    """The external data of a user model in the folder of results has the name of an output file."""
    session = open_session()
    folder = session.settings.output / "mine" / "default"
    folder.mkdir(parents=True)
    external = {"save_as_external_data": True, "location": "tuned.onnx.data", "size_threshold": 0}
    onnx.save(onnx.load(project / "chain.onnx"), folder / "mine.onnx", **external)
    own = (folder / "tuned.onnx.data").read_bytes()
    with pytest.raises(OutputError, match="would overwrite the input"):
        session.search(replace(case, model=folder / "mine.onnx"))
    assert (folder / "tuned.onnx.data").read_bytes() == own


def test_an_unfinished_journal_is_never_overwritten(open_session, case, project) -> None:
    left: list[bytes] = []
    for _ in range(3):
        session = open_session()
        interrupted(session, case, 2)
        left.append((session.output(case) / JOURNAL).read_bytes())
        other_model(project)
    folder = session.output(case)
    search = open_session().evidence(case, frozenset())
    aside = ["trials.previous.jsonl", "trials.previous-2.jsonl", "trials.previous-3.jsonl"]
    assert [(folder / name).read_bytes() for name in aside] == left
    (warning,) = [text for text in search.warnings if "set aside as trials.previous-3.jsonl" in text]
    assert "1 node changed: Conv 'conv0' (weights)" in warning
    open_session(no_cache=True).search(case)
    assert [(folder / name).read_bytes() for name in aside] == left, "a finished journal has another name"


def test_a_damaged_line_of_the_journal_drops_only_it_and_later_ones(open_session, case) -> None:
    session = open_session()
    interrupted(session, case, 2)
    journal = session.output(case) / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    spoilt = [*lines[:-1], lines[-1].replace(b'"status":"ok"', b'"status":"Ok"')]
    assert spoilt != lines
    journal.write_bytes(b"".join(spoilt))
    evidence = open_session().evidence(case, frozenset())
    (warning_text,) = [warning for warning in evidence.warnings if "damaged" in warning]
    assert warning_text.startswith(f"{JOURNAL}:{len(lines)}: ")
    assert f"its first {len(lines) - 1} lines are kept" in warning_text
    assert journal.read_bytes().startswith(b"".join(lines[:-1]))
    assert (journal.parent / "trials.previous.jsonl").read_bytes() == b"".join(spoilt)


@pytest.mark.parametrize("asked", ["measure", "verify", "winner", "other"])
def test_a_result_is_written_beside_the_model_it_describes(open_session, case, asked: str) -> None:
    """Of modes that search nothing, and of another placement than the winner."""
    first = open_session()
    found = first.search(case)
    folder = first.output(case)
    (folder / "tuned.onnx").write_text("another model")
    other = found.trials[0].placement
    schemes = {"winner": found.winner.digest, "other": other.digest}
    words = {"scheme": schemes[asked]} if asked in schemes else {"mode": asked}
    session = open_session(**words)
    session.search(case)
    write_results(session.record())
    if asked == "other":
        assert not (folder / "result.json").exists()
        folder /= other.digest
    described = json.loads((folder / "result.json").read_text())["scheme"]["digest"]
    placed = json.loads((folder / "scheme.json").read_text())["digest"]
    assert placed == described == schemes.get(asked, found.winner.digest)
    ops = [node.op_type for node in onnx.load(folder / "tuned.onnx").graph.node]
    assert ("QuantizeLinear" in ops) == (asked != "other")


def test_names_in_the_table_of_layers_are_one_line_and_no_formula(open_session, case, project: Path) -> None:
    proto = onnx.load(project / "chain.onnx")
    for number, node in enumerate(proto.graph.node):
        node.name = f"=1+{number}\n"
    onnx.save(proto, project / "chain.onnx")
    session = open_session()
    session.search(case)
    with (session.output(case) / "layers.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert any(cell.startswith("'=1+") for cell in cells)
    assert not [cell for cell in cells if cell.startswith("=") or "\n" in cell]
