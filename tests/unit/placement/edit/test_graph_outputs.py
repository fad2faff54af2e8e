"""Pairs that produce a graph output: where they are inserted, what is renamed, and when they are offered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from random_models import random_inputs, ranges_for

from qdqspec.backends.onnxruntime import backend
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.read.diff import diff_models
from qdqspec.qdq.read.import_qdq import placement_for
from qdqspec.qdq.read.strip import strip_qdq
from qdqspec.qdq.scheme.scheme_file import apply_scheme, read_scheme, write_scheme
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Consumer, Placement, QuantizeRules, Site

OUTPUT = ("", 0)

CONVS = """g (float[1,4,6,6] x) => (float[1,4,6,6] y) {
    [a] t = Conv(x, w) [b] u = Relu(t) [c] v = Conv(u, w) [d] y = Relu(v) }"""


def model_of(text: str, opset: int = 18) -> Model:
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> {text}')
    if "w)" in text:
        weight = np.random.default_rng(0).normal(size=(4, 4, 1, 1)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return Model(proto)


def site(tensor: str, *ends: tuple[str, int], fmt: str = "uint8") -> Site:
    return Site(tensor=tensor, consumers=tuple(Consumer(*end) for end in ends), format=fmt)


def insert(model: Model, *sites: Site) -> Model:
    placement = Placement(sites=frozenset(sites))
    made = Model(insert_qdq(model, placement, Quantizer(model, ranges_for(model))).proto)
    onnx.checker.check_model(made.proto, full_check=True)
    return made


def lines(model: Model) -> list[str]:
    return [f"{', '.join(n.outputs)} = {n.op_type}({', '.join(n.inputs)})" for n in model.nodes]


def run(model: Model, **more: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.proto.SerializeToString())
    feeds = {name: value for name, value in random_inputs(model).items() if name not in more}
    return session.run(None, feeds | more)


def test_the_pair_produces_the_output_and_the_tensor_of_the_node_is_renamed() -> None:
    model = model_of(CONVS)
    made = insert(model, site("y", OUTPUT))
    assert lines(made)[3:] == [
        "y_float = Relu(v)",
        "y_quantized = QuantizeLinear(y_float, y_scale, y_zero_point)",
        "y = DequantizeLinear(y_quantized, y_scale, y_zero_point)",
    ]
    assert made.proto.graph.output == model.proto.graph.output
    steps = run(made)[0] / made.array("y_scale")
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)


def test_strip_keeps_an_output_type_that_value_info_repeats() -> None:
    model = model_of(CONVS)
    model.proto.graph.value_info.extend(model.proto.graph.output)
    assert strip_qdq(insert(model, site("y", OUTPUT))).proto == model.proto


@pytest.mark.parametrize(
    ("text", "wanted", "words"),
    [
        (CONVS, site("y", ("", 1)), "it is not graph output 1 of the model"),
        (CONVS, site("t", OUTPUT), "it is not graph output 0 of the model"),
        ("g (float[2] x) => (float[2] x, float[2] y) { y = Relu(x) }", site("x", OUTPUT), "no node computes"),
        (
            "g (float x) => (float y, float z) { y = Constant<value = float {1.0}>() z = Relu(x) }",
            site("y", OUTPUT),
            "no node computes",
        ),
    ],
    ids=["no such output", "inner tensor", "graph input", "constant"],
)
def test_invalid_output_sites_are_rejected(text: str, wanted: Site, words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        insert(model_of(text), wanted)


def test_two_pairs_for_one_output_are_rejected() -> None:
    with pytest.raises(PlacementError, match="two sites of the placement feed a graph output from tensor"):
        insert(model_of(CONVS), site("y", OUTPUT), site("y", OUTPUT, fmt="int8"))


def test_a_scheme_file_names_the_output(tmp_path: Path) -> None:
    model, placement = model_of(CONVS), Placement(sites=frozenset({site("y", OUTPUT)}))
    numbers = Quantizer(model, ranges_for(model))
    write_scheme(tmp_path / "scheme.json", placement, numbers.placed(placement), "onnxruntime")
    (record,) = json.loads((tmp_path / "scheme.json").read_text())["sites"]
    assert (record["tensor"], record["consumers"]) == ("y", [{"node": "", "input": 0}])
    assert read_scheme(tmp_path / "scheme.json").placement == placement
    applied = apply_scheme(model, tmp_path / "scheme.json").proto
    assert applied == insert_qdq(model, placement, numbers).proto


def test_a_scheme_applies_to_an_output_of_another_index_by_name(tmp_path: Path) -> None:
    model, other = model_of(CONVS), model_of(CONVS.replace(") => (", ") => (float[1,4,6,6] t, "))
    placement = Placement(sites=frozenset({site("y", ("", 1)), site("t", OUTPUT)}))
    write_scheme(tmp_path / "s.json", placement, Quantizer(other, ranges_for(other)).placed(placement), "any")
    applied = apply_scheme(model, tmp_path / "s.json")
    assert applied.notes == (
        "found by the nodes that read them, 1: 'y': this model names them otherwise",
        "left out 't': the model has no output of that name",
    )
    assert applied.proto == insert(model, site("y", OUTPUT)).proto


def test_import_finds_an_output_by_name_in_a_model_with_more_outputs() -> None:
    """Quantization tools can add or reorder outputs."""
    model, quantized = model_of(CONVS), insert(model_of(CONVS), site("y", OUTPUT))
    more = model_of(CONVS.replace(") => (", ") => (float[1,4,6,6] t, "))
    assert placement_for(more, quantized).placement.sites == {site("y", ("", 1))}
    without = model_of(CONVS.replace("[d] y = Relu(v)", "[d] n = Relu(v) y = Neg(n)").replace("y) {", "n) {"))
    assert "1: 'y': the model has no output of that name" in placement_for(without, quantized).notes
    assert not diff_models(model, quantized).added[0].before
    assert diff_models(model, quantized).added[0].readers == ("graph output 'y'",)


# ---- whether it is offered ----------------------------------------------------------------------


def space_of(model: Model, *, outputs: bool) -> SchemeSpace:
    rules = QuantizeRules(outputs=outputs)
    return SchemeSpace(model, backend().capabilities(), rules=rules, regions=find_regions(model))


def test_an_output_that_nodes_read_too_is_quantized_for_all_readers() -> None:
    model = model_of(
        """g (float[1,4,6,6] x) => (float[1,4,6,6] t, float[1,4,6,6] y) {
            [a] t = Conv(x, w) [b] u = Conv(t, w) [c] y = Softmax(u) }"""
    )
    space = space_of(model, outputs=True)
    assert space.by_id["a"].outputs == ("t",)
    (found,) = (s for s in space.resolve({"a": "in+out"}).sites if s.tensor == "t")
    assert found.consumers == (Consumer("", 0), Consumer("b", 0))
    (alone,) = (s for s in space.resolve({"b": "in+out"}).sites if s.tensor == "t")
    assert alone.consumers == (Consumer("b", 0),)
