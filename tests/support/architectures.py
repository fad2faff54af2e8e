"""Small models with the structure of usual families of networks; weights are random."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import onnx
from onnx_text import parsed

# Text of the nodes, shape of the input, and shapes of weights; {s} are scalar constants.
_TRANSFORMER = """
  n = LayerNormalization<axis = -1>(x, g1, b1)
  q0 = MatMul(n, wq)  k0 = MatMul(n, wk)  v0 = MatMul(n, wv)
  q1 = Add(q0, bq)
  q2 = Reshape(q1, heads)  k2 = Reshape(k0, heads)  v2 = Reshape(v0, heads)
  q3 = Transpose<perm = [0, 2, 1, 3]>(q2)  k3 = Transpose<perm = [0, 2, 3, 1]>(k2)
  v3 = Transpose<perm = [0, 2, 1, 3]>(v2)
  scores = MatMul(q3, k3)  scaled = Div(scores, eight)  weights = Softmax<axis = -1>(scaled)
  mixed = MatMul(weights, v3)  back = Transpose<perm = [0, 2, 1, 3]>(mixed)  joined = Reshape(back, tokens)
  projected = MatMul(joined, wo)  r1 = Add(x, projected)
  m = LayerNormalization<axis = -1>(r1, g2, b2)
  h0 = MatMul(m, w1)  h1 = Add(h0, bh)
  e0 = Div(h1, root)  e1 = Erf(e0)  e2 = Add(e1, one)  e3 = Mul(h1, e2)  h2 = Mul(e3, half)
  h3 = MatMul(h2, w2)  y = Add(r1, h3)"""
_CONVNEXT = """
  c = Conv<group = 32, pads = [3, 3, 3, 3]>(x, wd, bd)  t = Transpose<perm = [0, 2, 3, 1]>(c)
  n = LayerNormalization<axis = -1>(t, g1, b1)
  h0 = MatMul(n, w1)  h1 = Add(h0, bh)
  e0 = Div(h1, root)  e1 = Erf(e0)  e2 = Add(e1, one)  e3 = Mul(h1, e2)  h2 = Mul(e3, half)
  h3 = MatMul(h2, w2)  s = Mul(h3, gamma)  u = Transpose<perm = [0, 3, 1, 2]>(s)  y = Add(x, u)"""
_INVERTED_RESIDUAL = """
  e = Conv(x, we, be)  e6 = Clip(e, zero, six)
  d = Conv<group = 64, pads = [1, 1, 1, 1]>(e6, wd, bd)  d6 = Clip(d, zero, six)
  p = Conv(d6, wp)  r = Add(x, p)  g = GlobalAveragePool(r)  f = Flatten(g)  y = Gemm<transB = 1>(f, wf, bf)"""
_UNET = """
  a0 = Conv<pads = [1, 1, 1, 1]>(x, wa, ba)  a = LeakyRelu(a0)  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)
  b0 = Conv<pads = [1, 1, 1, 1]>(p, wb, bb)  b = LeakyRelu(b0)
  u = ConvTranspose<kernel_shape = [2, 2], strides = [2, 2]>(b, wu)  j = Concat<axis = 1>(a, u)
  y = Conv<pads = [1, 1, 1, 1]>(j, wy, by)"""
_ATTENTION_GATE = """
  c = Conv<pads = [1, 1, 1, 1]>(x, wc, bc)  r = Relu(c)  g = GlobalAveragePool(r)
  s0 = Conv(g, ws)  s1 = Relu(s0)  s2 = Conv(s1, wt)  s = Sigmoid(s2)  m = Mul(r, s)
  a = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(m)  t = Conv(a, wo)  z = Resize<mode = "nearest">(t, , sizes)
  w = Concat<axis = 1>(z, x)  y = Conv(w, wy)"""
_RECURRENT = """
  h, last = LSTM<hidden_size = 32>(x, W, R, B)  f = Squeeze(h, axes)  y = MatMul(f, wy)"""

_HIDDEN, _INNER = 64, 128
_BLOCK = {"w1": (_HIDDEN, _INNER), "bh": (_INNER,), "w2": (_INNER, _HIDDEN)}
_SCALARS = {"root": 2**0.5, "one": 1.0, "half": 0.5, "eight": 8.0, "zero": 0.0, "six": 6.0}
_INTEGERS = {"heads": [1, 16, 4, 16], "tokens": [1, 16, 64], "axes": [1]}
_IMAGE = "1,32,16,16"
_FAMILIES = {
    "transformer": (
        _TRANSFORMER,
        f"1,16,{_HIDDEN}",
        {
            **_BLOCK,
            **dict.fromkeys(("wq", "wk", "wv", "wo"), (_HIDDEN, _HIDDEN)),
            **dict.fromkeys(("g1", "b1", "g2", "b2", "bq"), (_HIDDEN,)),
        },
    ),
    "convnext": (
        _CONVNEXT,
        _IMAGE,
        {"wd": (32, 1, 7, 7), "w1": (32, 128), "bh": (128,), "w2": (128, 32)}
        | dict.fromkeys(("bd", "g1", "b1", "gamma"), (32,)),
    ),
    "inverted-residual": (
        _INVERTED_RESIDUAL,
        _IMAGE,
        {"we": (64, 32, 1, 1), "be": (64,), "wd": (64, 1, 3, 3), "bd": (64,), "wp": (32, 64, 1, 1)}
        | {"wf": (16, 32), "bf": (16,)},
    ),
    "unet": (
        _UNET,
        _IMAGE,
        {"wa": (32, 32, 3, 3), "wb": (64, 32, 3, 3), "wu": (64, 32, 2, 2), "wy": (16, 64, 3, 3)}
        | {"ba": (32,), "bb": (64,), "by": (16,)},
    ),
    "gate": (
        _ATTENTION_GATE,
        _IMAGE,
        {"wc": (32, 32, 3, 3), "bc": (32,), "ws": (16, 32, 1, 1), "wt": (32, 16, 1, 1)}
        | {"wo": (32, 32, 1, 1), "wy": (16, 64, 1, 1)},
    ),
    "recurrent": (
        _RECURRENT,
        "6,1,16",
        {"W": (1, 128, 16), "R": (1, 128, 32), "B": (1, 256), "wy": (32, 32)},
    ),
}


def architectures() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Each family by name, with float32 weights; the input is called ``x`` and the output ``y``."""
    known = {key: np.array(value, np.float32) for key, value in _SCALARS.items()}
    known |= {key: np.array(value, np.int64) for key, value in _INTEGERS.items()}
    known["sizes"] = np.array([1, 1, 2, 2], np.float32)
    for family, (nodes, shape, weights) in _FAMILIES.items():
        random = np.random.default_rng(len(family))
        constants = {
            key: (random.standard_normal(size) / np.sqrt(np.prod(size[1:]) or 1)).astype(np.float32)
            for key, size in weights.items()
        }
        constants |= {key: value for key, value in known.items() if re.search(rf"\b{key}\b", nodes)}
        proto = parsed(f"g (float[{shape}] x) => (float y) {{ {nodes} }}", **constants).proto
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        for index, node in enumerate(proto.graph.node):
            node.name = f"{node.op_type}_{index}"
        yield family, onnx.shape_inference.infer_shapes(proto)  # with the shape of the output
