"""Definitions of the Q/DQ operators of domain ``trt`` in ONNX operators.

ONNX has no operator that quantizes activations dynamically in blocks with one scale each. For NVFP4 and MXFP8, files
have these, which the parser of that domain's runtime reads; and those of FP8 in operator sets before 19, in which ONNX
has no such numbers:

- ``TRT_FP4DynamicQuantize(x, scale)`` with ``axis``, ``block_size`` 16 and ``scale_type`` FLOAT8E4M3FN gives FLOAT4E2M1
  numbers and 8-bit scales of blocks, which ``scale``, a constant, multiplies. Two DequantizeLinear are the inverse.
- ``TRT_MXFP8DynamicQuantize(x)`` with ``axis``, ``block_size`` 32 and ``output_dtype`` FLOAT8E4M3FN gives 8-bit floats
  and scales of blocks that are powers of two, as uint8: the exponent plus 127 (E8M0).
- ``TRT_MXFP8QuantizeLinear(x, scale)`` and ``TRT_MXFP8DequantizeLinear(x, scale)`` with ``axis``, ``block_size`` and
  ``output_dtype`` take such scales. The parser rejects ONNX's own operators with FLOAT8E8M0 scales.
- ``TRT_FP8QuantizeLinear(x, scale)`` gives FLOAT8E4M3FN numbers, without a zero point, and
  ``TRT_FP8DequantizeLinear(x, scale)`` is the inverse.

They are defined here as ONNX functions along the last axis (the last but one for given scales), for shape
inference and for the reference implementation. Kernels may round differently in the last bit.

Sources: the parser of that runtime, onnxOpImporters.cpp; NVIDIA's description of the operator DynamicQuantize, and its
page "Quantization Schemes" (round half to even, saturate); E8M0 is rounded up, as Model-Optimizer does
(quant_utils, ``compute_e8m0``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser

DOMAIN = "trt"
VERSION = 1

FP4_DYNAMIC = "TRT_FP4DynamicQuantize"
MXFP8_DYNAMIC = "TRT_MXFP8DynamicQuantize"
MXFP8_QUANTIZE = "TRT_MXFP8QuantizeLinear"
MXFP8_DEQUANTIZE = "TRT_MXFP8DequantizeLinear"

FP8_QUANTIZE = "TRT_FP8QuantizeLinear"
FP8_DEQUANTIZE = "TRT_FP8DequantizeLinear"

DYNAMIC_OPS = frozenset({FP4_DYNAMIC, MXFP8_DYNAMIC})
# The ONNX operator that each corresponds to in a pair.
PAIR_OPS = {
    FP4_DYNAMIC: "QuantizeLinear",
    MXFP8_DYNAMIC: "QuantizeLinear",
    MXFP8_QUANTIZE: "QuantizeLinear",
    MXFP8_DEQUANTIZE: "DequantizeLinear",
    FP8_QUANTIZE: "QuantizeLinear",
    FP8_DEQUANTIZE: "DequantizeLinear",
}
POWERS_OF_TWO = frozenset({MXFP8_QUANTIZE, MXFP8_DEQUANTIZE})  # whose scales are stored as exponents

_BIAS = 127  # of an exponent stored in 8 bits
EXPONENTS = (-127, 127)

# The largest magnitude of each block along the last axis. Kernels compute in float32 whatever type ``x`` has.
_LARGEST = """
  real = Cast<to = 1>(x)
  size = Constant<value_int: int = @block_size>()
  axes = Constant<value_ints = [-1]>()
  block = Reshape(size, axes)
  lead = Shape<end = -1>(x)
  shape = Concat<axis = 0>(lead, axes, block)
  magnitudes = Abs(real)
  blocks = Reshape(magnitudes, shape)
  largest = ReduceMax<keepdims = 0>(blocks, axes)
"""
_SCALE = """
  biased = Cast<to = 1>(scale)
  bias = Constant<value_float = 127.0>()
  exponent = Sub(biased, bias)
  two = Constant<value_float = 2.0>()
  step = Pow(two, exponent)
"""
_OPSETS = '<opset_import: ["": 24], domain: "trt">'
_MEANINGS = {
    FP4_DYNAMIC: f"""{_OPSETS} {FP4_DYNAMIC} <axis: int = -1, block_size: int = 16, scale_type: int = 17>
    (x, scale) => (y, y_scale) {{ {_LARGEST}
      whole = Cast<to = 1>(scale)
      most = Constant<value_float = 6.0>()
      wanted = Div(largest, most)
      share = Div(wanted, whole)
      y_scale = Cast<to = 17>(share)
      step = DequantizeLinear(y_scale, whole)
      zero = Constant<value_float = 0.0>()
      one = Constant<value_float = 1.0>()
      none = Equal(step, zero)
      usable = Where(none, one, step)
      y = QuantizeLinear<axis = -1, block_size: int = @block_size, output_dtype = 23>(real, usable)
    }}""",
    MXFP8_DYNAMIC: f"""{_OPSETS} {MXFP8_DYNAMIC} <axis: int = -1, block_size: int = 32, output_dtype: int = 17>
    (x) => (y, y_scale) {{ {_LARGEST}
      most = Constant<value_float = 448.0>()
      wanted = Div(largest, most)
      narrow = Cast<to = 24, round_mode = "up">(wanted)
      step = Cast<to = 1>(narrow)
      two = Constant<value_float = 2.0>()
      log = Log(step)
      base = Log(two)
      exponent = Div(log, base)
      nearest = Round(exponent)
      bias = Constant<value_float = 127.0>()
      biased = Add(nearest, bias)
      y_scale = Cast<to = 2>(biased)
      y = QuantizeLinear<axis = -1, block_size: int = @block_size, output_dtype = 17>(real, step)
    }}""",
    MXFP8_QUANTIZE: f"""{_OPSETS} {MXFP8_QUANTIZE} <axis: int = -1, block_size: int = 32, output_dtype: int = 17>
    (x, scale) => (y) {{ {_SCALE}
      real = Cast<to = 1>(x)
      y = QuantizeLinear<axis: int = @axis, block_size: int = @block_size, output_dtype = 17>(real, step)
    }}""",
    MXFP8_DEQUANTIZE: f"""{_OPSETS} {MXFP8_DEQUANTIZE} <axis: int = -1, block_size: int = 32, output_dtype: int = 1>
    (x, scale) => (y) {{ {_SCALE}
      real = DequantizeLinear<axis: int = @axis, block_size: int = @block_size>(x, step)
      y = Cast<to: int = @output_dtype>(real)
    }}""",
    FP8_QUANTIZE: f"""{_OPSETS} {FP8_QUANTIZE} <axis: int = 1> (x, scale) => (y) {{
      y = QuantizeLinear<axis: int = @axis, output_dtype = 17>(x, scale)
    }}""",
    FP8_DEQUANTIZE: f"""{_OPSETS} {FP8_DEQUANTIZE} <axis: int = 1> (x, scale) => (y) {{
      y = DequantizeLinear<axis: int = @axis>(x, scale)
    }}""",
}


def is_pair_op(node: onnx.NodeProto) -> bool:
    """Whether a node is one of these operators."""
    return node.domain == DOMAIN and node.op_type in PAIR_OPS


def meanings(proto: onnx.ModelProto) -> Iterator[onnx.FunctionProto]:
    """The functions that define the operators of domain ``trt`` in the main graph, each once.

    Functions that the model itself defines are omitted.
    """
    given = {function.name for function in proto.functions if function.domain == DOMAIN}
    used = {node.op_type for node in proto.graph.node if is_pair_op(node)}
    return (onnx.parser.parse_function(_MEANINGS[name]) for name in sorted(used - given))


def as_e8m0(scale: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
    """Powers of two as their exponents plus 127."""
    _, exponent = np.frexp(scale)
    return np.asarray(np.clip(exponent - 1, *EXPONENTS) + _BIAS, np.uint8)


def of_e8m0(stored: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """The powers of two of exponents plus 127."""
    return np.ldexp(np.float32(1), stored.astype(np.int32) - _BIAS)
