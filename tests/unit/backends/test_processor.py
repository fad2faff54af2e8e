"""Compared engines run on one processor."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest

from qdqspec._core.wire import FrameStream
from qdqspec.backends.base import BuildOptions, Capabilities
from qdqspec.backends.isolation import worker
from qdqspec.backends.isolation.worker import Service, chosen, one_processor, options_to_json
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import BackendError
from qdqspec.types import LayerTime, Samples

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system cannot pin processes to processors"
)


@pytest.mark.parametrize(
    ("speeds", "usable", "expected"),
    [
        ({}, {0, 1, 2, 3}, 3),
        ({0: "5000\n", 1: "5000\n", 2: "3800\n"}, {0, 1, 2}, 1),  # 2 is an efficiency core
        ({0: "5000", 1: "5000", 2: "3800"}, {0, 2}, 0),
        ({0: "not a number", 1: ""}, {0, 1}, 1),
    ],
)
@pytest.mark.parametrize("name", ["cpufreq/cpuinfo_max_freq", "cpu_capacity"])
def test_the_last_of_the_fastest_processors_is_chosen(
    tmp_path: Path, speeds: dict[int, str], usable: set[int], expected: int, name: str
) -> None:
    for number, speed in speeds.items():
        file = tmp_path / f"cpu{number}" / name
        file.parent.mkdir(parents=True)
        file.write_text(speed)
    assert chosen(usable, tmp_path) == expected


class Engine:
    """Records the processors that it may use in each request."""

    graph_hash = ""

    def __init__(self, name: str = "first", timed: list[tuple[str, int, int]] | None = None) -> None:
        self.name = name
        self.seen: dict[str, set[int]] = {}
        self.timed = [] if timed is None else timed  # which engine of the model, runs and warm-up

    def bind(self, feeds: object, profile: int = 0) -> None:
        pass

    def run(self, feeds: object) -> dict[str, np.ndarray]:
        self._note("run")
        return {}

    def time(self, runs: int, warmup: int = 0) -> Samples:
        self._note("time")
        self.timed.append((self.name, runs, warmup))
        return Samples(wall_ms=(1.0,) * runs)

    def layers(self, runs: int) -> tuple[LayerTime, ...]:
        self._note("layers")
        return ()

    def _note(self, what: str) -> None:
        self.seen[what] = os.sched_getaffinity(0)


class Backend:
    def __init__(self, capabilities: Capabilities) -> None:
        self.engine = Engine()
        self._capabilities = capabilities

    def build(self, model: Path, options: BuildOptions) -> Engine:
        if "build" in self.engine.seen:
            return Engine("second", self.engine.timed)
        self.engine._note("build")
        return self.engine

    def capabilities(self, options: BuildOptions) -> Capabilities:
        return self._capabilities


@needs_affinity
@pytest.mark.parametrize(
    ("computes_here", "threads", "on_one"),
    [(True, 1, True), (True, 2, False), (False, 1, False)],
    ids=["one thread", "several threads", "computes on a device"],
)
def test_engines_of_one_thread_are_timed_on_one_processor(
    computes_here: bool, threads: int, on_one: bool
) -> None:
    """They use all processors for other requests, so that parallel runs do not share one processor."""
    usable = os.sched_getaffinity(0)
    engine = answered(
        {"do": "time", "runs": 2, "warmup": 1, "profile": 0, "after_another": False},
        {"do": "layers", "runs": 2, "profile": 0},
        {"do": "run"},
        threads=threads,
        computes_here=computes_here,
    )
    expected = {chosen(usable)} if on_one else usable
    assert engine.seen == {"build": usable, "time": expected, "layers": expected, "run": usable}


@pytest.mark.parametrize(
    ("computes_here", "large", "timed"),
    [
        (True, False, [("first", 1, 4), ("second", 1, 0), ("first", 8, 0)]),
        (True, True, [("first", 8, 0)]),
        (False, False, [("first", 8, 0)]),
    ],
    ids=["on the processor", "a large model", "on a device"],
)
def test_the_other_model_of_a_first_run_is_run_in_the_same_process(
    monkeypatch: pytest.MonkeyPatch, computes_here: bool, large: bool, timed: list[tuple[str, int, int]]
) -> None:
    """The other model is a second engine of the same model."""
    if large:
        monkeypatch.setattr(worker, "MOST_TWICE", 1)
    engine = answered(
        {"do": "bind", "profile": 0},
        {"do": "time", "runs": 8, "warmup": 5, "profile": 0, "after_another": True},
        computes_here=computes_here,
    )
    assert engine.timed == timed


def answered(*requests: dict[str, object], threads: int = 1, computes_here: bool = True) -> Engine:
    """The engine of a worker that built a model and handled these requests."""
    capabilities = replace(OnnxRuntime().capabilities(), one_processor=computes_here)
    backend = Backend(capabilities)
    ours, theirs = socket.socketpair()
    thread = Thread(target=Service(FrameStream(theirs), cast("Any", backend)).serve)
    thread.start()
    stream = FrameStream(ours)
    options = options_to_json(BuildOptions(threads=threads))
    for request in ({"do": "build", "model": __file__, "options": options}, *requests):
        stream.send(request)
        assert "error" not in stream.receive()[0]
    stream.close()
    thread.join()
    theirs.close()
    return backend.engine


@needs_affinity
def test_all_processors_are_usable_again_after_a_failed_run() -> None:
    usable = os.sched_getaffinity(0)

    def fail() -> None:
        with one_processor():
            assert len(os.sched_getaffinity(0)) == 1
            raise BackendError("it does not run")

    with pytest.raises(BackendError):
        fail()
    assert os.sched_getaffinity(0) == usable
