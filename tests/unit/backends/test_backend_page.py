"""The page on backends: the package that it builds is installed, passes the contract suite, and tunes a model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import onnx
import pytest
from onnx_text import model_of

from qdqspec._core.hooks import Declaration

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "backend.md"
ENTRY_POINTS = "[qdqspec.backends]\nbasic = qdqspec_basic:backend\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, and the metadata that an installer writes for its entry point."""
    folder = tmp_path_factory.mktemp("page")
    found = re.findall(r"`([\w/.]+)`:\n\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, text in found:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    assert {name for name, _ in found} == {
        "qdqspec_basic/__init__.py", "qdqspec_basic/engine.py", "qdqspec_basic/placement.py", "pyproject.toml",
        "test_basic.py",
    }  # fmt: skip
    assert 'basic = "qdqspec_basic:backend"' in (folder / "pyproject.toml").read_text()
    metadata = folder / "qdqspec_basic-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: qdqspec-basic\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    command, environment = [sys.executable, "-m", *words], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_backend_of_the_page_passes_the_contract_suite(installed: Path):
    done = run(installed, "pytest", "-q", "-p", "no:cacheprovider", "test_basic.py")
    assert done.returncode == 0, done.stdout


def test_the_backend_of_the_page_tunes_a_model(installed: Path, models: Path):
    told = run(installed, "qdqspec", "doctor", "--backend", "basic")
    assert "basic: works (chosen)" in told.stdout
    model = str(models / "digits_resnet.onnx")
    words = ("--backend", "basic", "--trials", "2", "-o", "tuned", "--no-cache")
    done = run(installed, "qdqspec", "tune", model, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (installed / "tuned" / "tuned.onnx").is_file()


def test_the_placement_rule_of_the_page_is_applied(installed: Path):
    text = "(float[1,64] x) => (float[1,1] y, float[1,64] z) { y = MatMul(x, v)  z = MatMul(x, w) }"
    model = model_of(text, v=(64, 1), w=(64, 64))
    onnx.save(model.proto, installed / "products.onnx")
    done = run(installed, "qdqspec", "inspect", "products.onnx", "--backend", "basic", "--verbose")
    assert "MatMul: rule no-vector-product leaves it in float" in done.stdout, done.stdout + done.stderr
    assert not re.search(r"\bz\b.*no-vector-product", done.stdout)


def test_the_page_names_each_field_of_the_declaration():
    words = set(re.findall(r"\w+", PAGE.read_text(encoding="utf-8")))
    assert {one.name for one in fields(Declaration)} <= words
