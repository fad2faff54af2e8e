"""Searches that distribute builds and measurements to twins: devices of the same key, here in the same process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from chains import chain_model

from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.config import Settings
from qdqspec.measurement.bench import NOISE_BUILDS
from qdqspec.measurement.twins import LostTwinError, Twins
from qdqspec.session import Session
from qdqspec.session.tuning import TwinBench
from qdqspec.types import Case, TuneRules
from tests.support.half_models import in_float16

TRIALS = 16


@pytest.fixture
def case(tmp_path) -> Case:
    onnx.save(chain_model(), tmp_path / "chain.onnx")
    return Case(id="default", model=tmp_path / "chain.onnx", tune=TuneRules(trials=TRIALS))


class LocalTwin:
    """A twin with a separate session. The connection is lost at the ``lost_at``-th request if that is not 0."""

    def __init__(self, name: str, case: Case, folder: Path, *, lost_at: int = 0, **settings: Any) -> None:
        self.name = name
        self.requests: list[Mapping[str, Any]] = []
        self._lost_at = lost_at
        self._session = Session(Settings(root=folder, output=folder, backend="fake", **settings))
        (folder / "candidates").mkdir(parents=True)
        self._bench = TwinBench(self._session.work(case).setup, folder / "candidates")
        self._pool = ThreadPoolExecutor(1)

    def ask(self, request: Mapping[str, Any]) -> Future[Any]:
        self.requests.append(json.loads(json.dumps(request)))
        if len(self.requests) == self._lost_at:
            lost: Future[Any] = Future()
            lost.set_exception(LostTwinError(self.name))
            return lost
        return self._pool.submit(lambda: json.loads(json.dumps(self._bench.answer(self.requests[-1]))))

    @property
    def asked(self) -> list[str]:
        return [request["do"] for request in self.requests]

    def close(self) -> None:
        self._pool.shutdown()
        self._bench.close()
        self._session.close()


@pytest.fixture
def tuned(case, tmp_path, monkeypatch):
    """A function that tunes a case with twins of these names and options; the search waits for busy twins."""
    monkeypatch.setattr("qdqspec.measurement.bench.Bench._saved_seconds", lambda *_: 20.0)
    idle = Twins.idle
    monkeypatch.setattr(
        Twins, "idle", lambda self, seconds=0.0, compared=True: idle(self, seconds=20.0, compared=compared)
    )
    with ExitStack() as opened:

        def tune(output: str = "out", **twins: Mapping[str, Any]):
            made = [
                LocalTwin(
                    name, case, tmp_path / name, device=number, **words
                )  # each device has a separate lock
                for number, (name, words) in enumerate(twins.items(), 1)
            ]
            for each in made:
                opened.callback(each.close)
            settings = Settings(root=tmp_path, output=tmp_path / output, backend="fake", no_cache=True)
            session = opened.enter_context(Session(settings, twins=Twins(lambda: made)))
            evidence = session.evidence(case, frozenset({"latency"}))
            lines = (session.output(case) / "trials.jsonl").read_text().splitlines()
            return evidence, [json.loads(line) for line in lines], made

        yield tune


def test_a_search_with_twins_has_the_winner_of_a_search_without(tuned):
    alone, _, _ = tuned("alone")
    evidence, lines, (one, two) = tuned(one={}, two={})
    assert evidence.search.winner.digest == alone.search.winner.digest
    assert evidence.latency.speedup.median == pytest.approx(alone.latency.speedup.median, rel=0.05)
    assert {line["twin"] for line in lines} == {"", "one", "two"}
    assert len({line["placement"] for line in lines if line["phase"] in ("pure", "compose", "refine")}) > 6
    assert one.asked[:3] == [
        "open",
        "time",
        "time",
    ]  # noise, and the pair of models by which devices are compared
    assert two.asked[-1] == "time"  # the confirmation


def test_twins_time_a_float16_model_as_the_reference(tuned, case, monkeypatch):
    known = FakeDevice.capabilities
    monkeypatch.setattr(
        FakeDevice, "capabilities", lambda *words: replace(known(*words), quantizes_half=False)
    )
    onnx.save(in_float16(chain_model()), case.model)
    evidence, _, (one,) = tuned(one={})
    assert evidence.search.converted_from == "float16"
    last = one.requests[-1]
    assert last["do"] == "time"
    assert {"file": "reference.onnx"} in last["candidates"].values()
    assert any("timed on 2 devices" in note for note in evidence.latency.samples["float32"].notes)


def test_noise_and_confirmation_are_distributed_among_twins(tuned):
    evidence, lines, (one,) = tuned(one={})
    noise = next(line for line in lines if line["phase"] == "noise")
    times = [request for request in one.requests if request["do"] == "time"]
    assert times[0]["builds"] == 1 + (NOISE_BUILDS - 1) // 2
    assert len(noise["samples"]["wall_ms"]) % times[0]["builds"] == 0
    assert noise["eps"] == pytest.approx(0.024, rel=1.0)  # twice the simulated deviation between builds
    assert evidence.latency.builds == 2 * times[-1]["builds"]
    assert all("2 devices of one key" in text for s in evidence.latency.samples.values() for text in s.notes)


def test_all_devices_of_a_round_race_against_one_incumbent(tuned):
    _, lines, (one,) = tuned(one={})
    best = 1.0
    for line in lines:
        if line["incumbent"] and line["trial"]:
            assert line["ratio"] < best
            best = line["ratio"]
    assert any(line["twin"] and line["race"] for line in lines)
    sent = [each for request in one.requests for each in request.get("recall", ())]
    assert {each["twin"] for each in sent} == {""}  # only trials of the other device are sent


def test_a_twin_with_other_times_is_not_used_with_a_warning(tuned):
    slow = ("fake.integer=2",)
    evidence, lines, (_, odd) = tuned(good={}, odd={"backend_option": slow})
    (warning,) = [text for text in evidence.warnings if "same key" in text]
    assert "odd, is not used" in warning
    assert "trial" not in odd.asked
    assert {line["twin"] for line in lines} == {"", "good"}


def test_twins_are_not_used_if_the_device_of_the_search_differs_from_them(tuned):
    slow = ("fake.integer=2",)
    evidence, lines, _ = tuned(one={"backend_option": slow}, two={"backend_option": slow})
    warnings = [text for text in evidence.warnings if "same key" in text]
    assert any("the other devices differ from this one" in text for text in warnings)
    assert {line["twin"] for line in lines} == {""}


@pytest.mark.parametrize("lost_at", [2, 4])
def test_a_search_continues_without_a_lost_twin(tuned, lost_at):
    evidence, lines, (lost,) = tuned(lost={"lost_at": lost_at})
    assert evidence.search.total >= TRIALS // 2
    numbers = [line["trial"] for line in lines if line["phase"] not in ("noise", "confirm")]
    assert numbers == list(range(len(numbers)))
    assert len(lost.requests) >= lost_at


def test_a_resumed_search_with_twins_builds_no_placement_twice(tuned, case, tmp_path):
    _, lines, _ = tuned(one={})
    journal = next((tmp_path / "out").rglob("trials.jsonl"))
    whole = journal.read_bytes().splitlines(keepends=True)
    kept = len([line for line in lines if line["phase"] != "confirm"]) - 3
    journal.write_bytes(b"".join(whole[:kept]))
    tuned()
    again = [json.loads(line) for line in journal.read_text().splitlines()]
    placements = [line["placement"] for line in again if line["phase"] not in ("noise", "confirm")]
    assert len(placements) == len(set(placements))  # none is built a second time
    assert again[:kept] == [json.loads(line) for line in whole[:kept]]
