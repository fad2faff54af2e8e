"""Findings of lint on whole models, and their listing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trt_corpus import parse, two

from qdqspec._core.hooks import all_names
from qdqspec.graph.model import load_model
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.lint.rules import render_findings
from qdqspec.types import Finding

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


# ---- texts -------------------------------------------------------------------------------------------


def test_the_listing_of_findings(golden: Callable[[str, str], None]) -> None:
    names = [f"a{i}" for i in range(7)]
    nodes = "".join(two(name, "x", zero="zu") for name in names)
    nodes += "".join(f"n{name} = Softmax({name}) " for name in names)
    nodes += f"y = Sum({', '.join(f'n{name}' for name in names)})"
    found = lint_model(parse("float[4,16] x", "y", nodes), "tensorrt-11")
    text = render_findings("tensorrt-11", found)
    assert "and 2 more" in text
    assert "more" not in render_findings("tensorrt-11", found, most=0)
    golden("lint/listing.txt", f"{text}\n")


def test_control_characters_in_names_are_escaped() -> None:
    finding = Finding(
        id="TRT001", severity="slow", node="a\x1b[2J\n", message="is odd", title="T", cure="c", source="s"
    )
    text = render_findings("tensorrt-10", (finding,))
    assert "\x1b" not in text
    assert len(text.splitlines()) == 5
