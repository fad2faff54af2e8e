"""The journal of a search: its file, and the errors for one that cannot be resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qdqspec.errors import OutputError, StateError
from qdqspec.search.journal import SCHEMA_VERSION, Journal
from qdqspec.types import Samples, Trial
from tests.support.lab import placement

HEADER = {"model": "ab12", "device": "some-cpu", "backend": "onnxruntime", "seed": 0}
TRIAL = Trial(number=0, phase="pure", placement=placement("x"), samples=Samples(wall_ms=(1.5, 1.25)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "trials.jsonl"


def write(path: Path, count: int) -> None:
    with Journal.open(path, HEADER) as journal:
        for _ in range(count):
            journal.append(TRIAL)


PROMISED = {"trial", "phase", "placement", "status", "error", "samples", "build_seconds"}


def test_a_trial_is_in_the_file_with_the_documented_keys_as_soon_as_it_is_appended(path: Path) -> None:
    with Journal.open(path, HEADER) as journal:
        assert journal.trials() == ()
        header = json.loads((path.parent / "trials.header.json").read_text())
        assert header == {"schema_version": SCHEMA_VERSION, **HEADER}
        journal.append(TRIAL, eps=0.02)
        line = json.loads(path.read_text())
        assert line.keys() >= PROMISED
        assert (line["placement"], line["eps"]) == (TRIAL.placement.digest, 0.02)
        assert journal.trials() == (TRIAL,)


def test_lines_of_another_run_are_found_without_the_header_file(path: Path) -> None:
    write(path, 1)
    (path.parent / "trials.header.json").unlink()
    with pytest.raises(StateError, match=r"jsonl:1: this line was written by another run"):
        Journal.open(path, {**HEADER, "seed": 1})


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[1]"])
def test_a_missing_header_file_is_written_again(path: Path, damage: bytes | None) -> None:
    write(path, 1)
    header = path.parent / "trials.header.json"
    whole = header.read_bytes()
    header.unlink() if damage is None else header.write_bytes(damage)
    with Journal.open(path, HEADER) as journal:
        assert journal.trials() == (TRIAL,)
    assert header.read_bytes() == whole


def test_only_complete_lines_remain_after_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, 1)
    whole = path.read_bytes()
    real = os.write

    def half_then_full(file: int, data: memoryview) -> int:
        if file != journal._file:
            return real(file, data)
        if len(data) < len(whole):
            raise OSError(28, "No space left on device")
        return real(file, data[: len(data) // 2])

    with Journal.open(path, HEADER) as journal:
        monkeypatch.setattr(os, "write", half_then_full)
        with pytest.raises(OutputError, match="No space left on device"):
            journal.append(TRIAL)
        monkeypatch.undo()
        assert path.read_bytes() == whole
        journal.append(TRIAL)
        assert len(journal.trials()) == 2
