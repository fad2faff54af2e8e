"""Every code block of the documents is valid: specs load, commands are parsed, Python imports exist.

Other tests also run the blocks of some pages.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from qdqspec.app.cli import parsers
from qdqspec.qdq.scheme_file import read_scheme
from qdqspec.spec.models import load_spec

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    ROOT / "docs" / "gallery" / "index.md",
    ROOT / "docs" / "reference" / "files.md",
]
PARTS = {
    "qdqspec": "qdqspec: 1\n",
    "model": "model: net.onnx\n",
    "inputs": "inputs: {evaluation: data.npz}\n",
    "checks": "checks: [{kind: speedup, min: 1.1}]\n",
}
END = {"&&", "||", "|", ">", ">>", ";"}


def numbered(page: Path, texts: Iterable[str]) -> Iterator[object]:
    """Parameters with ids such as ``guide-2``."""
    return (pytest.param(text, id=f"{page.stem}-{number}") for number, text in enumerate(texts, start=1))


def blocks(language: str) -> Iterator[object]:
    """The blocks in a language. The workflow of ci.md has a separate test."""
    for page in PAGES:
        text = re.sub(
            r"<!-- workflow -->\n```yaml\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        yield from numbered(page, re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def commands() -> Iterator[object]:
    """The lines of blocks that run a command of the project."""
    for page in PAGES:
        code = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        lines = "".join(code).replace("\\\n", " ").splitlines()
        found = re.findall(r"^(?:\$ )?((?:qdqspec|pytest) .*)", "\n".join(lines), re.MULTILINE)
        yield from numbered(page, dict.fromkeys(found))


def quoted() -> Iterator[object]:
    """The commands quoted in sentences, which may lack arguments."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        yield from numbered(page, dict.fromkeys(re.findall(r"`(qdqspec [^`]+)`", text)))


@pytest.mark.parametrize("block", [*blocks("yaml")])
def test_a_spec_of_a_page_loads(block: str, tmp_path: Path) -> None:
    keys = yaml.safe_load(block).keys()
    text = "".join(part for key, part in PARTS.items() if key not in keys) + block
    (tmp_path / "net.qdq.yaml").write_text(text, encoding="utf-8")
    assert load_spec(tmp_path / "net.qdq.yaml").cases()


@pytest.mark.parametrize("line", [*commands()])
def test_a_command_of_a_page_is_accepted(line: str, pytester: pytest.Pytester) -> None:
    program, *words = shlex.split(line, comments=True)
    words = words[: next((index for index, word in enumerate(words) if word in END), len(words))]
    if program == "pytest":
        pytester.parseconfig(*words)
    else:
        parsers()[0].parse_args(words)


@pytest.mark.parametrize("line", [*quoted()])
def test_a_quoted_command_has_an_existing_verb_and_options(line: str) -> None:
    _, verb, *words = shlex.split(line)
    known = parsers()[1][verb]._option_string_actions
    assert [word for word in words if word.startswith("-") and word.partition("=")[0] not in known] == []


@pytest.mark.parametrize("block", [*blocks("python")])
def test_imports_of_a_python_block_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "qdqspec":
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("block", [*blocks("json")])
def test_a_scheme_of_a_page_is_read(block: str, tmp_path: Path) -> None:
    (tmp_path / "scheme.json").write_text(block, encoding="utf-8")
    assert read_scheme(tmp_path / "scheme.json").pairs


def test_a_package_with_the_check_of_the_page_is_registered_and_judged(
    pytester: pytest.Pytester, models: Path
) -> None:
    """The entry point registers the check under its kind, and it is judged and described like built-in checks."""
    page = (ROOT / "docs" / "how-to" / "check.md").read_text(encoding="utf-8")
    code, points = (
        re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[0] for language in ("python", "toml")
    )
    groups = tomllib.loads(points)["project"]["entry-points"]
    folder = pytester.mkdir("my_package-1.0.dist-info")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n{name} = {target}\n" for group, one in groups.items() for name, target in one.items()
        )
    )
    pytester.makepyfile(
        my_package=code,
        test_mine="""
        from my_package import check
        from qdqspec.testing.checks import CheckContract
        from qdqspec.testing.records import faster_case
        from dataclasses import replace

        FASTER = faster_case().evidence
        SHIFTED = replace(FASTER, figures={"mean-shift": {"largest": 0.2}})

        class TestMine(CheckContract):
            check = check
            passing = ({"kind": "mean-shift", "max": 1}, SHIFTED)
            failing = ({"kind": "mean-shift", "max": 0.1}, SHIFTED)
            inconclusive = ({"kind": "mean-shift", "max": 1}, FASTER)
        """,
    )
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    np.savez(pytester.path / "data.npz", input=np.ones((4, 1, 16, 16), np.float32), labels=np.arange(4))
    (pytester.path / "net.qdq.yaml").write_text(
        "qdqspec: 1\nmodel: digits_resnet.onnx\ninputs: {evaluation: data.npz}\ntune: {trials: 1}\n"
        "checks: [{kind: mean-shift, max: 100}, {kind: mean-shift, max: -1}]\n"
    )
    run = pytester.runpytest_subprocess("net.qdq.yaml", "--qdq-backend=fake")
    run.assert_outcomes(passed=1, failed=1)
    contract = pytester.runpytest_subprocess("test_mine.py").parseoutcomes()
    assert contract["passed"] > 10
    assert "failed" not in contract
    run.stdout.fnmatch_lines(["*mean-shift.largest 0 *mean-shift-2 FAIL*"])
    listed = pytester.runpython_c("from qdqspec.app.cli import main; main(['list', 'checks'])")
    listed.stdout.fnmatch_lines(["mean-shift *how far the means of outputs may move*"])


def test_the_strategy_of_the_page_keeps_the_contract_of_strategies(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "how-to" / "strategy.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    pytester.makepyfile(
        my_package=code,
        test_mine="""
        from my_package import FlipOne
        from qdqspec.testing.strategies import StrategyContract

        class TestFlipOne(StrategyContract):
            strategy = FlipOne
        """,
    )
    outcomes = pytester.runpytest_subprocess("test_mine.py").parseoutcomes()
    assert outcomes["passed"] > 5
    assert "failed" not in outcomes
