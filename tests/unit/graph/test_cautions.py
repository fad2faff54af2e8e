"""What is said of a model before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqspec.graph.cautions import cautions
from qdqspec.graph.model import Model, load_model
from qdqspec.testing.odd import ODD_MODELS

ODD = {odd.name: odd for odd in ODD_MODELS}
SAID = {
    "training-dropout": "its outputs are random ('Dropout#1')",
    "pairs-already": "Q/DQ stands in it already ('QuantizeLinear#0', 'DequantizeLinear#1')",
    "string-constant": "outputs that are no tensors of numbers are not compared: 'label'",
    "string-input": "outputs that are no tensors of numbers are not compared: 'y'",
    "sequence-output": "outputs that are no tensors of numbers are not compared: 'rows'",
}


@pytest.mark.parametrize("name", sorted(set(ODD) - {"no-nodes"}))
def test_an_oddity_is_said_where_results_depend_on_it_and_nothing_else(name: str) -> None:
    said = "; ".join(cautions(Model(ODD[name].make())))
    assert said.startswith(SAID[name]) if name in SAID else said == ""


def test_an_ordinary_model_is_passed_over_in_silence(models: Path) -> None:
    assert list(cautions(load_model(models / "digits_resnet.onnx"))) == []
