"""Positions and names of inserted pairs, in bodies and before graph outputs too, and rejected sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_text import outputs_of, parsed
from random_models import random_inputs, ranges_for

from qdqspec.backends.onnxruntime import backend
from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import Inserter, insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Consumer, Placement, QuantizeRules, Site

NET = """g (float[1,2,4,4] x) => (float[1,2,4,4] y) {
    [c] h = Conv<kernel_shape = [1, 1]>(x, w)  [r] t = Relu(h)  [a] y = Add(t, t) }"""
KERNEL = np.array([1.0, -2.0, 0.5, 4.0], np.float32).reshape(2, 2, 1, 1)


def net(text: str = NET, opset: int = 17, **constants: np.ndarray) -> Model:
    return parsed(text, opset, w=KERNEL, **constants)


def inserted(model: Model, *sites: Site) -> Model:
    numbers = Quantizer(model, ranges_for(model))
    made = insert_qdq(model, Placement(sites=frozenset(sites)), numbers).proto
    onnx.checker.check_model(made, full_check=True)
    return Model(made)


def site(
    tensor: str, *ends: tuple[str, int], fmt: str = "uint8", axis: int | None = None, weight: bool = False
) -> Site:
    return Site(
        tensor=tensor, consumers=tuple(Consumer(*e) for e in ends), format=fmt, axis=axis, weight=weight
    )


WEIGHT = site("w", ("c", 1), fmt="int8", axis=0, weight=True)


def order(model: Model) -> list[str]:
    return [node.name for node in model.nodes]


def test_a_stored_weight_takes_the_name_and_place_of_the_float_one() -> None:
    model = net(after=np.zeros(3, np.float32))
    model.proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 2, 1, 1]))
    made = inserted(Model(model.proto), WEIGHT)
    assert order(made) == ["w_DequantizeLinear", "c", "r", "a"]
    assert made.by_name["c"].inputs == ("x", "w")
    assert list(made.initializers) == ["w_quantized", "after", "w_scale", "w_zero_point"]
    assert made.constants["w_quantized"].data_type == TensorProto.INT8
    np.testing.assert_array_equal(made.array("w_quantized").ravel(), [64, -127, 16, 127])
    assert [i.name for i in made.proto.graph.input] == ["x"]


INPUT = "g (float[2] x) => (float[2] x, float[2] y) { y = Relu(x) }"
CONSTANT = "g (float x) => (float y, float z) { y = Constant<value = float {1.0}>() z = Relu(x) }"
INTEGERS = "g (float[4] x) => (int64[1] y) { [s] t = Shape(x)  [n] y = Neg(t) }"
MISFITS: dict[str, tuple[str, str, *tuple[Site, ...]]] = {
    "unknown tensor": (NET, "tensor 'nobody' cannot be quantized: no node", site("nobody", ("c", 0))),
    "unknown node": (NET, "node 'nobody' does not read it at input 0", site("t", ("nobody", 0))),
    "another input": (NET, "node 'c' does not read it at input 0", site("t", ("c", 0))),
    "no consumer": (NET, "names no consumer", site("t")),
    "bias format": (NET, "int32 is for constants", site("t", ("a", 0), fmt="int32")),
    "no weight": (NET, "is no constant", site("t", ("a", 0), weight=True)),
    "run time": (NET, "for activations only", site("w", ("c", 1), fmt="uint8_dynamic", weight=True)),
    "integers": (INTEGERS, "the model: tensor 't' .* INT64, not FLOAT", site("t", ("n", 0))),
    "no such output": (NET, "it is not graph output 1 of the model", site("y", ("", 1))),
    "no output": (NET, "it is not graph output 0 of the model", site("t", ("", 0))),
    "graph input": (INPUT, "no node computes", site("x", ("", 0))),
    "constant": (CONSTANT, "no node computes", site("y", ("", 0))),
    "input twice": (
        NET, "two sites .* input 0 of node 'a'", site("t", ("a", 0)), site("t", ("a", 0), ("a", 1)),
    ),
    "output twice": (
        NET, "two sites .* feed a graph output", site("y", ("", 0)), site("y", ("", 0), fmt="int8"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_sites_that_do_not_fit_the_model_are_rejected(name: str) -> None:
    text, message, *sites = MISFITS[name]
    model = net() if text == NET else parsed(text)
    with pytest.raises(PlacementError, match=message):
        inserted(model, *sites)


def test_the_opset_is_raised_to_13_with_a_note() -> None:
    model = net("g (float[1,2,4,4] x) => (float[1,2,4,4] y) { [c] y = Conv(x, w) }", opset=11)
    inserter = Inserter(model, Quantizer(model, ranges_for(model)))
    for where in (site("x", ("c", 0)), WEIGHT):
        made = inserter.insert(Placement(sites=frozenset({where})))
        assert Model(made.proto).opset == 13
        assert made.notes == (
            "raised to opset 13, which its number formats need (was opset 11, IR version 8)",
        )
        onnx.checker.check_model(made.proto, full_check=True)


def test_float16_tensors_have_float16_scales_and_opset_19() -> None:
    model = parsed("g (float16[4] x) => (float16[4] y) { [r] t = Relu(x)  [n] y = Neg(t) }")
    numbers = Quantizer(model, {"t": TensorRange(-1.0, 2.0)})
    made = Model(insert_qdq(model, Placement(sites=frozenset({site("t", ("n", 0))})), numbers).proto)
    onnx.checker.check_model(made.proto, full_check=True)
    assert (made.array("t_scale").dtype, made.opset) == (np.float16, 19)


@pytest.mark.parametrize("shape", ["", "[2,3]"])
def test_a_constant_without_dimensions_is_not_stored_as_an_integer(shape: str) -> None:
    """TensorRT's compiler refuses stored integers of rank 0; of rank 1 they would raise that of a scalar result."""
    model = parsed(f"g (float{shape} x) => (float{shape} y) <float w = {{0.7}}> {{ [m] y = Mul(x, w) }}")
    scalar = site("w", ("m", 1), fmt="int8", weight=True)
    made = inserted(model, scalar)
    assert order(made) == ["w_QuantizeLinear", "w_DequantizeLinear", "m"]
    assert made.array("w") == np.float32(0.7)
    numbers = Quantizer(model, {})
    value = numbers.integer_weight(scalar) * numbers.params(scalar).scale.astype(np.float32)
    x = np.full([2, 3] if shape else [], 0.3, np.float32)
    np.testing.assert_array_equal(outputs_of(made, {"x": x})[0], x * value, strict=True)


def test_a_constant_that_a_concat_reads_is_not_stored_as_an_integer() -> None:
    """TensorRT's compiler refuses some of them; the class token of a vision transformer is one."""
    model = parsed("g (float[2] x) => (float[4] y) <float[2] w = {1, 2}> { [j] y = Concat<axis = 0>(w, x) }")
    made = inserted(model, site("w", ("j", 0), fmt="int8", weight=True))
    assert order(made) == ["w_QuantizeLinear", "w_DequantizeLinear", "j"]


OUTPUT = ("", 0)
CONVS = """g (float[1,4,6,6] x) => (float[1,4,6,6] y) {
    [a] t = Conv(x, w) [b] u = Relu(t) [c] v = Conv(u, w) [d] y = Relu(v) }"""


def conv_model(text: str = CONVS) -> Model:
    return parsed(text, 18, w=(4, 4, 1, 1))


def test_the_pair_produces_the_output_and_the_tensor_of_the_node_is_renamed() -> None:
    model = conv_model()
    made = inserted(model, site("y", OUTPUT))
    assert [f"{n.outputs[0]} = {n.op_type}({n.inputs[0]})" for n in made.nodes][3:] == [
        "y_float = Relu(v)",
        "y_quantized = QuantizeLinear(y_float)",
        "y = DequantizeLinear(y_quantized)",
    ]
    assert made.proto.graph.output == model.proto.graph.output
    steps = outputs_of(made, random_inputs(model))[0] / made.array("y_scale")
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)


def test_a_pair_reads_the_renamed_tensor_of_an_output_whatever_was_made_before() -> None:
    """Of two candidates with the same pair, only the second one has a pair for the output."""
    model = conv_model(CONVS.replace(") => (", ") => (float[1,4,6,6] t, "))
    reader, output = site("t", ("b", 0)), site("t", OUTPUT, fmt="int8")
    inserter = Inserter(model, Quantizer(model, ranges_for(model)))
    inserter.insert(Placement(sites=frozenset({reader})))
    both = inserter.insert(Placement(sites=frozenset({reader, output})))
    assert both.proto == inserted(model, reader, output).proto


def test_strip_keeps_an_output_type_that_value_info_repeats() -> None:
    model = conv_model()
    model.proto.graph.value_info.extend(model.proto.graph.output)
    assert strip_qdq(inserted(model, site("y", OUTPUT))).proto == model.proto


def test_a_scheme_applies_to_an_output_of_another_index_by_name(tmp_path: Path) -> None:
    model, other = conv_model(), conv_model(CONVS.replace(") => (", ") => (float[1,4,6,6] t, "))
    placement = Placement(sites=frozenset({site("y", ("", 1)), site("t", OUTPUT)}))
    pairs = Quantizer(other, ranges_for(other)).placed(placement)
    SchemeFile(backend="any", pairs=pairs).write(tmp_path / "s.json")
    applied = SchemeFile.read(tmp_path / "s.json").apply(model)
    assert applied.notes == (
        "found by the nodes that read them, 1: 'y': this model names them otherwise",
        "left out 't': the model has no output of that name",
    )
    assert applied.proto == inserted(model, site("y", OUTPUT)).proto


def test_import_finds_an_output_by_name_in_a_model_with_more_outputs() -> None:
    """Quantization tools can add or reorder outputs."""
    model, quantized = conv_model(), inserted(conv_model(), site("y", OUTPUT))
    more = conv_model(CONVS.replace(") => (", ") => (float[1,4,6,6] t, "))
    assert import_placement(quantized, more).placement_for(more)[0].sites == {site("y", ("", 1))}
    without = conv_model(
        CONVS.replace("[d] y = Relu(v)", "[d] n = Relu(v) y = Neg(n)").replace("y) {", "n) {")
    )
    _, notes = import_placement(quantized, without).placement_for(without)
    assert "1: 'y': the model has no output of that name" in notes
    assert not diff_models(model, quantized).added[0].before
    assert diff_models(model, quantized).added[0].readers == ("graph output 'y'",)


def test_an_output_that_nodes_read_too_is_quantized_for_all_readers() -> None:
    model = conv_model(
        """g (float[1,4,6,6] x) => (float[1,4,6,6] t, float[1,4,6,6] y) {
            [a] t = Conv(x, w) [b] u = Conv(t, w) [c] y = Softmax(u) }"""
    )
    space = SchemeSpace(model, backend().capabilities(), rules=QuantizeRules(outputs=True))
    assert space.by_id["a"].outputs == ("t",)
    for labels, ends in (({"a": "in+out"}, [("", 0), ("b", 0)]), ({"b": "in+out"}, [("b", 0)])):
        (found,) = (s for s in space.resolve(labels).sites if s.tensor == "t")
        assert found.consumers == tuple(Consumer(*end) for end in ends)


# Softmax over several axes is defined differently from opset 13 on: it becomes Shape, Flatten, Softmax and
# Reshape. Scales per channel need opset 13.
TEXT = """g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) {{
    [conv] h = Conv <kernel_shape = [1, 1]> (x, w)
    [soft] s = Softmax <axis = 1> (h)
    {more}
    [add] y = Add (s, h)
}}"""
CONV_WEIGHT = Site(tensor="w", consumers=(Consumer("conv", 1),), format="int8", axis=0, weight=True)


def model_with(more: str = "") -> Model:
    return parsed(TEXT.format(more=more), 11, ir=6, w=KERNEL)


def with_pair(model: Model, *ends: tuple[str, int]) -> onnx.ModelProto:
    pair = Site(tensor="h", consumers=tuple(Consumer(*end) for end in ends), format="uint8")
    sites = frozenset({CONV_WEIGHT, pair})
    return insert_qdq(model, Placement(sites=sites), Quantizer(model, ranges_for(model))).proto


def readers(proto: onnx.ModelProto, tensor: str) -> list[str]:
    return sorted(node.op_type for node in proto.graph.node for name in node.input if name == tensor)


def run(proto: onnx.ModelProto, model: Model) -> np.ndarray:
    small = {name: value / 8 for name, value in random_inputs(model).items()}  # within the ranges
    return outputs_of(proto, small, "ENABLE_ALL")[0]


@pytest.mark.parametrize("ends", [[("soft", 0)], [("soft", 0), ("add", 1)]])
def test_replacements_of_a_node_read_the_quantized_tensor(ends: list[tuple[str, int]]) -> None:
    model = model_with()
    proto = with_pair(model, *ends)
    onnx.checker.check_model(proto, full_check=True)
    (pair,) = (node for node in proto.graph.node if node.op_type == "DequantizeLinear" and "h" in node.name)
    assert readers(proto, pair.output[0])[-2:] == ["Flatten", "Shape"]
    assert ("Add" in readers(proto, "h")) == (("add", 1) not in ends)
    np.testing.assert_allclose(run(proto, model), run(model.proto, model), atol=0.03)
    left = Model(strip_qdq(Model(proto)).proto)
    assert not {node.op_type for node in left.nodes} & {"QuantizeLinear", "DequantizeLinear"}


def test_an_ambiguous_replacement_of_a_node_is_an_error() -> None:
    model = model_with("[other] unused = Softmax <axis = 2> (h)")
    with pytest.raises(PlacementError, match="raising the opset changed node 'soft'"):
        with_pair(model, ("soft", 0))
    both = with_pair(model, ("soft", 0), ("other", 0))
    onnx.checker.check_model(both, full_check=True)


@pytest.mark.parametrize("opset", range(7, 13))
def test_models_of_older_opsets_run_with_per_tensor_scales(opset: int) -> None:
    """ONNX Runtime itself quantizes a float bias, with operators that opset 10 does not have."""
    text = """g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) {
        [conv] h = Conv <kernel_shape = [1, 1]> (x, w, b)
        [pool] p = MaxPool <kernel_shape = [1, 1]> (h)
        [sum] y = Add (p, x)
    }"""
    model = parsed(text, opset, ir=6, w=KERNEL, b=np.array([0.5, -0.25], np.float32))
    ends = {"x": ("conv", 0), "w": ("conv", 1), "h": ("pool", 0), "p": ("sum", 0)}
    sites = frozenset(
        Site(tensor=tensor, consumers=(Consumer(*end),), format="uint8" if tensor != "w" else "int8")
        for tensor, end in ends.items()
    )
    quantized = insert_qdq(model, Placement(sites=sites), Quantizer(model, ranges_for(model))).proto
    np.testing.assert_allclose(run(quantized, model), run(model.proto, model), atol=0.1)


SHARED = """g (float[1,8,8,8] x, bool c) => (float[1,8,8,8] y) {
    h = Relu(x)
    [choice] y = If(c) <
        then_branch = t () => (float[1,8,8,8] p) { [conv] q = Conv<pads=[1,1,1,1]>(h, w) p = Sigmoid(q) },
        else_branch = e () => (float[1,8,8,8] p) { [conv] q = Conv<pads=[1,1,1,1]>(h, w) p = Neg(q) }
    >
}"""


def test_the_search_space_offers_tensors_in_bodies_that_one_graph_reads() -> None:
    model = parsed(SHARED, w=(8, 8, 3, 3))
    space = SchemeSpace(model, backend().capabilities())
    assert {"choice/then_branch/conv", "choice/else_branch/conv"} <= space.by_id.keys()
    placement = space.resolve(space.everything())
    for site in (site for site in placement.ordered if not site.weight):
        assert len({model.by_name[end.node].scope for end in site.consumers}) == 1
    assert strip_qdq(inserted(model, *placement.ordered), model).proto == model.proto


def test_a_constant_node_that_two_bodies_read_is_stored_once() -> None:
    proto = parsed(SHARED, w=(8, 8, 3, 3)).proto
    weight = proto.graph.initializer.pop()
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["w"], "const", value=weight))
    model = Model(proto)
    ends = [(f"choice/{branch}_branch/conv", 1) for branch in ("then", "else")]
    made = inserted(model, site("w", *ends, fmt="int8", weight=True))
    assert strip_qdq(made, model).proto == proto
