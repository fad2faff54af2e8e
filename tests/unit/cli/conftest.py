"""Runs verbs in this process, each test in a separate folder."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from json_audit import audit

from qdqspec.app.cli import main
from qdqspec.app.report.record import record_to_json
from qdqspec.testing.records import sample_run


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def verb(tmp_path, monkeypatch, capsys):
    """``verb("doctor", "--json")`` in an empty project; JSON must contain all that the terminal shows."""
    for name in list(os.environ):
        if name.startswith("QDQSPEC_"):
            monkeypatch.delenv(name)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> Outcome:
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:  # argparse exits with it
            code = int(end.code or 0)
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        if "--json" in words and written.out:
            audit(json.loads(written.out), written.err)
        return Outcome(code, written.out, written.err)

    before = signal.getsignal(signal.SIGTERM)  # `cluster` replaces it
    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _cheap_engines(engine_threads):
    """Runs engines as threads, unless a test uses ``processes``."""


@pytest.fixture(scope="session")
def run_records() -> tuple[str, str]:
    """The record of a run, and of one in which the first case takes a fifth longer."""
    data = record_to_json(sample_run())
    before = json.dumps(data)
    tuned = data["cases"][0]["tuned"]["samples"]
    for clock, times in tuned.items():
        if clock.endswith("_ms") and times:
            tuned[clock] = [1.2 * value for value in times]
    return before, json.dumps(data)
