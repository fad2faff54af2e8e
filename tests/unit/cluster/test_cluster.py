"""Cases on real workers: results as without a cluster, and faults of workers and clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from chains import SHAPE, chain_model
from cluster_processes import LEASE, PATIENCE, Processes, wait_for

from qdqspec.cases import load_cases
from qdqspec.config import Settings
from qdqspec.errors import BackendUnavailableError
from qdqspec.plain_json import content_sum
from qdqspec.session import Session
from qdqspec.types import Case, Inputs, TuneRules

psutil = pytest.importorskip("psutil", reason="the extra [cluster] is not installed")
rare = pytest.mark.skipif(
    "CLUSTER_FAULTS" not in os.environ,
    reason="takes a minute; CLUSTER_FAULTS=1 pytest tests/unit/cluster runs it",
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture
def settings(processes, tmp_path, monkeypatch) -> Settings:
    from qdqspec.cluster import client

    monkeypatch.setattr(client, "LEASE", LEASE)
    return Settings(root=tmp_path, backend="fake", cluster=processes.address)


@pytest.fixture
def more_workers(processes) -> Iterator[Callable[..., dict]]:
    """Starts workers that are stopped after the test."""
    before = len(processes.started)
    yield processes.worker
    processes.stop(before)
    wait_for(lambda: len(processes.listed()) == 2)


@pytest.fixture
def case(model) -> Case:
    return Case(id="default", model=model, tune=TuneRules(trials=8))


def opened(settings: Settings, **more: object):
    from qdqspec.cluster.session import ClusterSession

    return closing(ClusterSession(settings, **more))


NEEDS = frozenset({"latency", "parity"})


def entries(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def worker_of(session) -> object:
    """The worker that has begun the session's case."""
    jobs = session._cluster._jobs
    wait_for(lambda: any(job.worker for job in jobs.values()))
    address = next(job.worker for job in jobs.values() if job.worker)
    pids = session._cluster._client.run(os.getpid, workers=[address])
    return psutil.Process(pids[address])


def processes_of_cases(processes: Processes) -> list:
    """Those of the workers of these tests; other runs on the machine have their own."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if "qdqspec.cluster.case_process" in words and any(str(processes.folder) in word for word in words):
            found.append(one)
    return found


def test_a_case_on_a_cluster_gives_what_it_gives_here(settings, case, tmp_path, monkeypatch):
    from qdqspec.cluster.client import Cluster

    fetched, fetch_file = [], Cluster._fetch_file
    monkeypatch.setattr(
        Cluster, "_fetch_file", lambda self, *words: fetched.append(words[2]) or fetch_file(self, *words)
    )
    with opened(settings) as session:
        there = session.evidence(case, NEEDS)
        folder, record = session.output(case), session.record()
    alone = Settings(root=tmp_path / "alone", backend="fake")
    with closing(Session(alone)) as session:
        here = session.evidence(case, NEEDS)
    assert there.search.winner.digest == here.search.winner.digest
    assert there.latency.speedup.median == pytest.approx(here.latency.speedup.median, rel=0.05)
    assert there.output == folder
    assert {"reference.onnx", "tuned.onnx", "scheme.json", "trials.jsonl"} <= {
        p.name for p in folder.iterdir()
    }
    names, digests = [entry.path for entry in fetched], [entry.sha256 for entry in fetched]
    assert any(name.endswith("scheme.json") for name in names)
    assert not any(name.endswith("reference.onnx") for name in names), "it is the client's own model"
    assert len({*digests}) == len(digests), "the cache entry's copies are not sent a second time"
    assert [case.evidence.case.name for case in record.cases] == ["chain::default"]
    lines = entries(folder)
    assert lines[-1]["phase"] == "confirm"
    assert {line["host"] for line in lines} == {os.uname().nodename}
    assert {line["twin"] for line in lines} <= {"", *(f"{os.uname().nodename} {n}-fake" for n in (0, 1))}
    with opened(settings) as session:  # the search is in the client's cache, whichever worker has it now
        assert session.search(case).provenance.source == "cached"


@rare
def test_checks_are_judged_on_the_worker_and_errors_are_of_their_class(settings, case, tmp_path):
    spec = tmp_path / "chain.qdq.yaml"
    spec.write_text(
        "qdqspec: 1\nmodel: chain.onnx\ntune: {trials: 6}\n"
        "checks: [{kind: speedup, min: 1.01}, {kind: speedup, id: most, min: 50}]\n"
    )
    (judged,) = load_cases(spec, settings)
    with opened(settings, expected=[judged]) as session:
        outcomes = [session.judge(judged, check).verdict.outcome for check in judged.checks]
    assert outcomes == ["pass", "fail"]


def test_the_workers_are_listed(processes, tmp_path, monkeypatch, capsys):
    from qdqspec.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "list", processes.address, "--json"]) == 0
    workers = json.loads(capsys.readouterr().out)["workers"]
    assert [[device["key"] for device in worker["devices"]] for worker in workers] == [["fake"], ["fake"]]
    assert all(worker["free_bytes"] > 0 and worker["version"] for worker in workers)
    assert main(["cluster", "list", processes.address]) == 0
    assert capsys.readouterr().out.count("  fake: fake\n") == 2


def test_an_unknown_device_is_an_error_that_names_what_is_there(settings, processes):
    with pytest.raises(BackendUnavailableError, match=r"no worker at .* has backend onnxruntime") as error:
        opened(replace(settings, backend="onnxruntime"))
    assert "fake on fake (2)" in error.value.cure
    with pytest.raises(BackendUnavailableError, match="on device other"):
        opened(replace(settings, cluster_device="other"))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(signal.SIGKILL, marks=rare, id="killed"),
        pytest.param(signal.SIGSTOP, marks=rare, id="frozen"),
    ],
)
def test_work_of_a_lost_worker_is_done_elsewhere(settings, case, processes, fault):
    notes = []
    with opened(settings) as session:
        session.watch = lambda progress: notes.append(progress.waiting)
        future = session._future(replace(case, tune=TuneRules(trials=16)))
        lost, journal = worker_of(session), session.output(case) / "trials.jsonl"
        wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 2)
        lost.send_signal(fault)
        try:
            assert future.result(PATIENCE).record.evidence.search.total >= 8
        finally:
            if fault == signal.SIGSTOP:
                lost.kill()  # the Nanny starts another one
        lines = entries(session.output(case))
    assert any("the case is run elsewhere" in note for note in notes if note)
    trials = [
        (line["phase"], line["trial"], line["placement"]) for line in lines if line["phase"] != "confirm"
    ]
    assert len(trials) == len(set(trials)) >= 8  # none is lost, and none is there twice
    wait_for(lambda: not processes_of_cases(processes), 4 * LEASE)


@rare
def test_a_lost_workers_corrections_are_used_elsewhere(settings, more_workers, tmp_path):
    """The gain in the client's file is changed before the worker is lost: the result has the changed one."""
    x = np.random.default_rng(0).normal(0, 1, (16, *SHAPE[1:])).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    onnx.save(chain_model(), tmp_path / "chain.onnx")
    more_workers("three", "--backend", "onnxruntime")
    more_workers("four", "--backend", "onnxruntime")
    case = Case(
        id="default",
        model=tmp_path / "chain.onnx",
        inputs=Inputs(calibration=tmp_path / "data.npz"),
        tune=TuneRules(trials=40),
    )
    with opened(replace(settings, backend="onnxruntime")) as session:
        future = session._future(case)
        lost, file = worker_of(session), session.output(case) / "corrections.json"
        wait_for(file.exists)
        content = json.loads(file.read_text())
        run, _ = content.pop("run"), content.pop("sum")
        content["gains"][0]["after_db"] = 123.0
        file.write_text(json.dumps({"run": run, "sum": content_sum(content), **content}))
        lost.kill()
        found = future.result(PATIENCE).record.evidence.search.corrections
    assert found[0].after_db == 123.0


@rare
def test_a_slow_worker_keeps_its_case(settings, case):
    """A worker that does nothing most of the time, and answers within its lease."""
    notes = []
    with opened(settings) as session:
        session.watch = lambda progress: notes.append(progress.waiting)
        future = session._future(replace(case, tune=TuneRules(trials=16)))
        slow = worker_of(session)
        end = time.monotonic() + PATIENCE
        while not future.done():
            assert time.monotonic() < end
            slow.send_signal(signal.SIGSTOP)
            time.sleep(LEASE / 3)
            slow.send_signal(signal.SIGCONT)
            time.sleep(LEASE / 6)
        assert future.result().record.evidence.search.total >= 8
        lines = entries(session.output(case))
    assert not any("elsewhere" in note for note in notes if note)
    trials = [(line["phase"], line["placement"]) for line in lines if line["phase"] != "confirm"]
    assert len(trials) == len(
        {(line["phase"], line["trial"]) for line in lines if line["phase"] != "confirm"}
    )


@rare
@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_an_ended_client_leaves_nothing_running_and_is_resumed(
    settings, case, processes, tmp_path, signal_sent
):
    words = ["tune", str(case.model), "--backend", "fake", "--trials", "60", "--cluster", processes.address]
    program = (
        "import signal, sys\nfrom qdqspec.cluster import client\n"
        # a shell that is not interactive has its background jobs ignore SIGINT, and Python inherits that
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"client.LEASE = {LEASE}\n"
        f"from qdqspec.cli import main\nsys.exit(main({[*words, '-o', str(tmp_path / 'out')]!r}))"
    )
    journal = tmp_path / "out" / "trials.jsonl"
    client = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 2)
    client.send_signal(signal_sent)
    code = client.wait(PATIENCE)
    assert code == (130 if signal_sent == signal.SIGINT else -signal.SIGKILL)
    wait_for(lambda: not processes_of_cases(processes), 4 * LEASE)
    before = journal.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    assert journal.read_bytes().startswith(before)
    assert entries(journal.parent)[-1]["phase"] == "confirm"


@rare
def test_a_worker_of_another_version_gets_no_case(settings, more_workers):
    said = more_workers(
        "old", "--backend", "onnxruntime", prelude="import qdqspec; qdqspec.__version__ = '0.0.1'"
    )
    assert said["version"] == "0.0.1"
    with pytest.raises(BackendUnavailableError, match="no worker") as error:
        opened(replace(settings, backend="onnxruntime"))
    assert "with qdqspec 0.0.1, which differs" in error.value.cure


@rare
def test_candidates_that_kill_their_process_are_failed_trials(settings, case):
    faulty = replace(settings, backend_option=("fake.crash=build", "fake.fault_rate=0.5"))
    with opened(faulty) as session:
        before = {worker.address for worker in session._cluster.workers()}
        evidence = session.evidence(case, NEEDS)
        assert before <= {worker.address for worker in session._cluster.workers()}
    statuses = {line["status"] for line in entries(evidence.output)}
    assert statuses == {"ok", "failed"}


@rare
def test_closing_a_session_stops_its_case(settings, case, processes):
    long = replace(case, tune=TuneRules(trials=400))
    with opened(settings) as session:
        future = session._future(long)
        wait_for(lambda: processes_of_cases(processes))
    assert future.exception() is not None
    wait_for(lambda: not processes_of_cases(processes), 3 * LEASE)


def test_a_case_is_shared_by_twins_and_one_that_disagrees_is_reported(
    settings, case, processes, more_workers
):
    """A third worker with the key, whose integer kernels are slow; the case may run on any of them."""
    more_workers("odd", "--backend", "fake", "--device", "2", "--backend-option", "fake.integer=2")
    with opened(settings) as session:
        future = session._future(replace(case, tune=TuneRules(trials=16)))
        evidence = future.result(PATIENCE).record.evidence
        lines = entries(session.output(case))
    said = [text for text in evidence.warnings if "a device of the same key" in text]
    twins = {line["twin"].rpartition(" ")[2] for line in lines} - {""}
    if any("the other devices differ from this one" in text for text in said):
        assert not twins
    else:
        assert ["2-fake" in text for text in said] == [True]
        assert twins <= {"0-fake", "1-fake"}
    wait_for(lambda: not processes_of_cases(processes), 4 * LEASE)
