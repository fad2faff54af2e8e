"""A cluster on this machine, and a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from chains import chain_model
from cluster_processes import PATIENCE, Processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> Iterator[Processes]:
    """A scheduler and two workers with simulated devices of one key."""
    pytest.importorskip("distributed", reason="the extra [cluster] is not installed")
    found = Processes(tmp_path_factory.mktemp("cluster"))
    try:
        found.address = found.start("cluster", "start", "--port", "0", "--json")["address"]
        for device, name in enumerate(("one", "two")):
            found.worker(name, "--backend", "fake", "--device", str(device))
        logs = [log.read_text() for log in found.folder.glob("*.log")]
        assert logs == [""] * 3, "Dask logs nothing without an error"
        yield found
    finally:
        found.stop()


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "chain.onnx"
    onnx.save(chain_model(), path)
    return path


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch) -> None:
    """Time limits that are long enough for a loaded machine."""
    from qdqspec.app.cluster import client

    monkeypatch.setattr(client, "_CONNECT", PATIENCE)
