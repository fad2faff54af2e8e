"""The code blocks of pages run: those on Python on the simulated device, and those on accuracy."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from arrays import arrays_of

ROOT = Path(__file__).parents[3]
PYTHON, ACCURACY = (ROOT / "docs" / "how-to" / name for name in ("python.md", "accuracy.md"))
SAMPLES = 16


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.usefixtures("engine_threads")
def test_the_blocks_of_the_page_run(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(blocks(PYTHON, "python")) >= 8
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    calibration = arrays_of(ROOT / "specs" / "data" / "digits_calibration.npz")
    # Few samples, since each call repeats the calibration.
    few = {name: values[:SAMPLES] for name, values in calibration.items()}
    np.savez(tmp_path / "digits_calibration.npz", **few)
    (tmp_path / "page.py").write_text("\n".join(blocks(PYTHON, "python")), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDQSPEC_BACKEND", "fake")
    runpy.run_path("page.py")
    assert "regions by structure" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert {"reference.onnx", "tuned.onnx", "tuned_raw.onnx", "scheme.json", "trials.jsonl"} <= written
    assert {path.name for path in tmp_path.iterdir()} >= {"best.onnx", "report.html", "run.json", "study"}


@pytest.fixture
def folder(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    for kind in ("calibration", "evaluation"):
        shutil.copy(ROOT / "specs" / "data" / f"digits_{kind}.npz", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("engine_threads")
def test_the_python_of_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "page.py").write_text("\n".join(blocks(ACCURACY, "python")), encoding="utf-8")
    runpy.run_path("page.py")
    reference, least, shipped, *_ = capsys.readouterr().out.split()
    assert float(least) == pytest.approx(float(reference) - 0.05)
    assert float(shipped) >= float(least)


@pytest.mark.usefixtures("engine_threads")
def test_the_search_of_the_page_meets_its_accuracy_constraint(
    folder: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    (held,) = (block for block in blocks(ACCURACY, "yaml") if "tune:" in block)
    (folder / "a.qdq.yaml").write_text(held, encoding="utf-8")
    (folder / "conftest.py").write_text(blocks(ACCURACY, "python")[0], encoding="utf-8")
    monkeypatch.chdir(folder)
    words = ("-q", "a.qdq.yaml", "--qdq-json=run.json", "-p", "no:cacheprovider")
    assert pytester.runpytest_inprocess(*words).ret == 0
    found = json.loads((folder / "run.json").read_text(encoding="utf-8"))["cases"][0]
    bound = found["search"]["accuracy"]
    assert bound["reference"] == pytest.approx(534 / 540)
    assert found["accuracy"]["top1"]["tuned"] == pytest.approx(bound["selected"])
    assert bound["selected"] >= bound["least"]
