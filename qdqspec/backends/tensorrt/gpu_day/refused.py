"""One small model for each lint rule that reports what TensorRT rejects: they are parsed, not built.

Each breaks its rule in the versions that the rule applies to. What the parser of another version says of them shows
whether the rule's range is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from qdqspec.graph.model import Model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qdqspec.arrays import Array

F32 = np.float32
_ROWS = "float[4,16] x"
_IMAGE = "float[1,16,8,8] x"
_HALVES = "float16[4,16] x"
_SQUARES = "float[16,16] x, float[16,16] k"
_PAIR = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z) "
_WEIGHT = "v = DequantizeLinear<axis = 0>(w, ws, wz) "
_WIDE = _PAIR.replace("zeLinear(q", "zeLinear<output_dtype = 10>(q") + "n = Neg(a)  y = Cast<to = 1>(n)"
_BLOCKS = "v = DequantizeLinear<axis = 0, block_size = {0}>(h, t)  y = MatMul(x, v)"
_MXFP8 = (
    "q, e = trt.TRT_MXFP8DynamicQuantize<axis = -1, block_size = 32, output_dtype = 17>(x) "
    "a = trt.TRT_MXFP8DequantizeLinear<axis = -1, block_size = 32, output_dtype = 1>(q, e)  y = Neg(a)"
)
_CONSTANTS: Mapping[str, Array] = {
    "s": np.array(0.05, F32), "z": np.array(0, np.int8), "zu": np.array(128, np.uint8), "z0": np.array(0, np.uint8),
    "w": np.ones((16, 16, 3, 3), np.int8), "ws": np.full(16, 0.01, F32), "wz": np.zeros(16, np.int8),
    "m": np.ones((16, 16), np.int8), "b": np.zeros(16, F32), "bi": np.arange(16, dtype=np.int32),
    "bs": np.full(16, 0.0005, F32),
}  # fmt: skip
_FP8_ZERO = np.zeros((), ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Refused:
    """A model as ONNX text; ``constants`` are added to those that all may name."""

    inputs: str
    nodes: str
    constants: Mapping[str, Array] = field(default_factory=dict)
    opset: int = 21

    def model(self) -> Model:
        """The model, every node named after its output."""
        head = f'<ir_version: 8, opset_import: ["": {self.opset}, "com.microsoft": 1, "trt": 1]>'
        proto = onnx.parser.parse_model(f"{head} g ({self.inputs}) => (float y) {{ {self.nodes} }}")
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        read = {name for node in proto.graph.node for name in node.input}
        known = {**_CONSTANTS, **self.constants}
        proto.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(known[name]), name) for name in sorted(read & known.keys())
        )
        proto.ir_version = 10 if self.opset < 23 else 11
        used = {node.domain for node in proto.graph.node} | {""}
        kept = [each for each in proto.opset_import if each.domain in used]
        del proto.opset_import[:]
        proto.opset_import.extend(kept)
        for node in proto.graph.node:
            node.name = node.output[0]
        return Model(proto)


# By rule. Rules on the GPU's compute capability have none: they do not concern the parser.
REFUSED: Mapping[str, Refused] = {
    "TRT001": Refused(_ROWS, "q = QuantizeLinear(x, s, zu)  a = DequantizeLinear(q, s, zu)  y = Neg(a)"),
    "TRT002": Refused(
        _IMAGE, _PAIR + _WEIGHT + "y = Conv<pads = [1, 1, 1, 1]>(a, v)",
        {"ws": np.r_[np.full(15, 0.01), 0].astype(F32)},
    ),
    "TRT003": Refused(
        _ROWS + ", float t", "q = QuantizeLinear(x, t, z)  a = DequantizeLinear(q, t, z)  y = Neg(a)"
    ),
    "TRT004": Refused(_IMAGE, _PAIR + _WEIGHT + "d = DequantizeLinear<axis = 0>(bi, bs)  y = Conv(a, v, d)"),
    "TRT005": Refused(_ROWS, _PAIR + "y = Neg(a)", {"z": np.array(0, np.int16)}),
    "TRT006": Refused(_ROWS, "q = QuantizeLinear(x, s, z0)  a = DequantizeLinear(q, s, z0)  y = Neg(a)"),
    "TRT007": Refused(_ROWS, "q = QuantizeLinear(x, ws, wz)  a = DequantizeLinear(q, ws, wz)  y = Neg(a)"),
    "TRT008": Refused(_IMAGE, _PAIR + _WEIGHT.replace("axis = 0", "axis = 1") + "y = Conv(a, v)"),
    "TRT009": Refused(_HALVES, _WIDE, opset=23),
    "TRT010": Refused(
        _ROWS, "v = DequantizeLinear<axis = 0, block_size = 8>(m, t, u)  y = MatMul(x, v)",
        {"t": np.ones((2, 16), F32), "u": np.zeros((2, 16), np.int8)},
    ),
    "TRT011": Refused(_ROWS, "q = QuantizeLinear(x, s, z)  i = MatMulInteger(q, m)  y = Cast<to = 1>(i)"),
    "TRT012": Refused(
        _ROWS, _PAIR.replace("= Q", "= com.microsoft.Q").replace("= D", "= com.microsoft.D") + "y = Neg(a)"
    ),
    "TRT013": Refused(_ROWS, "q = QuantizeLinear(x, s, wz)  a = DequantizeLinear(q, s, wz)  y = Neg(a)"),
    "TRT014": Refused(_ROWS, _PAIR + "v = DequantizeLinear(m, ws, wz)  y = MatMul(a, v)"),
    "TRT015": Refused(
        _ROWS, _BLOCKS.format(8),
        {"t": np.ones((2, 16)).astype(ml_dtypes.float8_e8m0fnu),
         "h": np.ones((16, 16)).astype(ml_dtypes.float8_e4m3fn)},
    ),
    "TRT016": Refused(
        "float[4,128] x", _BLOCKS.format(32),
        {"t": np.ones((4, 16), F32), "h": np.zeros((128, 16), np.int8).astype(ml_dtypes.int4)},
    ),
    "TRT017": Refused(_ROWS, _PAIR + "y = Transpose(a)", {"z": _FP8_ZERO}, opset=18),
    "TRT018": Refused(
        _ROWS + ", int8 t", "q = QuantizeLinear(x, s, t)  a = DequantizeLinear(q, s, t)  y = Neg(a)"
    ),
    "TRT019": Refused(
        _ROWS, _PAIR.replace("zeLinear(q", "zeLinear<output_dtype = 1>(q") + "y = Neg(a)",
        {"s": np.array(0.05, np.float16)}, opset=23,
    ),
    "TRT023": Refused(_ROWS, _WIDE, opset=23),
    "TRT025": Refused("float[4,4] x", "y = Det(x)"),
    "TRT026": Refused("float[1,2,4,8] x", "y = Attention(x, x, x)", opset=23),
    "TRT027": Refused(_ROWS, "y = RMSNormalization(x, b)", opset=23),
    "TRT028": Refused(_ROWS, "y = Swish(x)", opset=24),
    "TRT029": Refused(_SQUARES, "y = com.microsoft.FusedMatMul(x, k)"),
    "TRT060": Refused("float[2,3,4,64] x", _MXFP8),
}  # fmt: skip
