"""What `qdqspec inspect` prints."""

from __future__ import annotations

import json

import pytest

from qdqspec.graph.model import load_model
from qdqspec.regions import find_regions, inspect_model, render_text, to_json

LABELS = {"Conv": ("in+out",), "Add": ("in+out",), "Gemm": ("in+out", "in-only")}


@pytest.fixture
def inspection(models):
    model = load_model(models / "digits_resnet.onnx")
    return inspect_model(model, find_regions(model), LABELS)


def test_text(inspection, golden):
    golden("regions/digits_resnet.txt", render_text(inspection))


def test_verbose_text(inspection, golden):
    golden("regions/digits_resnet-verbose.txt", render_text(inspection, verbose=True, include_all=True))


def test_json(inspection, golden):
    golden("regions/digits_resnet.json", json.dumps(to_json(inspection), indent=1) + "\n")


def test_long_lists_are_cut_in_text_and_never_in_json(models):
    model = load_model(models / "ultraface_rfb320.onnx")
    found = inspect_model(model, find_regions(model))
    text = render_text(found, max_nodes=3)
    assert f"... and {len(found.regions) - 3} more" in text
    assert len(text.splitlines()) < 40
    assert len(to_json(found)["regions"]) == len(found.regions)


def test_regions_with_nothing_to_quantize_are_shown_on_request(models):
    model = load_model(models / "ultraface_rfb320.onnx")
    regions = find_regions(model)
    found = inspect_model(model, regions, {"Softmax": ("in+out",)})
    assert render_text(found).count("LEAF") < render_text(found, include_all=True).count("LEAF")
    assert "--include-all shows them" in render_text(found)


def test_refusals_give_a_reason_for_every_other_node(inspection):
    assert sum(count for _, count in inspection.refusals) + len(inspection.quantizable) == inspection.nodes
    assert ("Relu: the backend runs it in floating point only", 13) in inspection.refusals


def test_without_a_backend_nothing_is_said_of_quantization(models):
    model = load_model(models / "digits_resnet.onnx")
    found = inspect_model(model, find_regions(model))
    assert to_json(found)["coverage"] == {"nodes": 37, "quantizable": None}
    assert "quantizable" not in render_text(found)
