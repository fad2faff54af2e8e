"""The spec written by ``qdqspec init`` runs in pytest unchanged."""

from __future__ import annotations

import shutil

from qdqspec.app.cli import main


def test_pytest_runs_the_spec_of_init(pytester, models):
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    # integers so fast that full quantization passes, however few builds the time limit allows
    (pytester.path / "pyproject.toml").write_text(
        '[tool.pytest]\nstrict = true\n[tool.qdqspec]\nbackend_option = ["fake.integer=0.5"]\n'
    )
    assert main(["init", "digits_resnet.onnx", "--backend=fake"]) == 0
    options = ("-W", "error", "--qdq-backend=fake", "--qdq-time-limit=3s")
    run = pytester.runpytest_subprocess("digits_resnet.qdq.yaml", *options)
    run.assert_outcomes(passed=2)
