"""A search space of several formats: the labels of each unit, the resolved placement, and the labels of a placement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx_text import parsed

from qdqspec.backends.base import Capabilities
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.backends.tensorrt.ops import capabilities as tensorrt_capabilities
from qdqspec.graph.model import Model
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.scheme.cache import gather, warm_starts
from qdqspec.qdq.space.search_space import SchemeSpace, labels_of, project
from qdqspec.search.journal import trial_from_json, trial_to_json
from qdqspec.types import Placement, QuantizeRules, Site, Trial


def net() -> Model:
    """Three products and a residual: ``b`` is read by a MatMul and an Add."""
    text = """net (float[8,64] x) => (float[8,64] y) {
      [m0] a = MatMul(x, w0)  [relu] b = Relu(a)  [m1] c = MatMul(b, w1)  [add] d = Add(b, c)
      [m2] y = MatMul(d, w2) }"""
    return parsed(text, 19, ir=9, w0=(64, 64), w1=(64, 64), w2=(64, 64))


def space_of(formats: str, capabilities: Capabilities | None = None) -> SchemeSpace:
    capabilities = capabilities or FakeDevice().capabilities()
    return SchemeSpace(net(), capabilities, rules=QuantizeRules(format=formats))


def sites(placement: Placement, tensor: str) -> dict[str, set[str]]:
    """The nodes that read the quantized tensor, by format."""
    return {s.format: {end.node for end in s.consumers} for s in placement.sites if s.tensor == tensor}


def test_units_have_labels_of_each_format_they_support() -> None:
    offered = {unit.id: unit.labels for unit in space_of("int8+fp8+int4").units}
    product = ("fp", "in+out", "in-only", "fp8:in+out", "fp8:in-only", "int4:in-only")
    last = ("fp", "in-only", "fp8:in-only", "int4:in-only")  # it produces the graph output
    assert offered == {"m0": product, "m1": product, "add": ("fp", "in+out", "fp8:in+out"), "m2": last}


def test_a_format_can_be_limited_to_some_operators() -> None:
    capabilities = Capabilities(
        formats=("int8", "fp8"),
        labels={"MatMul": ("in+out", "in-only"), "Add": ("in+out",)},
        labels_of={"fp8": {"MatMul": ("in-only",)}},
        activations={"int8": "int8", "fp8": "fp8"},
        weights={"int8": "int8", "fp8": "fp8"},
    )
    offered = {unit.id: unit.labels for unit in space_of("int8+fp8", capabilities).units}
    assert offered["add"] == ("fp", "in+out")
    assert offered["m1"] == ("fp", "in+out", "in-only", "fp8:in-only")
    assert {u.id: u.labels for u in space_of("fp8+int8", capabilities).units}["add"] == ("fp", "int8:in+out")


def test_choices_are_the_supported_formats_of_different_storage() -> None:
    space = space_of("int8+uint8+int4", OnnxRuntime().capabilities())
    assert [choice.format for choice in space.choices] == ["int8", "int4"]
    assert [choice.format for choice in space_of("int16+fp8+int8").choices] == ["fp8", "int8"]


def test_an_int32_bias_prevents_labels_of_a_second_format() -> None:
    """The scale of a bias is the product of input scale and weight scale, which differs between formats."""
    model = parsed("g (float[2,8] x) => (float[2,8] y) { y = Gemm(x, w, b) }", w=(8, 8), b=(8,))
    capabilities = Capabilities(
        formats=("int8", "int16"),
        labels={"Gemm": ("in-only",)},
        activations={"int8": "uint8", "int16": "uint16"},
        weights={"int8": "int8", "int16": "int16"},
        integer_bias=frozenset({"Gemm"}),
    )
    rules = QuantizeRules(format="int8+int16")
    (unit,) = SchemeSpace(model, capabilities, rules=rules).units
    assert unit.labels == ("fp", "in-only")


def test_weight_only_formats_need_no_calibration() -> None:
    space = space_of("int8+int4").known(())
    assert {unit.id: unit.labels for unit in space.units} == dict.fromkeys(
        ("m0", "m1", "m2"), ("fp", "int4:in-only")
    )
    assert space.tensors == frozenset()


def test_a_weight_only_unit_reads_integers_of_an_operator_without_float_output() -> None:
    placement = space_of("int8+int4").resolve({"add": "in+out", "m2": "int4:in-only"})
    assert sites(placement, "d") == {"uint8": {"m2"}}  # an integer Add has an integer output


def attended() -> SchemeSpace:
    """A sum that a product reads through a Transpose and a Reshape, and another product directly."""
    model = parsed(
        """net (float[8,64] x, float[8,64] v) => (float[4,128] y, float[8,64] z) {
          [m] a = MatMul(x, w0)  [add] b = Add(a, v)  [t] c = Transpose(b)  [m2] e = MatMul(b, w0)  [n] z = Relu(e)
          [k] k = Constant<value_ints = [4, 128]>()  [r] d = Reshape(c, k)  [m1] y = MatMul(d, w1) }""",
        19, w0=(64, 64), w1=(128, 128),
    )  # fmt: skip
    return SchemeSpace(
        model, tensorrt_capabilities((10, 0), (11, 4)), rules=QuantizeRules(format="int8+int4")
    )


def test_no_pair_reaches_a_weight_only_unit_of_tensorrt() -> None:
    """It has no kernel for data in 8 bits, and pairs move past operators that move values."""
    space = attended()
    full = space.resolve(space.everything())
    assert sites(full, "b") == {"int8": {"t", "m2"}}
    assert sites(full, "d") == {"int8": {"m1"}}
    for name in ("m1", "m2"):
        placement = space.resolve(space.everything() | {name: "int4:in-only"})
        assert sites(placement, "d") == ({} if name == "m1" else {"int8": {"m1"}})
        assert sites(placement, "b") == ({"int8": {"m2"}} if name == "m1" else {"int8": {"t"}})
        assert project(space, placement) == placement
        kept = dict(placement.labels)
        assert ("r" in kept, "t" in kept) == ((False, False) if name == "m1" else (True, True))


def product() -> SchemeSpace:
    """A product of two products, one of them transposed, in two formats."""
    model = parsed(
        """net (float[8,64] x) => (float[8,8] y, float[8,64] z) { [q] a = MatMul(x, w0)  [k] b = MatMul(x, w1)
          [t] c = Transpose(b)  [p] y = MatMul(a, c)  [m] d = MatMul(b, w1)  [n] z = Relu(d) }""",
        19, w0=(64, 64), w1=(64, 64),
    )  # fmt: skip
    can = replace(tensorrt_capabilities((10, 0), (11, 4)), rules={})
    return SchemeSpace(model, can, rules=QuantizeRules(format="int8+fp8"))


def test_a_float_product_of_tensorrt_reads_no_pairs_where_they_may_be_of_two_formats() -> None:
    """Its kernel would compute from both operands as they are, and refuses int8 and fp8."""
    space, labels = product(), {"q": "in+out", "k": "fp8:in+out", "t": "fp8:in+out", "m": "fp8:in-only"}
    placement = space.resolve(labels)
    assert not sites(placement, "a") | sites(placement, "c")
    assert sites(placement, "b") == {"fp8": {"m"}}
    assert "t" not in dict(placement.labels)
    quantized = space.resolve(labels | {"p": "in-only"})
    assert sites(quantized, "a") == sites(quantized, "c") == {"int8": {"p"}}


def test_each_reader_of_a_tensor_reads_its_own_format() -> None:
    placement = space_of("int8+fp8").resolve({"m0": "in+out", "m1": "fp8:in+out", "add": "in+out"})
    assert sites(placement, "b") == {"uint8": {"add"}, "fp8": {"m1"}}
    assert sites(placement, "c") == {"uint8": {"add"}}  # the producer is fp8, the reader int8
    uniform = space_of("int8+fp8").resolve({"m0": "in+out", "m1": "fp8:in-only", "add": "fp8:in+out"})
    assert sites(uniform, "b") == {"fp8": {"m1", "add"}}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "space", [space_of("int8+fp8+int4"), attended(), product()], ids=["fake", "weights", "products"]
)
def test_the_labels_of_a_resolved_placement_reproduce_it(space: SchemeSpace, seed: int) -> None:
    random = np.random.default_rng(seed)
    placement = space.resolve({unit.id: str(random.choice(unit.labels)) for unit in space.units})
    assert project(space, placement) == placement


def test_a_placement_of_one_format_is_projected_to_a_space_of_several() -> None:
    alone, several = space_of("fp8"), space_of("int8+fp8")
    start = project(several, alone.resolve(alone.everything()))
    assert start == several.resolve(several.everything("fp8"))
    other = Site(tensor="w0", consumers=(("m0", 1),), format="uint4", axis=0, weight=True)
    assert labels_of(space_of("int8+int4"), Placement(sites=frozenset({other}))) == {"m0": "int4:in-only"}


def test_a_pattern_cache_stores_the_format_of_each_site() -> None:
    space = space_of("int8+fp8+int4")
    space.regions = find_regions(space.model)
    mixed = space.resolve({"m0": "in+out", "add": "in+out", "m1": "fp8:in+out", "m2": "int4:in-only"})
    trial = Trial(number=1, phase="compose", placement=mixed, ratio=0.5)
    cache = gather([trial], space, "fake", "here")
    assert mixed in warm_starts(cache, space.regions, space, "fake", "here")


def test_an_unknown_label_of_a_journal_is_an_error() -> None:
    placement = space_of("int8+fp8").resolve({"m0": "in+out", "m1": "fp8:in+out"})
    line = trial_to_json(Trial(number=1, phase="pure", placement=placement))
    line["scheme"]["labels"] = [["m0", "fp8:both"]]
    with pytest.raises(ValueError, match="unknown label 'fp8:both'"):
        trial_from_json(line)
