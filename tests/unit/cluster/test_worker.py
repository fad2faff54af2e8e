"""Workers that cannot start, and the output of those that do."""

from __future__ import annotations

import socket

import pytest
from cluster_processes import Processes

from qdqspec._core.config import Settings
from qdqspec.app.cluster.address import Address
from qdqspec.errors import ConfigError

pytest.importorskip("distributed", reason="the extra [cluster] is not installed")


def test_a_worker_needs_a_scheduler(tmp_path, monkeypatch):
    from qdqspec.app.cluster import worker

    monkeypatch.setattr(worker, "_REACH_S", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address.parse(f"127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(ConfigError, match="no scheduler answers"):
        worker.run_worker(address, tmp_path, Settings(), tmp_path / "worker", ("fake",), pytest.fail)


def test_dask_logs_nothing_without_an_error(tmp_path):
    """The output begins with the address of the scheduler and the devices of the worker."""
    processes = Processes(tmp_path)
    try:
        processes.address = processes.start("cluster", "start", "--port", "0", "--json")["address"]
        processes.worker("one", "--backend", "fake")
        assert [log.read_text() for log in sorted(tmp_path.glob("*.log"))] == ["", ""]
    finally:
        processes.stop()
