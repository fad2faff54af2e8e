"""The page on accuracy: its Python blocks run, and its search is judged with the conftest of the page."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how-to" / "accuracy.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    for kind in ("calibration", "evaluation"):
        shutil.copy(ROOT / "specs" / "data" / f"digits_{kind}.npz", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("engine_threads")
def test_the_python_of_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "page.py").write_text("\n".join(blocks("python")), encoding="utf-8")
    runpy.run_path("page.py")
    reference, least, shipped, *_ = capsys.readouterr().out.split()
    assert float(least) == pytest.approx(float(reference) - 0.05)
    assert float(shipped) >= float(least)


@pytest.mark.usefixtures("engine_threads")
def test_the_search_of_the_page_meets_its_accuracy_constraint(
    folder: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    (held,) = (block for block in blocks("yaml") if "tune:" in block)
    (folder / "a.qdq.yaml").write_text(held, encoding="utf-8")
    (folder / "conftest.py").write_text(blocks("python")[0], encoding="utf-8")
    monkeypatch.chdir(folder)
    words = ("-q", "a.qdq.yaml", "--qdq-json=run.json", "-p", "no:cacheprovider")
    assert pytester.runpytest_inprocess(*words).ret == 0
    found = json.loads((folder / "run.json").read_text(encoding="utf-8"))["cases"][0]
    bound = found["search"]["accuracy"]
    assert bound["reference"] == pytest.approx(534 / 540)
    assert found["accuracy"]["top1"]["tuned"] == pytest.approx(bound["selected"])
    assert bound["selected"] >= bound["least"]
