"""Engines in child processes: the same results as in this process, and isolation of crashes, hangs and output."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st
from processes import processes_with, runs, wait_until

from qdqspec._core.arrays import REDUCTIONS, FrameStream
from qdqspec._core.config import Settings
from qdqspec._core.records import from_data, to_data
from qdqspec.backends.base import BuildOptions, Capabilities, backend_named
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.isolation import worker
from qdqspec.backends.isolation.isolated import RECENT, Child, Isolated, IsolatedEngine, Zygote, can_fork
from qdqspec.backends.isolation.worker import (
    Service,
    chosen,
)
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import BackendError, ConfigError, OutputError
from qdqspec.types import InputShape, LayerTime, Samples, ShapeProfile

needs_fork = pytest.mark.skipif(not can_fork(), reason="fork is not safe on this system")
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
FEEDS = {"input": np.linspace(0, 1, 256, dtype=np.float32).reshape(1, 1, 16, 16)}
LAUNCHERS = [pytest.param(True, marks=needs_fork), False]


@pytest.fixture(scope="module", params=LAUNCHERS, ids=["zygote", "interpreter"])
def fake(request: pytest.FixtureRequest) -> Iterator[Isolated]:
    with Isolated("fake", fork=request.param, build_timeout=60, call_timeout=60) as backend:
        yield backend


@pytest.fixture
def model(models: Path) -> Path:
    return models / "digits_resnet.onnx"


def build(backend: Isolated, model: Path, **extra: str) -> IsolatedEngine:
    return backend.build(model, BuildOptions(extra={f"fake.{key}": value for key, value in extra.items()}))


def test_an_isolated_engine_gives_the_results_of_the_engine(fake: Isolated, model: Path) -> None:
    serial = fake._builds
    inside = FakeDevice().build(model, BuildOptions(serial=serial))
    outside = build(fake, model)
    for engine in (inside, outside):
        engine.bind(FEEDS)
    assert outside.graph_hash == inside.graph_hash
    assert outside.time(5, warmup=1) == inside.time(5, warmup=1)
    assert outside.layers() == inside.layers()
    expected = inside.run(FEEDS)
    plain = {name: (value, outside.run(FEEDS)[name]) for name, value in expected.items()}
    for how, reduce in REDUCTIONS.items():
        reduced = outside.reduced(FEEDS, how)
        assert reduced.keys() == expected.keys()
        for name, (ours, theirs) in plain.items():
            np.testing.assert_array_equal(theirs, ours)
            np.testing.assert_array_equal(reduced[name], reduce(ours))
            assert reduced[name].dtype == ours.dtype
    outside.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash", "(?s)SIGSEGV during 'build'.*simulated device: about to crash"),
        pytest.param("oom", "out of memory", marks=needs_proc),
    ],
)
def test_a_failure_of_a_process_is_reported_and_leaves_other_engines_running(
    fake: Isolated, model: Path, capfd: pytest.CaptureFixture[str], fault: str, said: str
) -> None:
    """The last output of the process is in the error, and nowhere else."""
    incumbent = build(fake, model)
    incumbent.bind(FEEDS)
    with pytest.raises(BackendError, match=said) as caught:
        build(fake, model, **{fault: "build"})
    assert str(model) in str(caught.value)
    assert len(incumbent.time(3).wall_ms) == 3
    incumbent.close()
    assert capfd.readouterr() == ("", "")


def test_the_time_limit_of_a_call_grows_with_the_number_of_slow_runs(model: Path) -> None:
    with Isolated("fake", call_timeout=30) as backend:
        # A run takes minutes of simulated time.
        engine = build(backend, model, scale="1e6", wall_noise="0", run_noise="0")
        engine.bind(FEEDS)
        slow = engine.time(1).wall_ms[0] / 1e3
        assert engine._patience(10) > 10 * slow > 300


def test_a_hang_ends_after_the_time_limit(model: Path) -> None:
    with Isolated("fake", call_timeout=0.2) as backend:
        engine = build(backend, model, hang="run")
        with pytest.raises(BackendError, match=r"no answer to 'run' for 0\.2 s"):
            engine.run(FEEDS)


def test_after_a_failure_the_engine_stays_closed(fake: Isolated, model: Path) -> None:
    engine = build(fake, model)
    with pytest.raises(BackendError, match="bind"):
        engine.time(1)
    with pytest.raises(BackendError, match="the engine is closed"):
        engine.bind(FEEDS)
    engine.close()


def test_no_file_remains_in_the_temporary_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for fork in (can_fork(), False):
        with Isolated("fake", fork=fork) as backend:
            engine = build(backend, model)
            assert engine.graph_hash
            assert any(file.is_file() for file in tmp_path.rglob("*"))
        RECENT.clear()
        del engine
        gc.collect()
        assert not any(file.is_file() for file in tmp_path.rglob("*"))


@needs_fork
def test_backends_of_the_same_environment_share_a_process_with_the_library(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RECENT.clear()
    backends = [Isolated("fake") for _ in range(2)]
    engines = [build(backend, model) for backend in backends]
    zygotes = [backend._launcher for backend in backends]
    assert zygotes[0] is zygotes[1]
    backends[0].close()
    assert [runs(engine.pid) for engine in engines] == [False, True]
    backends[1].close()
    assert not runs(engines[1].pid)
    assert zygotes[0].is_running
    for number in range(4):  # only the latest are kept
        monkeypatch.setenv("QDQSPEC_TEST_OF_LAUNCHERS", str(number))
        with Isolated("fake") as elsewhere:
            build(elsewhere, model)
            assert elsewhere._launcher not in zygotes
    process = zygotes[0]._process
    zygotes.clear()
    gc.collect()
    assert process.poll() is not None


def test_an_engine_that_starts_while_its_backend_closes_is_ended(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    with Isolated("fake") as backend:
        build(backend, model).close()
        launcher = backend._launcher
        start = launcher.start

        def late() -> Child:
            started.append(start())
            backend.close()
            return started[0]

        monkeypatch.setattr(launcher, "start", late)
        with pytest.raises(BackendError, match="closed while an engine started"):
            build(backend, model)
        assert not runs(started[0].pid)


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_closes_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Isolated("fake") as backend:
        engine = build(backend, model)
        monkeypatch.setattr(engine._stream, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.bind(FEEDS)
        with pytest.raises(BackendError, match="closed"):
            engine.bind(FEEDS)


@needs_fork
def test_the_answer_of_an_interrupted_request_is_not_that_of_the_next(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may occur between a request to the zygote and its answer, which is then still in the pipe."""
    with Isolated("fake") as backend:
        first = build(backend, model)
        monkeypatch.setattr(backend._launcher, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(backend, model)
        monkeypatch.undo()
        first.close()
        assert build(backend, model).graph_hash


def test_a_child_process_that_cannot_start_is_an_error_at_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    for fork in {can_fork(), False}:
        said = r"ended early|ended with exit code 1"
        with Isolated("fake", fork=fork) as backend, pytest.raises(BackendError, match=said):
            build(backend, model)


PARENT = """
import sys, time
from pathlib import Path
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
backend = Isolated("fake", fork=sys.argv[2] == "True")
engine = backend.build(Path(sys.argv[1]), BuildOptions())
hanging = backend.build(Path(sys.argv[1]), BuildOptions(extra={"fake.hang": "bind"}))
print(backend._launcher._own.path, flush=True)
hanging.bind({})
"""


@needs_proc
@pytest.mark.parametrize("fork", [True, False])
def test_children_end_with_a_killed_parent(model: Path, fork: bool) -> None:
    command = [sys.executable, "-c", PARENT, str(model), str(fork)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    scratch = Path(parent.stdout.readline().strip())
    assert scratch.is_dir()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not processes_with(scratch.name), "children outlived their parent")
    wait_until(lambda: not scratch.exists(), "the scratch folder outlived its run")


@needs_proc
def test_children_end_with_a_killed_zygote(model: Path) -> None:
    with Isolated("fake") as backend:
        engine = build(backend, model)
        launcher = backend._launcher
        scratch = launcher._own.path.name
        assert len(processes_with(scratch)) == 2
        os.kill(launcher._process.pid, signal.SIGKILL)
        launcher._process.wait()
        wait_until(lambda: not processes_with(scratch), "children outlived the zygote")
        with pytest.raises(BackendError, match="engine's process"):
            engine.layers()
        build(backend, model).close()  # by another zygote


@needs_proc
@pytest.mark.parametrize("name", ["fake", "onnxruntime"])
def test_loading_a_backend_starts_no_threads(name: str) -> None:
    """Forking is safe with one thread only; otherwise the launcher falls back to starting an interpreter."""
    Zygote(name).close()


def test_a_failure_on_a_full_disk_is_an_output_error_and_no_failed_candidate(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runtimes do not report a full disk: they write half a profile, and fail to read it."""
    words = BuildOptions(extra={"fake.raise": "build"})
    with Isolated("fake") as backend:
        with pytest.raises(BackendError, match="simulated failure in build"):
            backend.build(model, words)
        usage = shutil.disk_usage(model)._replace(free=3 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(OutputError, match=r"3\.0 MiB are left .* simulated failure in build") as caught:
            backend.build(model, words)
        assert "free some space or set TMPDIR" in str(caught.value)


# ---- the limit of a build ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit", "extra"),
    [
        ("onnxruntime", 1e-4, {}),  # no build takes so little time
        ("onnxruntime-web", 1e-4, {}),
        ("fake", 1.0, {"fake.hang": "build"}),
    ],
)
def test_a_build_is_ended_at_its_limit(name: str, limit: float, extra: dict[str, str], model: Path) -> None:
    with Isolated(name) as backend:
        found = backend.probe()
        if not found.usable:
            pytest.skip(found.why)
        options = replace(BuildOptions.of(Settings(build_limit=limit)), extra=extra)
        with pytest.raises(BackendError, match=f"no answer to 'build' for {limit:g} s and was") as caught:
            backend.build(model, options)
        assert "--qdq-build-limit" in str(caught.value.cure)
        backend.build(model, BuildOptions()).close()


# ---- build options -----------------------------------------------------------------------------------


shapes = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
spans = st.builds(InputShape, min=shapes, opt=shapes, max=shapes)
names = st.text(max_size=9)
profiles = st.builds(
    ShapeProfile, shapes=st.dictionaries(names, spans, max_size=3), weight=st.floats(0.01, 1)
)
build_options = st.builds(
    BuildOptions,
    threads=st.integers(1, 64),
    extra=st.dictionaries(names, names, max_size=3),
    serial=st.integers(0, 999),
    profiles=st.lists(profiles, max_size=3).map(tuple),
    state=st.none() | st.just(Path("/some/folder")),
    fresh=st.booleans(),
)


@given(build_options)
def test_options_are_equal_after_the_transfer(given_options: BuildOptions):
    assert from_data(BuildOptions, json.loads(json.dumps(to_data(given_options)))) == given_options


def test_a_relative_folder_is_that_of_the_sending_process(fake, model, monkeypatch):
    engine, asked = build(fake, model), []
    monkeypatch.setattr(engine, "ask", lambda request, **_: asked.append(request) or (defaultdict(str), {}))
    engine.build(BuildOptions(state=Path("results")), 1.0)
    assert asked[0]["options"]["state"] == str(Path.cwd() / "results")


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("tensorrt.opt-level", "0", "does not use the timing cache"),
        ("tensorrt.build-route", "", "a word is expected"),  # the same as no value: it would pin nothing
        ("tensorrt.fp16", "on", "strongly typed"),
        ("tensorrt-rtx.for", "SM87", "none of SM75, SM80, SM86, SM89, SM120, SM121 .did you mean 'SM89'"),
        ("tensorrt-rtx.opt-level", "4", "accepts it without an effect"),
        ("tensorrt-rtx.version-compatible", "on", "libnvinfer_lean"),
        # otherwise a user who selects CUDA would get times of the CPU
        ("onnxruntime.providers", "CUDAExecutionProvider", "cannot be set: the CPU provider(?s:.*)--backend tensorrt"),
        *(("onnxruntime-qnn.soc", text, "soc") for text in ("60", "SM8551", "v73")),
        # the library takes these silently
        *((f"onnxruntime-qnn.{word}", "1", "cannot be set") for word in ("soc-model", "htp-arch", "profiling-level")),
        ("onnxruntime-qnn.htp-performance-mode", "1", "cannot be set"),
    ],
)  # fmt: skip
def test_a_wrong_option_of_a_backend_is_refused(option: str, text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        backend_named(option.partition(".")[0]).options.read({option: text})


# ---- one processor -----------------------------------------------------------------------------------


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be pinned")


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


class Recording:
    """A backend whose engines record the processors that they may use in each request, and which is timed how often."""

    graph_hash = ""

    def __init__(self, capabilities: Capabilities) -> None:
        self.name = ""  # of the backend itself
        self.seen: dict[str, set[int]] = {}
        self.timed: list[tuple[str, int, int]] = []
        self.capabilities = lambda _: capabilities

    def build(self, model: Path, options: BuildOptions) -> Recording:
        self.seen.setdefault("build", os.sched_getaffinity(0))
        engine = copy(self)
        engine.name = "second" if self.timed else "first"
        return engine

    def bind(self, feeds: object, profile: int = 0) -> None:
        pass

    def run(self, feeds: object) -> dict[str, np.ndarray]:
        self.seen["run"] = os.sched_getaffinity(0)
        return {}

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        self.seen["time"] = os.sched_getaffinity(0)
        self.timed.append((self.name, runs, warmup))
        return Samples(wall_ms=(1.0,) * runs)

    def layers(self, runs: int, profile: int) -> tuple[LayerTime, ...]:
        self.seen["layers"] = os.sched_getaffinity(0)
        raise BackendError("it has no profile")


ALONE = [("first", 1, 0), ("first", 8, 4)]  # a first run, and eight warm ones
REQUESTS: list[dict[str, object]] = [
    {"do": "bind", "profile": 0},
    {"do": "time", "runs": 8, "warmup": 5, "profile": 0, "after_another": True},
    {"do": "layers", "runs": 2, "profile": 0},
    {"do": "run"},
]


@needs_affinity
@pytest.mark.parametrize(
    ("computes_here", "threads", "most", "timed", "on_one"),
    [
        (True, 1, worker.MOST_TWICE, [("first", 8, 5), ("second", 1, 0), ("first", 1, 0)], True),
        (True, 1, 1, ALONE, True),
        (True, 2, worker.MOST_TWICE, ALONE, False),
        (False, 1, worker.MOST_TWICE, ALONE, False),
    ],
    ids=["one thread", "a large model", "several threads", "computes on a device"],
)
def test_engines_of_one_thread_are_timed_on_one_processor_after_another_run_there(
    monkeypatch: pytest.MonkeyPatch,
    computes_here: bool,
    threads: int,
    most: int,
    timed: list[tuple[str, int, int]],
    on_one: bool,
) -> None:
    """They use all processors for other requests, also after one that failed. The other model is a second engine of the
    same one.
    """
    monkeypatch.setattr(worker, "MOST_TWICE", most)
    backend = Recording(replace(OnnxRuntime().capabilities(), one_processor=computes_here))
    ours, theirs = socket.socketpair()
    thread = Thread(target=Service(FrameStream(theirs), cast("Any", backend)).serve)
    thread.start()
    stream = FrameStream(ours)
    options = to_data(BuildOptions(threads=threads))
    for request in ({"do": "build", "model": __file__, "options": options}, *REQUESTS):
        stream.send(request)
        assert ("error" in stream.receive()[0]) == (request["do"] == "layers")
    stream.close()
    thread.join()
    theirs.close()
    usable = os.sched_getaffinity(0)
    expected = {chosen(usable)} if on_one else usable
    assert backend.seen == {"build": usable, "time": expected, "layers": expected, "run": usable}
    assert backend.timed == timed
