"""Cases on real workers: results as without a cluster, and faults of workers and clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_processes import LIMITS, PATIENCE, Processes, wait_for

from qdqspec._core.config import Settings
from qdqspec.app.cluster.address import Address
from qdqspec.app.session import Session
from qdqspec.errors import BackendUnavailableError, ConfigError, QdqspecError, StateError
from qdqspec.types import Case, TuneRules

psutil = pytest.importorskip("psutil", reason="the extra [cluster] is not installed")
rare = pytest.mark.skipif(
    "CLUSTER_FAULTS" not in os.environ,
    reason="takes a minute or more; CLUSTER_FAULTS=1 pytest tests/unit/cluster runs it",
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture
def settings(processes, tmp_path) -> Settings:
    processes.connected(2)  # the Nanny restarts a killed one
    return Settings(root=tmp_path, backend="fake", cluster=processes.address)


@pytest.fixture
def case(model) -> Case:
    return Case(id="default", model=model, tune=TuneRules(trials=8))


def opened(settings: Settings, **more: object):
    from qdqspec.app.cluster.client import ClusterSession

    return closing(ClusterSession(settings, **more))


NEEDS = frozenset({"latency", "parity"})


def entries(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def worker_of(session) -> object:
    """The worker that runs the session's case."""
    runs = session._cluster._runs
    wait_for(lambda: any(run.worker for run in runs.values()))
    address = next(run.worker for run in runs.values() if run.worker)
    pids = session._cluster._client.run(os.getpid, workers=[address])
    return psutil.Process(pids[address])


def processes_of_cases(processes: Processes) -> list:
    """The processes of cases of these workers, without those of other runs on the machine."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if "qdqspec.app.cluster.request" in words and any(str(processes.folder) in word for word in words):
            found.append(one)
    return found


def test_a_case_has_the_same_results_on_a_cluster_as_locally(settings, case, tmp_path):
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
    assert [case.evidence.case.name for case in record.cases] == ["chain::default"]
    assert entries(folder)[-1]["phase"] == "confirm"
    # The search is in the client's cache, so that any worker may get the case.
    with opened(settings) as session:
        assert session.search(case).provenance.source == "cached"


def test_the_workers_are_listed(processes, verb):
    workers = verb("cluster", "list", processes.address, "--json").json["workers"]
    assert [[device["key"] for device in worker["devices"]] for worker in workers] == [["fake"], ["fake"]]
    assert all(worker["free_bytes"] > 0 and worker["version"] for worker in workers)
    assert verb("cluster", "list", processes.address).out.count("  fake: fake\n") == 2


def test_a_worker_needs_a_scheduler(tmp_path, monkeypatch):
    from qdqspec.app.cluster import worker

    monkeypatch.setattr(worker, "_REACH_S", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address.parse(f"127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(ConfigError, match="no scheduler answers"):
        worker.run_worker(address, tmp_path, Settings(), tmp_path / "worker", ("fake",), pytest.fail)


def test_the_error_for_an_unknown_device_lists_the_devices(settings, processes):
    with pytest.raises(BackendUnavailableError, match=r"no worker at .* has backend onnxruntime") as error:
        opened(replace(settings, backend="onnxruntime"))
    assert "fake on fake (2)" in error.value.cure
    with pytest.raises(BackendUnavailableError, match="on device other"):
        opened(replace(settings, cluster_device="other"))


LONG = TuneRules(trials=16, strategy="exhaustive")


@rare
@pytest.mark.parametrize("fault", ["killed", "suspended"])
def test_the_case_of_a_lost_worker_is_run_by_another(settings, case, processes, fault):
    with opened(settings) as session:
        notes: list[str] = []
        session._cluster._note = notes.append
        future = session._future(replace(case, tune=LONG))
        lost = worker_of(session)
        wait_for(lambda: processes_of_cases(processes))
        (lost.kill if fault == "killed" else lost.suspend)()
        try:
            wait_for(lambda: any("the case is run elsewhere" in note for note in notes))
            assert future.result(PATIENCE).record.evidence.search.total >= 8
        finally:
            with suppress(psutil.NoSuchProcess):  # the scheduler may have restarted it
                lost.kill()  # the Nanny starts another worker
        lines = entries(session.output(case))
    assert lines[-1]["phase"] == "confirm"
    wait_for(lambda: not processes_of_cases(processes))
    # a worker keeps no files of cases, also not one that was killed and started again
    wait_for(lambda: not [*processes.folder.rglob("request.json")])


def test_a_case_is_given_up_after_four_lost_workers(settings, monkeypatch):
    from qdqspec.app.cluster import client

    def lose(*words: object) -> None:
        raise client._LostError

    with opened(settings) as session:
        notes: list[str] = []
        cluster = session._cluster
        cluster._note = notes.append
        monkeypatch.setattr(cluster, "_attempt", lose)
        with pytest.raises(StateError, match="net: 4 workers were lost"):
            cluster.run({}, {}, session._device_named("fake"), "net", print)
    assert len(notes) == 4


def test_a_case_whose_process_ends_fails_with_its_log(settings, case, processes):
    with opened(settings) as session:
        future = session._future(replace(case, tune=LONG))
        wait_for(lambda: processes_of_cases(processes))
        processes_of_cases(processes)[0].kill()
        with pytest.raises(QdqspecError, match="the process of the case ended with exit code -9"):
            future.result(PATIENCE)


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_no_process_of_an_ended_client_continues(settings, case, processes, tmp_path, signal_sent):
    words = ["tune", str(case.model), "--backend", "fake", "--strategy", "exhaustive", "--trials", "60"]
    words += ["--cluster", processes.address, "-o", str(tmp_path / "out")]
    program = (
        "import signal, sys\n"
        # background jobs of a shell that is not interactive ignore SIGINT, which Python inherits
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"{LIMITS}\nfrom qdqspec.app.cli import main\nsys.exit(main({words!r}))"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: processes_of_cases(processes))
    client.send_signal(signal_sent)
    _, said = client.communicate(timeout=PATIENCE)
    assert client.returncode == (130 if signal_sent == signal.SIGINT else -signal.SIGKILL)
    assert "Resume with" not in said, "the measurements are on the worker"
    wait_for(lambda: not processes_of_cases(processes))
