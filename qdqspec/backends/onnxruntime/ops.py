"""The operators that ONNX Runtime's CPU provider runs in integers, whether sums overflow, and its placement rule.

Derived from the optimized graphs of single-operator models with ONNX Runtime 1.31.1 and 1.32.0 (uint8 asymmetric
activations, int8 weights) and verified entry by entry against the installed version in
``tests/unit/backends/test_ort_ops.py``. Conditions that an operator type cannot express:

- Conv needs Q/DQ on both sides. ConvTranspose never fuses.
- Between a DequantizeLinear and the only reader, a QuantizeLinear, ONNX Runtime quantizes float constants of Conv,
  ConvTranspose and Gemm itself (its WeightBiasQuantization): the weight with one scale for all channels and in 8 bits,
  also where sums overflow; the bias as int32 in steps of input scale times weight scale. So such a Conv is never float.
  Before that it moves pairs past operators that move values, towards the Conv.
- Gemm and MatMul run with a float output too. Gemm then needs an int32 bias after a DequantizeLinear
  (with a float one, Gemm stays float with a weight dequantized in every run), and so does a MatMul whose Add
  of a one-dimensional constant ONNX Runtime converts to a Gemm. Gemm does not check that the bias scale is
  the product of the other two: another one gives wrong results without an error.
- With a Relu or Clip directly after them, and more operators after that, both output integers or run in float.
- Per-channel weights of MatMul must be two-dimensional, with the axis last; others fail at run time, or run in
  float from 1.32 on if the result is quantized.
- Operators that move values, and MaxPool, need equal scale and zero point on both sides; Resize only
  in ``nearest`` mode, MaxPool from opset 12, which every model with pairs has.
- A batch normalization between a quantized Conv and its Q prevents the fusion: it must be folded before.
- Pairs of float16 tensors never fuse: Q, DQ and the operator run one by one, with casts to float32 between them. Only
  those of Concat do, and the result is an invalid graph ("Type 'tensor(float16)' of input parameter").
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import onnx.parser

from qdqspec.backends import _cpu
from qdqspec.backends.base import Capabilities, labels_of
from qdqspec.graph import Model
from qdqspec.graph.ops import copies_values, is_default
from qdqspec.qdq import FORMATS, Unit, Units

LINEAR = ("Gemm", "MatMul")
COMPUTING = (
    "Add", "AveragePool", "Concat", "Conv", "GlobalAveragePool", "LeakyRelu", "Mul", "Sigmoid", "Softmax", "Where",
)  # fmt: skip
MOVING = (
    "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "MaxPool", "Reshape", "Resize", "Slice", "Split",
    "Squeeze", "Tile", "Transpose", "Unsqueeze",
)  # fmt: skip

LABELS = labels_of(alone=LINEAR, between=COMPUTING + MOVING)

# Dynamic quantization with 8-bit weights: DynamicQuantizeMatMul or MatMulIntegerToFloat, DynamicQuantizeLSTM.
# There is no such kernel of GRU ("DynamicQuantizeGRU is not a registered function/op"). Attention is that of domain
# com.microsoft, of which QAttention is the kernel.
DYNAMIC = frozenset({"Attention", *LINEAR, "LSTM"})

# Those of which ONNX Runtime quantizes weights and biases itself, and that run in integers then.
COMPLETED = frozenset({"Conv", "Gemm"})
MOVED_PAST = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})

# They are absorbed by the Q after them: Relu if its zero point is the format's lowest value, Clip if
# its bounds enclose all that the scale can represent. Identity and Dropout are removed before.
ABSORBED = frozenset({"Clip", "Dropout", "Identity", "Relu"})

# Weights alone in 4 bits become a MatMulNBits where blocks run along the first axis: 5 times faster than float for
# one row of input, 1.3 times for 128. A transposed Gemm dequantizes its weight in every run instead, which takes
# ten times as long. No kernel takes 8-bit floats (MatMul fails to build, in 16 bits all is done in float), 4-bit
# floats or scales of powers of two ("could not find an implementation for DequantizeLinear").
# So do weights in 8 bits, measured with 1.32, which gain with one or few rows only:
# docs/decisions/0019-what-onnx-runtime-computes.md.
BLOCKED_4 = ("int4", "uint4")
BLOCKED_8 = tuple(name for name in FORMATS if name.startswith("int8_b"))
BLOCK_SIZES = frozenset(FORMATS[name].block for name in BLOCKED_8)
BLOCKED_8_SINCE = (1, 32)
BLOCKED_AXES: dict[str, tuple[int, ...]] = {"MatMul": (0,), "Gemm": (0,)}


def capabilities(blocked: tuple[str, ...]) -> Capabilities:
    """The capabilities of all builds of ONNX Runtime for processors, with weights of ``blocked`` formats."""
    return Capabilities(
        formats=("int8", "uint8", *blocked),
        labels=LABELS,
        activations={"int8": "uint8", "uint8": "uint8"},
        weights={"int8": "int8", "uint8": "int8"} | {name: name for name in blocked},
        absorbs=ABSORBED,
        integer_bias=frozenset(LINEAR),
        completes=COMPLETED,
        moved_past=MOVED_PAST,
        rounds_biases=frozenset({"Conv"}),
        bare=frozenset(LINEAR),
        blocked_axes=BLOCKED_AXES,
        dynamic={"int8": DYNAMIC, "uint8": DYNAMIC},
        builds_side_by_side=True,
        one_processor=True,
        hardware="cpu",
        quantizes_half=False,
    )


# Whether sums of u8 x s8 products overflow on this processor, found by computing one. The processor's flags usually
# determine it (`_cpu`), but not everywhere: Windows has no list of flags, a sandbox may hide it, and under user-mode
# emulation the list is the host's. The matrix product takes a few milliseconds, once per process.

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

        weights = ", ".join([str(_WEIGHT)] * _DEPTH * _COLUMNS)
        model = onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["": 13]> product (uint8[{_ROWS},{_DEPTH}] a) => '
            f"(int32[{_ROWS},{_COLUMNS}] sums) <int8[{_DEPTH},{_COLUMNS}] b = {{{weights}}}> "
            "{ sums = MatMulInteger(a, b) }"
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors reach the caller as exceptions
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        (sums,) = session.run(None, {"a": np.full((_ROWS, _DEPTH), _ACTIVATION, np.uint8)})
    except Exception:  # noqa: BLE001 - a broken wheel raises anything; `probe` reports it
        return None
    return bool((np.asarray(sums) != _ACTIVATION * _WEIGHT * _DEPTH).any())


# ---- the placement rule ----------------------------------------------------------------------------


def copies_read_in_bodies(model: Model, units: Units) -> Units:
    """No pair is before operators that only copy values, if a body of If, Loop or Scan reads the copy.

    ONNX Runtime moves a DequantizeLinear past Reshape, Transpose, MaxPool and the like, and ends the process where the
    reader of the result is in a body.

    Source: ONNX Runtime 1.32 on models of one pair and one such operator, each in a process of its own: MaxPool,
    Reshape and Transpose whose result an If or a Loop reads end it, Relu does not
    (tests/unit/backends/test_ort_ops.py).
    """
    if not model.captured:
        return units
    moved: set[str] = set()  # nodes past which a DequantizeLinear would be moved, up to a body
    for node in reversed(model.nodes):
        readers = {end.node for name in node.outputs for end in model.ends(name) if not end.is_output}
        leads = not model.captured.isdisjoint(node.outputs) or not moved.isdisjoint(readers)
        if leads and (copies_values(node) or (node.op_type == "MaxPool" and is_default(node))):
            moved.add(node.name)

    def without(unit: Unit) -> Unit:
        edges = tuple(edge for edge in unit.edges if edge[1].node not in moved)
        readers = {name: {end.node for end in model.ends(name)} for name in unit.outputs}
        outputs = tuple(name for name in unit.outputs if moved.isdisjoint(readers[name]))
        if (edges, outputs) == (unit.edges, unit.outputs):
            return unit
        if unit.edges and not edges:
            return replace(unit, forms=())  # its only input would be moved past it
        return replace(unit, edges=edges).with_results(outputs, unit.out_edges)

    return tuple(without(unit) for unit in units) if moved else units
