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
