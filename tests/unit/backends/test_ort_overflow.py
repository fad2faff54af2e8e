"""Overflow of 8-bit weights is found by a computation, and reported with the instruction set."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqspec.backends._cpu import Cpu
from qdqspec.backends.onnxruntime import ops
from qdqspec.backends.onnxruntime.engine import OnnxRuntime

HASWELL = Cpu(product="Haswell", flags=frozenset({"sse2", "avx2"}), cores=1)
ICE_LAKE = Cpu(product="Ice Lake", flags=frozenset({"avx2", "avx512bw", "avx512_vnni"}), cores=1)
UNKNOWN = Cpu(product="", flags=frozenset(), cores=1)
CONTRARY = ", as computed here, although the processor's flags mean the opposite"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(ops, "_measured", lambda: request.param)


def test_capabilities_agree_with_a_quantized_convolution() -> None:
    """A convolution with the largest weights and activations, which is another kernel than the probed one."""
    weight = np.full((8, 4, 3, 3), 127, np.int8)
    constants = {
        "w": weight,
        "one": np.array(1, np.float32),
        "z": np.array(0, np.uint8),
        "zw": np.array(0, np.int8),
        "big": np.array(36 * 127, np.float32),  # the exact sum is 255 of these
    }
    graph = helper.make_graph(
        [helper.make_node("QLinearConv", ["x", "one", "z", "w", "one", "zw", "big", "z"], ["y"])],
        "conv",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, (1, 4, 6, 6))],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, (1, 8, 4, 4))],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((1, 4, 6, 6), 255, np.uint8)})
    assert bool((np.asarray(found) < 255).any()) is OnnxRuntime().capabilities().reduce_range


@pytest.mark.parametrize(
    ("computed", "cpu", "expected", "text"),
    [
        (False, ICE_LAKE, False, "AVX512-VNNI (8-bit weights are exact)"),
        (
            False,
            HASWELL,
            False,
            f"AVX2 without VNNI (8-bit weights are exact{CONTRARY})",
        ),
        (None, HASWELL, True, "AVX2 without VNNI (u8 x s8 saturates: 7-bit weights)"),
        (None, UNKNOWN, True, "not known (u8 x s8 saturates: 7-bit weights)"),
    ],
    indirect=["computed"],
)
def test_the_computed_overflow_takes_precedence_over_processor_flags(
    computed: None, cpu: Cpu, expected: bool, text: str
) -> None:
    assert ops.overflows(cpu) is expected
    assert ops.describe(cpu) == text


def test_without_onnxruntime_processor_flags_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    ops._measured.cache_clear()
    try:
        assert ops.overflows(HASWELL)
        assert not ops.overflows(ICE_LAKE)
    finally:
        ops._measured.cache_clear()
