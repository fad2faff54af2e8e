"""Specs with a data loader of a conftest and with images, from the blocks of docs/how-to/data.md."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "data.md"
SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
inputs: {{calibration: {calibration}, evaluation: {evaluation}}}
tune: {{trials: 1}}
checks:
  - {{kind: parity, min_sqnr_db: 1}}
  - {{kind: accuracy, metric: top1, min: 0}}
"""


def test_the_loader_and_the_images_of_the_page_are_read(pytester, models):
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    (loader,) = (
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "qdq_data" in b
    )
    pytester.makeconftest(loader)
    (pytester.path / "photos").mkdir()
    for number in range(3):
        Image.fromarray(np.full((20, 20), 60 * number, np.uint8)).save(pytester.path / f"photos/{number}.png")
    (pytester.path / "labels.txt").write_text("1\n2\n3\n")
    images = "{images: 'photos/*.png', size: 16, colors: gray, labels: labels.txt}"
    texts = {"loader": "{loader: my_batches}", "images": images, "wrong": "{loader: my_batch}"}
    for name, text in texts.items():
        spec = SPEC.format(calibration=text, evaluation=text)
        (pytester.path / f"{name}.qdq.yaml").write_text(spec)
    run = pytester.runpytest_subprocess("loader.qdq.yaml", "images.qdq.yaml", "--qdq-backend=fake")
    run.assert_outcomes(passed=4)
    run = pytester.runpytest_subprocess("wrong.qdq.yaml", "--qdq-backend=fake")
    run.assert_outcomes(failed=2)
    run.stdout.fnmatch_lines(["*no data loader is called 'my_batch'*"])


def test_a_case_whose_loader_raises_is_in_the_report(pytester, models):
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    broken = "def broken():\n    raise RuntimeError('the disk is gone')\n"
    pytester.makeconftest(
        f"import pytest\n\n{broken}\n@pytest.fixture\ndef qdq_data():\n    return {{'mine': broken}}\n"
    )
    (pytester.path / "a.qdq.yaml").write_text(
        SPEC.format(calibration="{loader: mine}", evaluation="{loader: mine}")
    )
    run = pytester.runpytest_subprocess("a.qdq.yaml", "--qdq-backend=fake", "--qdq-json=run.json")
    run.assert_outcomes(failed=2)
    (case,) = json.loads((pytester.path / "run.json").read_text())["cases"]
    headlines = [check["headline"] for check in case["checks"]]
    assert len(headlines) == 2
    assert all("data loader 'mine' raised RuntimeError: the disk" in headline for headline in headlines)
