"""Cases on real workers: results as without a cluster, and faults of workers and clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_processes import LEASE, LIMITS, PATIENCE, Processes, wait_for
from json_audit import audit

from qdqspec._core.config import Settings
from qdqspec.app.session import Session
from qdqspec.errors import BackendUnavailableError, ConfigError
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
def more_workers(processes) -> Iterator[Callable[..., dict]]:
    """Starts workers that are stopped after the test."""
    before = len(processes.started)
    yield processes.worker
    processes.stop(before)
    processes.connected(2)


@pytest.fixture
def case(model) -> Case:
    return Case(id="default", model=model, tune=TuneRules(trials=8))


def opened(settings: Settings, **more: object):
    from qdqspec.app.cluster.session import ClusterSession

    return closing(ClusterSession(settings, **more))


NEEDS = frozenset({"latency", "parity"})


def entries(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def worker_of(session) -> object:
    """The worker that runs the session's case."""
    jobs = session._cluster._jobs
    wait_for(lambda: any(job.worker for job in jobs.values()))
    address = next(job.worker for job in jobs.values() if job.worker)
    pids = session._cluster._client.run(os.getpid, workers=[address])
    return psutil.Process(pids[address])


def impatient(session, seconds: float = 3.0) -> list[str]:
    """Shortens the client's wait for an answer until it has given up one worker; returns the client's notes."""
    cluster, notes = session._cluster, []

    def note(text: str) -> None:
        cluster._lease = LEASE
        notes.append(text)

    cluster._note, cluster._lease = note, seconds
    return notes


def processes_of_cases(processes: Processes) -> list:
    """The processes of cases of these workers, without those of other runs on the machine."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if "qdqspec.app.cluster.case_process" in words and any(
            str(processes.folder) in word for word in words
        ):
            found.append(one)
    return found


def test_a_case_has_the_same_results_on_a_cluster_as_locally(settings, case, tmp_path, monkeypatch):
    from qdqspec.app.cluster import client, content

    names, digests = [], []

    async def fetch_file(remote, job, name, *words) -> str:
        digest = await content.fetch_file(remote, job, name, *words)
        names.append(name)
        digests.append(digest)
        return digest

    monkeypatch.setattr(client, "fetch_file", fetch_file)
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
    assert any(name.endswith("scheme.json") for name in names)
    assert not any(name.endswith("reference.onnx") for name in names), "it is the client's own model"
    assert len({*digests}) == len(digests), "copies in the cache entry are not sent again"
    assert [case.evidence.case.name for case in record.cases] == ["chain::default"]
    lines = entries(folder)
    assert lines[-1]["phase"] == "confirm"
    assert {line["host"] for line in lines} == {os.uname().nodename}
    # The search is in the client's cache, so that any worker may get the case.
    with opened(settings) as session:
        assert session.search(case).provenance.source == "cached"


def test_the_workers_are_listed(processes, tmp_path, monkeypatch, capsys):
    from qdqspec.app.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "list", processes.address, "--json"]) == 0
    written = capsys.readouterr()
    audit(json.loads(written.out), written.err)
    workers = json.loads(written.out)["workers"]
    assert [[device["key"] for device in worker["devices"]] for worker in workers] == [["fake"], ["fake"]]
    assert all(worker["free_bytes"] > 0 and worker["version"] for worker in workers)
    assert main(["cluster", "list", processes.address]) == 0
    assert capsys.readouterr().out.count("  fake: fake\n") == 2


def test_the_error_for_an_unknown_device_lists_the_devices(settings, processes):
    with pytest.raises(BackendUnavailableError, match=r"no worker at .* has backend onnxruntime") as error:
        opened(replace(settings, backend="onnxruntime"))
    assert "fake on fake (2)" in error.value.cure
    with pytest.raises(BackendUnavailableError, match="on device other"):
        opened(replace(settings, cluster_device="other"))


def has_begun(journal: Path) -> bool:
    return journal.exists() and journal.read_bytes().count(b"\n") >= 2


@rare
@pytest.mark.parametrize("fault", ["killed", "suspended", "resumed"])
def test_the_case_of_a_lost_worker_is_run_by_another(settings, case, processes, fault):
    """Lines and the answer of a worker that continues while its case runs elsewhere are dropped."""
    with opened(settings) as session:
        future = session._future(replace(case, tune=TuneRules(trials=16, strategy="exhaustive")))
        lost, journal = worker_of(session), session.output(case) / "trials.jsonl"
        wait_for(lambda: has_begun(journal))
        (lost.kill if fault == "killed" else lost.suspend)()
        notes = impatient(session)
        try:
            wait_for(lambda: any("the case is run elsewhere" in note for note in notes))
            if fault == "resumed":
                lost.resume()
            assert future.result(PATIENCE).record.evidence.search.total >= 8
        finally:
            if fault != "resumed":
                with suppress(psutil.NoSuchProcess):  # the scheduler may have restarted it
                    lost.kill()  # the Nanny starts another worker
        lines = entries(session.output(case))
    assert_each_trial_once(lines)
    wait_for(lambda: not processes_of_cases(processes))


def assert_each_trial_once(lines: list[dict]) -> None:
    """Each trial of a search is in the journal exactly once."""
    trials = [
        (line["phase"], line["trial"], line["placement"]) for line in lines if line["phase"] != "confirm"
    ]
    assert len(trials) == len(set(trials)) >= 8
    assert lines[-1]["phase"] == "confirm"


@rare
@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_no_process_of_an_ended_client_continues_and_its_search_is_resumed(
    settings, case, processes, tmp_path, signal_sent
):
    words = ["tune", str(case.model), "--backend", "fake", "--strategy", "exhaustive", "--trials", "60"]
    words += ["--cluster", processes.address]
    program = (
        "import signal, sys\n"
        # background jobs of a shell that is not interactive ignore SIGINT, which Python inherits
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"{LIMITS}; client.LEASE = float(sys.argv[1])\n"
        f"from qdqspec.app.cli import main\nsys.exit(main({[*words, '-o', str(tmp_path / 'out')]!r}))"
    )
    # A killed client cannot stop its case, which ends by its lease; Ctrl-C stops it.
    lease = 20.0 if signal_sent == signal.SIGKILL else LEASE
    journal = tmp_path / "out" / "trials.jsonl"
    run = [sys.executable, "-c", program]
    client = subprocess.Popen([*run, str(lease)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(lambda: has_begun(journal))
    client.send_signal(signal_sent)
    code = client.wait(PATIENCE)
    assert code == (130 if signal_sent == signal.SIGINT else -signal.SIGKILL)
    wait_for(lambda: not processes_of_cases(processes))
    before = journal.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    subprocess.run([*run, str(LEASE)], cwd=tmp_path, check=True, capture_output=True)
    assert journal.read_bytes().startswith(before)
    assert entries(journal.parent)[-1]["phase"] == "confirm"


@rare
def test_a_worker_of_another_version_gets_no_case(settings, more_workers):
    said = more_workers(
        "old",
        "--backend",
        "onnxruntime",
        prelude="from qdqspec.app.cluster import inventory, jobs; inventory.__version__ = jobs.__version__ = '0.0.1'",
    )
    assert said["version"] == "0.0.1"
    with pytest.raises(BackendUnavailableError, match="no worker") as error:
        opened(replace(settings, backend="onnxruntime"))
    assert "with qdqspec 0.0.1, which differs" in error.value.cure


SITE = """\
import os, sys
if "TEST_DEVICE_KEY" in os.environ:
    from qdqspec.backends.fake.engine import FakeDevice
    from qdqspec.types import DeviceKey
    FakeDevice.device = lambda self, options: DeviceKey(key=os.environ["TEST_DEVICE_KEY"])
"""


@rare
def test_two_device_keys_are_not_mixed(settings, case, processes, more_workers, tmp_path):
    """Workers with devices of two keys: one is chosen, and measurements of the other one are not used."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": path, "TEST_DEVICE_KEY": "other-device"}
    said = more_workers("keyed", "--backend", "fake", "--device", "3", variables=variables)
    assert [device["key"] for device in said["devices"]] == ["other-device"]
    with pytest.raises(ConfigError, match="has several devices") as error:
        opened(settings)
    assert "fake, other-device" in error.value.cure
    found = {}
    for key in ("fake", "other-device", "fake"):
        with opened(replace(settings, cluster_device=key)) as session:
            evidence = session.evidence(case, NEEDS)
            assert session._cluster.slots(session._device_named("fake")) == (2 if key == "fake" else 1)
        assert evidence.device.key == key
        source = evidence.search.provenance.source
        assert source == ("cached" if key in found else "measured")
        found[key] = evidence
