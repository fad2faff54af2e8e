"""A journal changed at any byte: complete lines are kept unchanged, others are recognized."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqspec.errors import StateError
from qdqspec.search import journal as journal_module
from qdqspec.search.journal import Journal
from qdqspec.types import Consumer, LayerTime, Placement, Race, Samples, Site, Trial

HEADER = {"model_sha256": "ab12", "device": "a-cpu", "backend": "onnxruntime-cpu", "seed": 0}
RUN = journal_module._digest({"schema_version": journal_module.SCHEMA_VERSION, **HEADER})


def trial(number: int) -> Trial:
    site = Site(tensor=f"x{number}", consumers=(Consumer("conv", 0),), format="int8")
    return Trial(
        number=number,
        phase="surrogate",
        placement=Placement(sites=frozenset({site}), labels=(("conv", "in+out"),)),
        samples=Samples(wall_ms=(1.5, 1.25), cpu_ms=(1.4, 1.2)),
        layers=(LayerTime(name="conv_nchwc", op_type="QLinearConv", milliseconds=0.7, nodes=("conv",)),),
        race=Race(opponent="none", ratio=0.8, p_value=0.01, pairs=6, verdict="faster"),
        ratio=0.8,
        incumbent=True,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trials.jsonl"
    with Journal.open(path, HEADER) as journal:
        for number in range(3):
            journal.append(trial(number))
    return path


def test_a_change_of_any_byte_of_a_line_is_recognized(path: Path) -> None:
    line = path.read_bytes().splitlines(keepends=True)[0]
    assert journal_module._trial(path, 1, line, RUN) == trial(0)
    for place in range(len(line) - 1):
        for change in (1, 4, 32, 128):
            damaged_line = line[:place] + bytes([line[place] ^ change]) + line[place + 1 :]
            with pytest.raises(StateError, match=r"damaged|another run"):
                journal_module._trial(path, 1, damaged_line, RUN)


@pytest.mark.parametrize("end", [-40, -1, 0], ids=["truncated", "joined with the next", "empty"])
def test_a_damaged_line_between_others_is_recognized(path: Path, end: int) -> None:
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:end] + (b"" if end == -1 else b"\n") + third)
    with pytest.raises(StateError, match=r"jsonl:2: this line of the journal is damaged"):
        Journal.open(path, HEADER)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_lines_before_a_damaged_one_are_recovered_byte_for_byte(path: Path, damaged: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    damaged_line = [*lines]
    damaged_line[damaged] = lines[damaged].replace(b"1.25", b"1.35")
    path.write_bytes(b"".join(damaged_line))
    target = path.with_name("other.jsonl")
    assert Journal.recover(path, target, HEADER) == damaged
    assert target.read_bytes() == b"".join(lines[:damaged])
    with Journal.open(target, HEADER) as journal:
        assert journal.trials() == tuple(trial(number) for number in range(damaged))
    assert Journal.recover(path, target, {**HEADER, "seed": 1}) == 0
