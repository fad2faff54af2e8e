"""The jobs of a worker's process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdqspec.cluster import jobs
from qdqspec.cluster.case_process import WorkerOptions
from qdqspec.cluster.inventory import Announcement
from qdqspec.cluster.request import CaseRequest

ANNOUNCED = Announcement(version="1", python="3", host="here", system="linux", devices=())
REQUEST = CaseRequest(
    id="a", version="1", topic="t", lease=1.0, case={"checks": []}, settings={}, helps="there"
)


@pytest.fixture
def job(tmp_path, monkeypatch) -> jobs.Job:
    """A job whose client asks all the time."""
    monkeypatch.setattr(jobs.Job, "require_client", lambda self: None)
    return jobs.Job(replace(REQUEST, helps=""), tmp_path / "job")


@pytest.fixture
def own(tmp_path) -> jobs.Jobs:
    return jobs.Jobs(tmp_path, WorkerOptions(), print, ANNOUNCED, lambda job: lambda: None)


def test_a_process_that_ends_without_an_answer_is_a_failure_of_its_case(own, job, monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    own._run(job)
    assert "ended with exit code 1" in job.answer["failure"]["what"]


def test_a_process_that_ended_because_its_worker_was_frozen_is_no_failure(own, job, monkeypatch):
    """The worker's thread sleeps for longer than the lease, and the process ends itself meanwhile."""
    process = jobs.subprocess.Popen
    monkeypatch.setattr(
        jobs.subprocess,
        "Popen",
        lambda words, **more: process([*words[:1], "-c", "import os; os.kill(os.getpid(), 9)"], **more),
    )
    monkeypatch.setattr(jobs, "_STEP", 2.0)
    with pytest.raises(jobs.StoppedError):
        own._run(job)
    assert job.answer is None
