"""Generated pages are up to date, links have targets, and the commands of the tutorial are accepted."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from qdqspec.app.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def test_the_reference_pages_are_the_generated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "pydantic", minversion="2.14"
    )  # older versions omit docstrings of dataclasses in schemas
    monkeypatch.syspath_prepend(ROOT / "tools")
    for name, text in importlib.import_module("reference").pages().items():
        assert (DOCS / "reference" / name).read_text(encoding="utf-8") == text, (
            "run: python tools/reference.py"
        )


def anchors(page: Path) -> set[str]:
    """The anchors that MkDocs generates for the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_of_a_page_have_targets(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_the_pages_of_the_navigation_exist() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = {name for part in site["nav"] for name in (part if isinstance(part, str) else "").split()}
    listed |= {
        name for part in site["nav"] if isinstance(part, dict) for names in part.values() for name in names
    }
    written = {page.relative_to(DOCS).as_posix() for page in PAGES if page.parent.name != "decisions"}
    assert listed <= written
    assert {"tutorial.md", "guide.md", "how-to/ci.md", "how-to/data.md", "reference/spec.md"} <= listed


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
