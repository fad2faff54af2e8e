"""Conclusions of the client from answers of a worker."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from qdqspec.app.cluster.client import Cluster, LostError


def asking(monkeypatch, error: Exception, known: list[str]) -> Cluster:
    """A client whose requests fail, and whose scheduler lists these workers."""
    cluster = object.__new__(Cluster)
    cluster.closing, cluster._lease = threading.Event(), 1e9
    cluster._client = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": dict.fromkeys(known)})

    def call(*words: object, **more: object) -> object:
        raise error

    monkeypatch.setattr(cluster, "_call", call)
    return cluster


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionError("refused")])
def test_a_worker_that_the_scheduler_does_not_list_is_lost_before_its_lease_ends(monkeypatch, error):
    """A request to a killed worker fails after its time limit only, since Dask retries the connection."""
    with pytest.raises(LostError, match="was lost"):
        asking(monkeypatch, error, ["tcp://other"])._ask("tcp://gone", "job", 0)


def test_a_worker_that_does_not_answer_keeps_its_lease(monkeypatch):
    cluster = asking(monkeypatch, TimeoutError(), ["tcp://slow"])
    cluster._lease = 0.01
    with pytest.raises(LostError, match="did not answer for"):
        cluster._ask("tcp://slow", "job", 0)
