"""Runs verbs in this process, in a folder of their own."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from json_audit import lost

from qdqspec.cli import main


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
    """``verb("doctor", "--json")`` in an empty project; JSON must have what the terminal shows."""
    for name in list(os.environ):
        if name.startswith("QDQSPEC_"):
            monkeypatch.delenv(name)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> Outcome:
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:  # how argparse leaves
            code = int(end.code or 0)
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        if "--json" in words and written.out:
            _audit(json.loads(written.out), written.err)
        return Outcome(code, written.out, written.err)

    return run


def _audit(data: dict[str, Any], err: str) -> None:
    """The figures, names and sentences of the text and of standard error, without progress, are in the data.

    The JSON Schema of ``schema`` is itself what the terminal shows.
    """
    if "$defs" in data:
        return
    if "error" in data:
        assert data["error"] in err
        assert all(line in err for line in (data["cure"] or "").splitlines())
        return
    said = [line for line in err.splitlines() if not line.startswith("[qdqspec]")]
    shown = {name: value for name, value in data.items() if name != "text"}
    assert lost("\n".join([data["text"], *said]), shown) == []


@pytest.fixture(autouse=True)
def _cheap_engines(engine_threads):
    """Unless a test asks for ``processes``."""
