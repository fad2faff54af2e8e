"""Overflow of 8-bit weights is found by a computation, and reported with the instruction set."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from graph_text import saved

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


def test_capabilities_agree_with_a_quantized_convolution(tmp_path: Path) -> None:
    """A convolution with the largest weights and activations, which is another kernel than the probed one."""
    text = """conv (uint8[1,4,6,6] x) => (uint8[1,8,4,4] y)
        <float one = {1}, uint8 z = {0}, int8 zw = {0}, float big = {4572}> {
        y = QLinearConv(x, one, z, w, one, zw, big, z)
    }"""  # the exact sum is 255 times 36 * 127
    path = saved(tmp_path / "conv.onnx", text, w=np.full((8, 4, 3, 3), 127, np.int8))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((1, 4, 6, 6), 255, np.uint8)})
    assert bool((np.asarray(found) < 255).any()) is OnnxRuntime().capabilities().reduce_range


@pytest.mark.parametrize(
    ("computed", "cpu", "expected", "text"),
    [
        (False, ICE_LAKE, False, "AVX512-VNNI (8-bit weights are exact)"),
        (False, HASWELL, False, f"AVX2 without VNNI (8-bit weights are exact{CONTRARY})"),
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
