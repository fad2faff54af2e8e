"""Generated pages are up to date, and the commands of the tutorial are accepted."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest

from qdqspec.app.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_reference_pages_are_the_generated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "pydantic", minversion="2.14"
    )  # older versions omit docstrings of dataclasses in schemas
    monkeypatch.syspath_prepend(ROOT / "tools")
    for name, text in importlib.import_module("reference").pages().items():
        assert (DOCS / "reference" / name).read_text(encoding="utf-8") == text, (
            "run: python tools/reference.py"
        )


def test_the_commands_of_the_tutorial_are_accepted(
    pytester: pytest.Pytester, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command writes the spec; pytest accepts the options of the others and collects the checks."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    commands = [shlex.split(one) for one in re.findall(r"<!-- command -->\n```sh\n(.*?)\n```", text)]
    assert len(commands) == 6
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    (pytester.path / "data").mkdir()
    for name in ("digits_calibration.npz", "digits_evaluation.npz"):
        shutil.copy(models.parent / "data" / name, pytester.path / "data")
    monkeypatch.chdir(pytester.path)
    monkeypatch.setenv("QDQSPEC_BACKEND", "fake")
    assert main(commands[0][1:]) == 0
    assert "kind: accuracy" in (pytester.path / "specs" / "digits.qdq.yaml").read_text()
    for words in (words for program, *words in commands if program == "pytest"):
        run = pytester.runpytest_subprocess(*words, "--collect-only", "-q")
        assert run.ret == 0, words
        run.stdout.fnmatch_lines(["specs/digits.qdq.yaml::default::speedup"])
