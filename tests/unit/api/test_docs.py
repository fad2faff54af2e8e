"""The code blocks of the pages on Python run, in order, in one folder, on the simulated device."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from arrays import arrays_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "python.md"
SAMPLES = 16


@pytest.mark.usefixtures("engine_threads")
def test_the_blocks_of_the_page_run(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 8
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    calibration = arrays_of(ROOT / "specs" / "data" / "digits_calibration.npz")
    # Few samples, since each call repeats the calibration.
    few = {name: values[:SAMPLES] for name, values in calibration.items()}
    np.savez(tmp_path / "digits_calibration.npz", **few)
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QDQSPEC_BACKEND", "fake")
    runpy.run_path("page.py")
    assert "regions by structure" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert {"reference.onnx", "tuned.onnx", "tuned_raw.onnx", "scheme.json", "trials.jsonl"} <= written
    assert {path.name for path in tmp_path.iterdir()} >= {"best.onnx", "report.html", "run.json", "study"}
