"""Tests whether ONNX Runtime's sums of u8 x s8 products overflow on this processor, by computing one.

The processor's flags usually determine it (`_cpu`), but not everywhere: Windows has no list of flags, a sandbox may
hide it, and under user-mode emulation the list is the host's. The matrix product takes a few milliseconds, once per
process.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qdqspec.backends import _cpu

_ROWS, _DEPTH, _COLUMNS = 4, 32, 16
_ACTIVATION, _WEIGHT = 255, 127  # two such products add up to 64770; 16 bits hold 32767


def overflows(cpu: _cpu.Cpu) -> bool:
    """Whether sums with 8-bit weights overflow. Without ONNX Runtime the flags decide; unknown ones count as yes."""
    measured = _measured()
    return cpu.may_saturate if measured is None else measured


def describe(cpu: _cpu.Cpu) -> str:
    """The integer path as a text for `doctor`: the instruction set, and its consequence for weights."""
    return cpu.int8_text(saturates=overflows(cpu))


@cache
def _measured() -> bool | None:
    """The computed result; None if ONNX Runtime is missing or cannot compute such a product."""
    try:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors reach the caller as exceptions
        session = ort.InferenceSession(_product(), options, providers=["CPUExecutionProvider"])
        (sums,) = session.run(None, {"a": np.full((_ROWS, _DEPTH), _ACTIVATION, np.uint8)})
    except Exception:  # noqa: BLE001 - a broken wheel raises anything; `probe` reports it
        return None
    return bool((np.asarray(sums) != _ACTIVATION * _WEIGHT * _DEPTH).any())


def _product() -> bytes:
    weights = numpy_helper.from_array(np.full((_DEPTH, _COLUMNS), _WEIGHT, np.int8), "b")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["sums"])],
        "product",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, (_ROWS, _DEPTH))],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, (_ROWS, _COLUMNS))],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())
