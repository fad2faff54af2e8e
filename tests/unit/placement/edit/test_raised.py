"""Models whose opset must be raised, with nodes that the converter replaces."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_text import outputs_of, parsed
from random_models import random_inputs, ranges_for

from qdqspec.errors import PlacementError
from qdqspec.graph.model import Model
from qdqspec.qdq.edit.insert import insert_qdq
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.read.strip import strip_qdq
from qdqspec.types import Consumer, Placement, Site

# Softmax over several axes is defined differently from opset 13 on: it becomes Shape, Flatten, Softmax and
# Reshape. Scales per channel need opset 13.
TEXT = """g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) {{
    [conv] h = Conv <kernel_shape = [1, 1]> (x, w)
    [soft] s = Softmax <axis = 1> (h)
    {more}
    [add] y = Add (s, h)
}}"""
KERNEL = np.array([1.0, -2.0, 0.5, 4.0], np.float32).reshape(2, 2, 1, 1)
WEIGHT = Site(tensor="w", consumers=(Consumer("conv", 1),), format="int8", axis=0, weight=True)


def model_with(more: str = "") -> Model:
    return parsed(TEXT.format(more=more), 11, ir=6, w=KERNEL)


def inserted(model: Model, *ends: tuple[str, int]) -> onnx.ModelProto:
    pair = Site(tensor="h", consumers=tuple(Consumer(*end) for end in ends), format="uint8")
    sites = frozenset({WEIGHT, pair})
    return insert_qdq(model, Placement(sites=sites), Quantizer(model, ranges_for(model))).proto


def readers(proto: onnx.ModelProto, tensor: str) -> list[str]:
    return sorted(node.op_type for node in proto.graph.node for name in node.input if name == tensor)


def run(proto: onnx.ModelProto, model: Model) -> np.ndarray:
    small = {name: value / 8 for name, value in random_inputs(model).items()}  # within the ranges
    return outputs_of(proto, small, "ENABLE_ALL")[0]


@pytest.mark.parametrize("ends", [[("soft", 0)], [("soft", 0), ("add", 1)]])
def test_replacements_of_a_node_read_the_quantized_tensor(ends: list[tuple[str, int]]) -> None:
    model = model_with()
    proto = inserted(model, *ends)
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
        inserted(model, ("soft", 0))
    both = inserted(model, ("soft", 0), ("other", 0))
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
