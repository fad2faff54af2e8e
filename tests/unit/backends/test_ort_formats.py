"""What ONNX Runtime makes of number formats other than 8-bit integers, on the version that is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from qdqspec.backends._ort_ops import BLOCKED, BLOCKED_AXES
from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.onnxruntime import OnnxRuntime
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.placement.insert import insert_qdq
from qdqspec.placement.space import SchemeSpace
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.types import Consumer, Placement, QuantizeRules, Site

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.normal(size=(128, 64)).astype(np.float32)
X = RANDOM.normal(size=(2, 128)).astype(np.float32)


def linear(op_type: str, axis: int, weight: np.ndarray = WEIGHT) -> Model:
    """One linear operator whose sums run along ``axis`` of its weight, with a bias where it can have one."""
    stored = weight if axis == 0 else weight.T.copy()
    inputs = ["x", "w", "b"] if op_type == "Gemm" else ["x", "w"]
    node = helper.make_node(op_type, inputs, ["y"], op_type, **({"transB": 1} if axis else {}))
    constants = [numpy_helper.from_array(stored, "w")]
    constants += [numpy_helper.from_array(np.arange(64, dtype=np.float32), "b")] if op_type == "Gemm" else []
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [2, 128]), ("y", [2, 64]))
    ]
    imports = [helper.make_opsetid("", 21)]
    proto = helper.make_model(
        helper.make_graph([node], "g", ends[:1], ends[1:], constants), opset_imports=imports
    )
    proto.ir_version = 10
    return Model(proto)


def weight_only(model: Model, fmt: str, axis: int) -> onnx.ModelProto:
    node = model.nodes[-1]
    site = Site(tensor="w", consumers=(Consumer(node.name, 1),), format=fmt, axis=axis, weight=True)
    return insert_qdq(model, Placement(sites=frozenset({site})), Quantizer(model, {})).proto


def built(proto: onnx.ModelProto, folder: Path) -> Engine:
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return OnnxRuntime().build(path, BuildOptions())


def kernels(engine: Engine) -> set[str]:
    engine.bind({"x": X})
    return {layer.op_type for layer in engine.layers(runs=1)}


@pytest.mark.parametrize("fmt", BLOCKED)
@pytest.mark.parametrize("op_type", BLOCKED_AXES)
def test_blocks_along_the_first_axis_become_one_kernel(tmp_path: Path, op_type: str, fmt: str) -> None:
    proto = weight_only(linear(op_type, 0), fmt, 0)
    engine = built(proto, tmp_path)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": X})
    # Its own arithmetic quantizes rows of the input to 8 bits.
    np.testing.assert_allclose(engine.run({"x": X})["y"], expected, atol=0.02 * np.abs(expected).max())
    assert kernels(engine) == {"MatMulNBits"}


def test_a_transposed_weight_is_dequantized_in_every_run(tmp_path: Path) -> None:
    assert "DequantizeLinear" in kernels(built(weight_only(linear("Gemm", 1), "int4", 1), tmp_path))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_what_is_not_offered_does_not_build(tmp_path: Path, fmt: str) -> None:
    assert fmt not in OnnxRuntime().capabilities().formats
    with pytest.raises(BackendError, match="Could not find an implementation"):
        built(weight_only(linear("MatMul", 0), fmt, 0), tmp_path)


def test_only_weights_that_become_a_kernel_are_offered() -> None:
    capabilities = OnnxRuntime().capabilities()

    def labels(model: Model) -> list[tuple[str, ...]]:
        return [
            unit.labels for unit in SchemeSpace(model, capabilities, rules=QuantizeRules(format="int4")).units
        ]

    assert labels(linear("MatMul", 0)) == labels(linear("Gemm", 0)) == [("fp", "in-only")]
    assert labels(linear("Gemm", 1)) == []
    assert labels(Model(linear("MatMul", 0, WEIGHT[:96]).proto)) == []  # not a whole number of blocks


def test_the_whole_choice_is_one_dequantized_weight() -> None:
    model = linear("MatMul", 0)
    space = SchemeSpace(model, OnnxRuntime().capabilities(), rules=QuantizeRules(format="uint4"))
    (site,) = space.resolve(space.everything()).sites
    assert (site.tensor, site.format, site.axis, site.weight) == ("w", "uint4", 0, True)
    assert space.tensors == frozenset()
