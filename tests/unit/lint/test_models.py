"""Findings of lint on whole models: none on float ones, the expected ones on quantized ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqspec._core.config.hooks import all_names
from qdqspec.graph.model import load_model
from qdqspec.qdq.lint import lint_model

TARGETS = all_names("lint_targets")

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("name", ["squeezenet10", "ultraface_rfb320", "digits_resnet"])
def test_float_models_have_no_findings(models: Path, name: str) -> None:
    model = load_model(models / f"{name}.onnx")
    found = {target: lint_model(model, target) for target in TARGETS}
    found = {
        target: [each for each in own if each.id != "QNN001"] for target, own in found.items()
    }  # open batches
    assert not any(found.values())


# Models that other tools made from one network; without TRT040 on sizes, since its convolutions have 12 channels.
QUANTIZED = {
    "digits_resnet_qat_qdq": {"TRT032", "TRT042", "TRT048"},
    "qdq_modelopt_digits_resnet": {"TRT042"},
    "qdq_nncf_digits_resnet": {"TRT006", "TRT030", "TRT031", "TRT042"},
    "qdq_ort_s8s8_digits_resnet_b1": {"TRT004", "TRT031", "TRT042", "TRT046"},
    "qdq_ort_u8s8_digits_resnet_b1": {"TRT001", "TRT004", "TRT006", "TRT031", "TRT042"},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_findings_of_quantized_models(name: str) -> None:
    found = lint_model(load_model(DATA / f"{name}.onnx"), "tensorrt-11")
    assert {finding.id for finding in found} - {"TRT040"} == QUANTIZED[name]
