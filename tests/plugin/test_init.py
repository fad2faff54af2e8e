"""The spec written by ``qdqspec init`` runs in pytest unchanged."""

from __future__ import annotations

import shutil

import onnx

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


def test_the_spec_of_a_model_with_nothing_to_quantize_passes(pytester):
    text = '<ir_version: 8, opset_import: ["": 17]> net (float[4] x) => (float[4] y) { y = Cos(x) }'
    onnx.save(onnx.parser.parse_model(text), pytester.path / "net.onnx")
    (pytester.path / "pyproject.toml").write_text("[tool.pytest]\nstrict = true\n")
    assert main(["init", "net.onnx", "--backend=fake"]) == 0
    pytester.runpytest_subprocess("net.qdq.yaml").assert_outcomes(passed=1)
