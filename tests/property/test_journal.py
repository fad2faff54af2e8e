"""The journal after an interruption or a change at any byte: complete lines are kept and the search continues."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, example, given, strategies as st

from qdqspec.errors import QdqspecError, StateError
from qdqspec.search.journal import Journal, read_journal, trial_from_json, trial_to_json
from qdqspec.types import LABELS, Interval, LayerTime, Placement, Race, Samples, Site, Trial

HEADER = {"model": "ab12", "device": "some-cpu", "seed": 0}

numbers = st.floats(allow_nan=False)
times = st.lists(numbers, max_size=4).map(tuple)
names = st.text(max_size=8)
sites = st.builds(Site, tensor=names, format=names, axis=..., weight=...)
labels = st.tuples(names, st.sampled_from([*LABELS, "int4:in-only"]))
placements = st.builds(
    Placement, sites=st.frozensets(sites, max_size=3), labels=st.lists(labels, max_size=2).map(tuple)
)
layers = st.builds(LayerTime, milliseconds=numbers, nodes=..., tensors=..., boundary=..., integer=...)
intervals = st.builds(Interval, median=numbers, low=numbers, high=numbers)
races = st.builds(Race, ratio=numbers, p_value=numbers, interval=st.none() | intervals)
samples = st.builds(Samples, wall_ms=times, cpu_ms=times)
trials = st.builds(
    Trial,
    placement=placements,
    status=...,
    error=...,
    samples=samples,
    rival=st.just(Samples()) | samples.filter(lambda taken: bool(taken.wall_ms)),
    build_seconds=numbers,
    graph_hash=...,
    layers=st.lists(layers, max_size=2).map(tuple),
    race=st.none() | races,
    incumbent=...,
    ratio=st.none() | numbers,
    subgraph=...,
)


def written(path: Path, some: list[Trial]) -> bytes:
    """A new journal of these trials."""
    with Journal.open(path, HEADER) as journal:
        for trial in some:
            journal.append(trial)
    return path.read_bytes()


def says(line: bytes) -> object:
    """The content of a line, ``None`` if it is no JSON."""
    with suppress(ValueError):
        return json.loads(line)
    return None


@given(trials)
def test_a_trial_is_read_back_from_json(trial: Trial) -> None:
    back = trial_from_json(trial_to_json(trial))
    assert back == trial
    assert back.placement.labels == trial.placement.labels  # not part of equality


@given(st.lists(trials, min_size=1, max_size=3), trials, st.data())
def test_an_interruption_at_any_byte_loses_at_most_one_line(before, after, data) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trials.jsonl"
        whole = written(path, before)
        cut = data.draw(st.integers(0, len(whole)), label="cut")
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        kept = b"".join(line + b"\n" for line in whole.split(b"\n")[:complete])
        with Journal.open(path, HEADER) as journal:
            assert bool(journal.notes) == (cut > 0 and whole[cut - 1 : cut] != b"\n")
            assert journal.trials() == tuple(before[:complete])
            journal.append(after)
        assert path.read_bytes().startswith(kept)
        with Journal.open(path, HEADER) as journal:
            assert journal.trials() == (*before[:complete], after)
            assert not journal.notes


@given(st.binary(max_size=100), st.sampled_from(["trials.jsonl", "trials.header.json"]))
@example(b"[" * 100_000, "trials.header.json")
@example(b"[" * 100_000 + b"\n", "trials.jsonl")
def test_reading_a_journal_without_locking_does_not_change_it(noise: bytes, name: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trials.jsonl"
        trial = Trial(number=0, phase="pure", placement=Placement(sites=frozenset()))
        written(path, [trial])
        assert read_journal(path)[1] == (trial,)
        (Path(folder) / name).write_bytes(noise)
        before = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
        refusal: QdqspecError | None = None
        try:
            assert read_journal(path)[1] in ((), (trial,))
        except QdqspecError as error:
            refusal = error
        assert refusal is None or (folder in str(refusal) and refusal.cure)
        assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == before


@given(st.lists(trials, min_size=3, max_size=3), st.data())
def test_a_changed_line_is_an_error_and_lines_before_it_are_recovered_byte_for_byte(some, data) -> None:
    with TemporaryDirectory() as folder:
        path, target = Path(folder) / "trials.jsonl", Path(folder) / "other.jsonl"
        lines = written(path, some).splitlines(keepends=True)
        number = data.draw(st.integers(0, 2), label="line")
        place = data.draw(st.integers(0, len(lines[number]) - 2), label="place")
        changed = lines[number][place] ^ data.draw(st.sampled_from([1, 4, 32, 128]), label="change")
        damaged = lines[number][:place] + bytes([changed]) + lines[number][place + 1 :]
        assume(
            says(damaged) != says(lines[number])
        )  # \u00e9 and \u00E9 are the same character, 1e5 and 1E5 one number
        path.write_bytes(b"".join([*lines[:number], damaged, *lines[number + 1 :]]))
        with pytest.raises(StateError, match=rf"jsonl:{number + 1}: .*(damaged|another run)"):
            Journal.open(path, HEADER)
        assert Journal.recover(path, target, HEADER) == number
        assert target.read_bytes() == b"".join(lines[:number])
        with Journal.open(target, HEADER) as journal:
            assert journal.trials() == tuple(some[:number])
        assert Journal.recover(path, target, {**HEADER, "seed": 1}) == 0
