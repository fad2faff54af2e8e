"""Jobs in the process of a worker."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from types import SimpleNamespace

import onnx
import pytest
from chains import chain_model

from qdqspec._core.config import Settings
from qdqspec.app.cluster import jobs
from qdqspec.app.cluster.request import CaseRequest
from qdqspec.app.cluster.session import _CaseRun
from qdqspec.app.preparation.build_logs import open_journal
from qdqspec.search.journal import Journal, read_journal
from qdqspec.types import Case, Placement, Trial

REQUEST = CaseRequest(id="a", version="1", topic="t", lease=1.0, case={"checks": []}, settings={})


@pytest.fixture
def job(tmp_path, monkeypatch) -> jobs.Job:
    """A job whose client asks for its state continuously."""
    monkeypatch.setattr(jobs.Job, "require_client", lambda self: None)
    return jobs.Job(REQUEST, tmp_path / "job")


@pytest.fixture
def own(tmp_path) -> jobs.Jobs:
    return jobs.Jobs(tmp_path, Settings(), print)


def test_a_process_that_ends_without_an_answer_fails_its_case(own, job, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    own._run(job)
    assert "ended with exit code 1" in job.answer["failure"]["what"]


def test_a_process_that_ends_during_a_suspension_of_its_worker_is_not_a_failure(own, job, monkeypatch):
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


@pytest.mark.parametrize("last", ["refine", "confirm"], ids=["unfinished", "finished"])
def test_journal_lines_of_another_device_are_not_sent_to_the_client(own, job, tmp_path, last):
    """The job receives the client's journal of another device; the case opens a new one later."""
    trials = [
        Trial(number=n, phase=phase, placement=Placement(sites=frozenset()))
        for n, phase in enumerate(["pure", last])
    ]
    here = tmp_path / "output"
    with Journal.open(here / "trials.jsonl", {"device": "a"}) as journal:
        for trial in trials:
            journal.append(trial)
    onnx.save(chain_model(), tmp_path / "chain.onnx")
    session = SimpleNamespace(settings_left=lambda: Settings(root=tmp_path, no_cache=True))
    run = _CaseRun(session, Case(id="default", model=tmp_path / "chain.onnx"), here)
    package = run.package()
    for entry in package.files:
        path = entry.below(job.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package.local[entry.sha256], path)
    job.phase, own._jobs["a"] = "running", job

    def receive() -> int:
        """Handles the answer to the first request as the client does."""
        news = asyncio.run(own.ask("a", 0))
        run.news(json.loads(json.dumps(news)))
        return len(news["entries"])

    run.begin("worker", "there")
    assert receive() == 0
    with open_journal(job.folder / "output", {"device": "b"}, []) as journal:
        journal.append(trials[0])
        assert receive() == 1
    run.close()
    header, lines = read_journal(here / "trials.jsonl")
    assert (header["device"], len(lines)) == ("b", 1)
