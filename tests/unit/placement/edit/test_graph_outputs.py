"""Pairs that produce a graph output: where they are inserted, what is renamed, and when they are offered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx_text import outputs_of, parsed
from random_models import random_inputs, ranges_for

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.read.diff import diff_models
from qdqspec.qdq.read.import_qdq import placement_for
from qdqspec.qdq.read.strip import strip_qdq
from qdqspec.qdq.scheme.scheme_file import apply_scheme, write_scheme
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Consumer, Placement, QuantizeRules, Site

OUTPUT = ("", 0)

CONVS = """g (float[1,4,6,6] x) => (float[1,4,6,6] y) {
    [a] t = Conv(x, w) [b] u = Relu(t) [c] v = Conv(u, w) [d] y = Relu(v) }"""


def model_of(text: str = CONVS) -> Model:
    return parsed(text, 18, w=(4, 4, 1, 1))


def site(tensor: str, *ends: tuple[str, int], fmt: str = "uint8") -> Site:
    return Site(tensor=tensor, consumers=tuple(Consumer(*end) for end in ends), format=fmt)


def insert(model: Model, *sites: Site) -> Model:
    placement = Placement(sites=frozenset(sites))
    made = Model(insert_qdq(model, placement, Quantizer(model, ranges_for(model))).proto)
    onnx.checker.check_model(made.proto, full_check=True)
    return made


def test_the_pair_produces_the_output_and_the_tensor_of_the_node_is_renamed() -> None:
    model = model_of()
    made = insert(model, site("y", OUTPUT))
    assert [f"{n.outputs[0]} = {n.op_type}({n.inputs[0]})" for n in made.nodes][3:] == [
        "y_float = Relu(v)",
        "y_quantized = QuantizeLinear(y_float)",
        "y = DequantizeLinear(y_quantized)",
    ]
    assert made.proto.graph.output == model.proto.graph.output
    steps = outputs_of(made, random_inputs(model))[0] / made.array("y_scale")
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)


def test_strip_keeps_an_output_type_that_value_info_repeats() -> None:
    model = model_of()
    model.proto.graph.value_info.extend(model.proto.graph.output)
    assert strip_qdq(insert(model, site("y", OUTPUT))).proto == model.proto


def test_a_scheme_applies_to_an_output_of_another_index_by_name(tmp_path: Path) -> None:
    model, other = model_of(), model_of(CONVS.replace(") => (", ") => (float[1,4,6,6] t, "))
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
    model, quantized = model_of(), insert(model_of(), site("y", OUTPUT))
    more = model_of(CONVS.replace(") => (", ") => (float[1,4,6,6] t, "))
    assert placement_for(more, quantized).placement.sites == {site("y", ("", 1))}
    without = model_of(CONVS.replace("[d] y = Relu(v)", "[d] n = Relu(v) y = Neg(n)").replace("y) {", "n) {"))
    assert "1: 'y': the model has no output of that name" in placement_for(without, quantized).notes
    assert not diff_models(model, quantized).added[0].before
    assert diff_models(model, quantized).added[0].readers == ("graph output 'y'",)


def test_an_output_that_nodes_read_too_is_quantized_for_all_readers() -> None:
    model = model_of(
        """g (float[1,4,6,6] x) => (float[1,4,6,6] t, float[1,4,6,6] y) {
            [a] t = Conv(x, w) [b] u = Conv(t, w) [c] y = Softmax(u) }"""
    )
    space = SchemeSpace(model, backend().capabilities(), rules=QuantizeRules(outputs=True))
    assert space.by_id["a"].outputs == ("t",)
    for labels, ends in (({"a": "in+out"}, [("", 0), ("b", 0)]), ({"b": "in+out"}, [("b", 0)])):
        (found,) = (s for s in space.resolve(labels).sites if s.tensor == "t")
        assert found.consumers == tuple(Consumer(*end) for end in ends)
