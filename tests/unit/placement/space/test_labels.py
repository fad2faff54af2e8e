"""Labels that quantize half of a unit, and units whose weight the runtime quantizes itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from random_models import ranges_for

from qdqspec._core.codec import from_data, to_data
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import HALVES, Label, Placement, QuantizeRules


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


@pytest.mark.parametrize("half", HALVES)
def test_a_model_with_a_half_label_runs_with_a_small_error(models: Path, half: str) -> None:
    model = load_model(models / "digits_resnet.onnx")
    space = SchemeSpace(model, OnnxRuntime().capabilities())
    placement = space.resolve({unit.id: half for unit in space.units if half in unit.halves})
    assert from_data(Placement, to_data(placement)) == placement
    numbers = Quantizer(model, ranges_for(model), biases=space.bias_sources)
    proto = insert_qdq(model, placement, numbers).proto
    onnx.checker.check_model(proto, full_check=True)
    feeds = {"input": np.random.default_rng(0).uniform(0, 1, (1, 1, 16, 16)).astype(np.float32)}
    reference, halved = (outputs_of(each, feeds, "ENABLE_ALL")[0] for each in (model, proto))
    assert 0 < np.abs(halved - reference).max() < 0.5 * np.abs(reference).max()


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


def test_activations_alone_are_completed_and_weights_alone_are_not() -> None:
    space = space_around("c = Relu (b)")
    full = space.resolve({"middle": "in+out"})
    assert space.resolve({"middle": "activation-only"}) == full
    assert all(site.weight for site in space.resolve({"middle": "weight-only"}).sites)


@pytest.mark.parametrize("kept", ["first", "last", "result"])
def test_a_convolution_with_float_on_one_side_stays_float(kept: str) -> None:
    read_in_float = ("c = Relu (b)  s = Sin (c)", "float[1,4,6,6] z, float[1,4,6,6] s")
    space = space_around(*(read_in_float if kept == "result" else ("c = Relu (b)",)))
    placement = space.resolve({name: label for name, label in AROUND.items() if name != kept})
    assert "middle" not in dict(placement.labels)
    assert "w1" not in {site.tensor for site in placement.sites}


def test_a_denied_convolution_and_the_one_before_it_stay_float() -> None:
    """The one before it could only output integers, which it would read."""
    others = {node.name for node in chain("c = Relu (b)").nodes} - {"middle"}
    space = space_around("c = Relu (b)", allowed=others, denied={"middle"})
    assert space.by_id.keys() == {"last"}
    assert {site.tensor for site in space.resolve({"last": "in+out"}).sites if site.weight} == {"w2"}


def test_no_pair_is_moved_to_a_convolution_that_is_not_allowed() -> None:
    parts = (f"c = {POOL} (b)", "float[1,4,6,6] z", f"p = {POOL} (a)")
    model = chain(*parts)
    space = space_around(*parts, allowed={node.name for node in model.nodes} - {"middle"})
    placement = space.resolve(space.everything())
    quantized = {end.node for site in placement.sites for end in site.consumers}
    before = {node.name for node in model.nodes if "p" in node.outputs}
    assert "last" in quantized
    assert quantized.isdisjoint({"middle", *before})


def test_a_convolution_before_one_that_is_not_allowed_is_quantized_if_the_next_is_not() -> None:
    """No pair follows the one that is not allowed, so that ONNX Runtime leaves its weight."""
    space = space_around("c = Relu (b)", allowed={"first"})
    assert {site.tensor for site in space.resolve({"first": "in+out"}).sites} == {"x", "w0", "a"}


def test_runtimes_that_quantize_no_weight_leave_it_float() -> None:
    model, can = chain("c = Relu (b)"), FakeDevice().capabilities()
    assert dict(SchemeSpace(model, can).resolve(AROUND).labels) == AROUND
