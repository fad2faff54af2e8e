"""A cluster on a network address of this machine: which clients connect, and what a pytest process reports."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_processes import LIMITS, PATIENCE, Processes

from qdqspec.app.cluster.address import Address, is_loopback, make_certificates
from qdqspec.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def own_address() -> str:
    """The address of this machine in its network; empty without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a UDP socket, which sends nothing here
        except OSError:
            return ""
        found: str = probe.getsockname()[0]
    return "" if is_loopback(found) else found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A scheduler and a worker on the network address, and the folder of their certificates."""
    pytest.importorskip("distributed", reason="the extra [cluster] is not installed")
    host = own_address()
    if not host:
        pytest.skip("this machine has no network address")
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder / "keys", days=2)
    found = Processes(folder)
    tls = ("--cluster-tls", str(folder / "keys"))
    try:
        words = ("cluster", "start", "--host", host, "--port", "0", "--json", *tls)
        found.address = found.start(*words)["address"]
        found.worker("one", "--backend", "fake", *tls)
        yield found.address, folder / "keys"
    finally:
        found.stop()


def test_only_a_client_with_the_certificate_connects(cluster, tmp_path, monkeypatch):
    from qdqspec.app.cluster import client

    address, keys = cluster
    assert address.startswith("tls://")
    make_certificates(tmp_path / "other", days=2)
    unprotected = Address(host=Address.parse(address).host, port=Address.parse(address).port, tls=False)
    monkeypatch.setattr(client, "_CONNECT", 3.0)  # these two never connect
    with pytest.raises(ConfigError, match="no scheduler answers"):
        client.Cluster(Address.parse(address), tmp_path / "other")
    with pytest.raises(ConfigError, match="no scheduler answers"):
        client.Cluster(unprotected, keys)
    monkeypatch.setattr(client, "_CONNECT", PATIENCE)
    connected = client.Cluster(Address.parse(address), keys)
    (worker,) = connected.workers()
    assert [device.key for device in worker.devices] == ["fake"]
    connected.close()


def test_pytest_reports_the_same_with_and_without_a_cluster(cluster, model, tmp_path):
    address, keys = cluster
    here = reported(tmp_path / "here", model)
    there = reported(tmp_path / "there", model, "--qdq-cluster", address, f"--qdq-cluster-tls={keys}")
    assert here["code"] == there["code"] == 1  # the second check fails
    assert here["verdicts"] == there["verdicts"] == {"speedup": "pass", "most": "fail"}
    assert here["keys"] == there["keys"]
    assert len(here["rows"]) == len(there["rows"]) == 1
    assert all(each["rows"][0].endswith("most FAIL, 1 passed") for each in (here, there))
    assert there["header"] == here["header"].replace("fake", f"fake at {address}", 1)


def reported(folder: Path, model: Path, *words: str) -> dict:
    """Exit code, verdicts and rows of the table of a pytest process on a spec with two checks."""
    (folder / "specs").mkdir(parents=True)
    shutil.copy(model, folder / "specs")
    (folder / "specs" / "chain.qdq.yaml").write_text(
        "qdqspec: 1\nmodel: chain.onnx\ntune: {trials: 3}\n"
        "checks: [{kind: speedup, min: 1.01}, {kind: speedup, id: most, min: 50}]\n"
    )
    given = ["specs", "--qdq-backend", "fake", "-p", "no:cacheprovider", *words]
    program = f"import sys, pytest\n{LIMITS}\nsys.exit(pytest.main({given!r}))"
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    written = [json.loads(path.read_text()) for path in folder.rglob("result.json")]
    assert written, done.stdout + done.stderr
    (result,) = written
    return {
        "code": done.returncode,
        "keys": result.keys(),
        "header": next(line for line in done.stdout.splitlines() if line.startswith("qdqspec: ")),
        "verdicts": {check["id"]: check["verdict"] for check in result["checks"]},
        "rows": [line for line in done.stdout.splitlines() if line.startswith("chain::default ")],
    }
