"""The backend contract allows for TF32, in which GPUs compute float32 convolutions and products by default."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from qdqspec.testing.backends import FLOAT_TOLERANCE, small_model

FEEDS = {"x": np.random.default_rng(1).uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)}


def tf32(values: np.ndarray) -> np.ndarray:
    """Float32 cut to TF32's 10 bits of mantissa."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def test_a_device_that_computes_in_tf32_passes_the_contract() -> None:
    model = small_model()
    for constant in model.graph.initializer:
        if constant.name in ("w", "fc"):
            constant.CopyFrom(numpy_helper.from_array(tf32(numpy_helper.to_array(constant)), constant.name))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    model.graph.output[0].name = "f"
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    del model.graph.node[-1]
    (pooled,) = ReferenceEvaluator(model).run(None, {"x": tf32(FEEDS["x"])})
    found = tf32(pooled) @ constants["fc"] + constants["fc_b"]
    (exact,) = ReferenceEvaluator(small_model()).run(None, FEEDS)
    error = float(np.abs(found - exact).max())
    assert 1e-3 < error < FLOAT_TOLERANCE
