"""Generated pages are up to date, the commands of the tutorial are accepted, and the specs of the gallery load."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from qdqspec.app.cli import main
from qdqspec.spec.models import load_spec

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


GALLERY = DOCS / "gallery"
SPECS = sorted(GALLERY.glob("*.qdq.yaml"))


@pytest.fixture(scope="module")
def fetching() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery_fetch", GALLERY / "fetch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_gallery_spec_has_a_model_and_a_line_in_the_page(fetching: ModuleType) -> None:
    page = (GALLERY / "index.md").read_text(encoding="utf-8")
    assert {path.name.partition(".")[0] for path in SPECS} == set(fetching.MODELS)
    for path in SPECS:
        name, spec = path.name.partition(".")[0], load_spec(path, root=GALLERY)
        assert Path(str(spec.model)).name == f"{name}.onnx"
        assert spec.checks
        assert path.name in page
        assert fetching.MODELS[name].package.partition("==")[0] in page
