"""Labels of several formats, of half of a unit, and of units whose weight the runtime quantizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from qdqspec.backends.base import Capabilities
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.backends.tensorrt.ops import capabilities as tensorrt_capabilities
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.search_space import SchemeSpace, labels_of
from qdqspec.search.journal import trial_from_json, trial_to_json
from qdqspec.types import HALVES, Label, Placement, QuantizeRules, Site, Trial


def test_the_sites_of_both_halves_are_those_of_the_full_label(models: Path) -> None:
    space = SchemeSpace(load_model(models / "digits_resnet.onnx"), FakeDevice().capabilities())
    for unit in (unit for unit in space.units if unit.op_type == "Conv"):
        weights, activations = (space.resolve({unit.id: half}) for half in unit.halves)
        assert weights.sites
        assert all(site.weight for site in weights.sites)
        assert activations.sites
        assert not any(site.weight for site in activations.sites)
        assert weights.sites | activations.sites == space.resolve({unit.id: "in+out"}).sites


def products(formats: str) -> SchemeSpace:
    """Two consecutive products, on a device where both can output floats."""
    text = "net (float[8,64] x) => (float[8,64] z) { [maker] y = MatMul(x, w0)  [reader] z = MatMul(y, w1) }"
    model = parsed(text, 19, w0=(64, 64), w1=(64, 64))
    return SchemeSpace(model, FakeDevice().capabilities(), rules=QuantizeRules(format=formats))


def test_a_weight_only_format_has_no_half_labels() -> None:
    space = products("int8+int4")
    assert all("int4:in-only" in unit.labels for unit in space.units)
    assert {half for unit in space.units for half in unit.halves} == set(HALVES)


def test_a_weight_only_unit_reads_float_activations() -> None:
    space = products("int8")
    both = space.resolve({"maker": "in+out", "reader": "weight-only"})
    assert both.sites == space.resolve({"maker": "in-only", "reader": "weight-only"}).sites
    assert {site.tensor for site in both.sites} == {"x", "w0", "w1"}


AROUND: dict[str, Label] = {"first": "in+out", "last": "in+out"}
POOL = "MaxPool <kernel_shape: ints = [1, 1]>"
TURN = "Transpose <perm: ints = [0, 1, 3, 2]>"


def chain(between: str, outputs: str = "float[1,4,6,6] z", before: str = "") -> Model:
    """Three convolutions, and other nodes between the second and the third, and between the first two."""
    model = parsed(
        f"""net (float[1,4,6,6] x) => ({outputs}) {{
            [first] a = Conv (x, w0)  {before}
            [middle] b = Conv ({"p" if before else "a"}, w1)  {between}
            [last] z = Conv (c, w2)
        }}""",
        w0=(4, 4, 1, 1), w1=(4, 4, 1, 1), w2=(4, 4, 1, 1),
    )  # fmt: skip
    return Model(onnx.shape_inference.infer_shapes(model.proto))


def space_around(*parts: str, **more: set[str]) -> SchemeSpace:
    return SchemeSpace(chain(*parts), OnnxRuntime().capabilities(), **more)


@pytest.mark.parametrize(
    ("before", "between", "completed"),
    [
        ("", "c = Identity (b)", True),
        ("", "c = Clip (b)", True),
        ("", f"r = Relu (b)  c = {POOL} (r)", True),
        (f"p = {POOL} (a)", f"c = {POOL} (b)", True),
        (f"o = {TURN} (a)  p = {TURN} (o)", f"c = {TURN} (b)", True),
        ("", "c = Sin (b)", False),
        ("", "c = DepthToSpace <blocksize: int = 1> (b)", False),
    ],
)
def test_a_float_convolution_between_quantized_ones_is_quantized_like_them(
    before: str, between: str, completed: bool
) -> None:
    """Pairs are moved past operators that move values, and past no others."""
    space = space_around(between, "float[1,4,6,6] z", before)
    placement = space.resolve(AROUND)
    assert dict(placement.labels) == (AROUND | {"middle": "in+out"} if completed else AROUND)
    assert space.resolve(dict(placement.labels)) == placement
    assert ("w1" in {site.tensor for site in placement.sites}) is completed


@pytest.mark.parametrize("kept", ["first", "last", "result"])
def test_a_convolution_with_float_on_one_side_stays_float(kept: str) -> None:
    read_in_float = ("c = Relu (b)  s = Sin (c)", "float[1,4,6,6] z, float[1,4,6,6] s")
    space = space_around(*(read_in_float if kept == "result" else ("c = Relu (b)",)))
    placement = space.resolve({name: label for name, label in AROUND.items() if name != kept})
    assert "middle" not in dict(placement.labels)
    assert "w1" not in {site.tensor for site in placement.sites}


def test_a_denied_convolution_and_the_one_before_it_stay_float() -> None:
    """The one before it could only output integers, which it would read where a pair follows it."""
    others = {node.name for node in chain("c = Relu (b)").nodes} - {"middle"}
    space = space_around("c = Relu (b)", allowed=others, denied={"middle"})
    assert space.by_id.keys() == {"last"}
    assert {site.tensor for site in space.resolve({"last": "in+out"}).sites if site.weight} == {"w2"}
    space = space_around("c = Relu (b)", allowed={"first"})
    assert {site.tensor for site in space.resolve({"first": "in+out"}).sites} == {"x", "w0", "a"}


def test_no_pair_is_moved_to_a_convolution_that_is_not_allowed() -> None:
    parts = (f"c = {POOL} (b)", "float[1,4,6,6] z", f"p = {POOL} (a)")
    model = chain(*parts)
    space = space_around(*parts, allowed={node.name for node in model.nodes} - {"middle"})
    placement = space.resolve(space.everything())
    quantized = {end.node for site in placement.sites for end in site.consumers}
    before = {node.name for node in model.nodes if "p" in node.outputs}
    assert "last" in quantized
    assert quantized.isdisjoint({"middle", *before})


def test_runtimes_that_quantize_no_weight_leave_it_float() -> None:
    model, can = chain("c = Relu (b)"), FakeDevice().capabilities()
    assert dict(SchemeSpace(model, can).resolve(AROUND).labels) == AROUND


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
        assert space.project(placement) == (placement, ())
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
    assert space.project(placement) == (placement, ())


def test_a_placement_of_one_format_is_projected_to_a_space_of_several() -> None:
    alone, several = space_of("fp8"), space_of("int8+fp8")
    start, _ = several.project(alone.resolve(alone.everything()))
    assert start == several.resolve(several.everything("fp8"))
    other = Site(tensor="w0", consumers=(("m0", 1),), format="uint4", axis=0, weight=True)
    assert labels_of(space_of("int8+int4"), Placement(sites=frozenset({other}))) == {"m0": "int4:in-only"}


def test_an_unknown_label_of_a_journal_is_an_error() -> None:
    placement = space_of("int8+fp8").resolve({"m0": "in+out", "m1": "fp8:in+out"})
    line = trial_to_json(Trial(number=1, phase="pure", placement=placement))
    line["scheme"]["labels"] = [["m0", "fp8:both"]]
    with pytest.raises(ValueError, match="unknown label 'fp8:both'"):
        trial_from_json(line)
