"""The compiler of TensorRT for RTX, where it is installed: lint against it, and placements that it builds.

``tests/data/tensorrt/rtx-differences.json`` lists the reviewed differences of lint on the models of the corpus, with a
reason each; the page ``docs/reference/lint-and-compiler.md`` shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import combinations
from pathlib import Path

import numpy as np
import onnx
import pytest
from installed import require
from onnx_text import parsed
from trt_corpus import CASES, IMPORTED, NEAR_MISSES, NEWER, RTX_CASES, parse

from qdqspec._core.config import Settings
from qdqspec.app.evidence.builds import lint_and_load
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import Resources
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.tensorrt_rtx.engine import compute_capability
from qdqspec.backends.tensorrt_rtx.ops import FORMATS
from qdqspec.errors import BackendError
from qdqspec.graph.given import given_model
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Case, Inputs, InputShape, Label, QuantizeRules, ShapeProfile

pytestmark = pytest.mark.integration

TARGET = "tensorrt-rtx-1"
CAPABILITIES = ("SM86", "SM89", "SM120")
REVIEWED = Path(__file__).parents[1] / "data" / "tensorrt" / "rtx-differences.json"
DIFFERENCES = json.loads(REVIEWED.read_text(encoding="utf-8"))["differences"]


def models() -> Iterator[tuple[str, Model]]:
    """The models of the corpus by name."""
    for prefix, cases in (("", CASES), ("RTX-", RTX_CASES)):
        for rule, pair in cases.items():
            for kind, (inputs, nodes, constants) in zip(("bad", "good"), pair, strict=True):
                yield f"{prefix}{rule}-{kind}", parse(inputs, "y", nodes, NEWER.get(rule, 21), **constants)
    for op, (_, (inputs, nodes, constants)) in IMPORTED.items():
        yield f"microsoft-{op}", parse(inputs, "y", nodes, **constants)
    for number, (rule, broken, (inputs, nodes, constants)) in enumerate(NEAR_MISSES):
        opset = NEWER.get(rule, 20 if "Gelu" in nodes else 21)
        yield (
            f"near{number}-{rule}-{'bad' if broken else 'good'}",
            parse(inputs, "y", nodes, opset, **constants),
        )


MODELS = dict(models())


@pytest.fixture(scope="module")
def compiler() -> Iterator[Isolated]:
    require("tensorrt-rtx")
    with closing(Isolated("tensorrt-rtx")) as backend:
        yield backend


def options_for(capabilities: tuple[str, ...], profiles: tuple[ShapeProfile, ...] = ()) -> BuildOptions:
    return BuildOptions(extra={"tensorrt-rtx.for": ",".join(capabilities)}, profiles=profiles)


def is_built(compiler: Isolated, path: Path, *capabilities: str) -> bool:
    try:
        compiler.build(path, options_for(capabilities)).close()
    except BackendError:
        return False
    return True


def refusing(compiler: Isolated, path: Path) -> set[str]:
    """The compute capabilities for which the compiler refuses a model."""
    if is_built(compiler, path, *CAPABILITIES):
        return set()
    return {name for name in CAPABILITIES if not is_built(compiler, path, name)}


def linted(model: Model) -> set[str]:
    """The compute capabilities for which lint reports a refusal."""
    return {
        name
        for name in CAPABILITIES
        for finding in lint_model(model, TARGET, compute_capability=compute_capability(name))
        if finding.severity == "refused"
    }


@pytest.mark.parametrize("name", MODELS)
def test_lint_and_the_compiler_differ_only_where_that_was_reviewed(name, compiler, tmp_path) -> None:
    onnx.save(MODELS[name].proto, tmp_path / "model.onnx")
    by_compiler, by_lint = refusing(compiler, tmp_path / "model.onnx"), linted(MODELS[name])
    found = {"lint": sorted(by_lint - by_compiler), "compiler": sorted(by_compiler - by_lint)}
    reviewed = DIFFERENCES.get(name, {})
    assert found == {side: sorted(reviewed.get(side, [])) for side in found}


def test_a_model_whose_values_the_compiler_would_clip_is_refused(compiler, tmp_path) -> None:
    onnx.save(MODELS["TRT006-bad"].proto, tmp_path / "model.onnx")
    with pytest.raises(BackendError, match="uint8 as int8: values above 127 are clipped"):
        compiler.build(tmp_path / "model.onnx", options_for(("SM120",)))


def test_lint_builds_for_the_gpu_that_it_is_told() -> None:
    require("tensorrt-rtx")
    model = MODELS["TRT005-good"]  # in fp8
    assert lint_and_load(model, TARGET, compute_capability=(12, 0)).loaded
    assert not lint_and_load(model, TARGET, compute_capability=(8, 6)).loaded
    none = lint_and_load(model, TARGET, compute_capability=(9, 0))
    assert none.missing.endswith("does not build for compute capability 9.0")


def test_each_reviewed_difference_is_that_of_a_model() -> None:
    assert set(DIFFERENCES) <= set(MODELS)
    assert all(entry["reason"] for entry in DIFFERENCES.values())


# ---- placements on families of networks ---------------------------------------------------------


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
    """Small models with the structure of usual families of networks, by name; their weights are random."""
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


FAMILIES = dict(architectures())
REAL = ("digits_resnet", "squeezenet10", "ultraface_rfb320")
MIXES = tuple(combinations(FORMATS, 2))


@pytest.fixture(params=(*FAMILIES, *REAL))
def path(request: pytest.FixtureRequest, models: Path, tmp_path: Path) -> Path:
    if request.param in REAL:
        return models / f"{request.param}.onnx"
    onnx.save(FAMILIES[request.param], tmp_path / f"{request.param}.onnx")
    return tmp_path / f"{request.param}.onnx"


def having(*formats: str) -> tuple[str, ...]:
    """The compute capabilities with kernels of all these formats."""
    return tuple(
        name for name in CAPABILITIES if all(compute_capability(name) >= FORMATS[fmt] for fmt in formats)
    )


def profiles_of(path: Path) -> tuple[ShapeProfile, ...]:
    """A shape for the batch of the model whose batch is dynamic."""
    if path.stem != "digits_resnet":
        return ()
    return (ShapeProfile(shapes={"input": InputShape.of((1, 1, 16, 16))}),)


def labellings(space: SchemeSpace, formats: tuple[str, ...]) -> Iterator[dict[str, Label]]:
    """Everything in the first format, everything in each, and random labels."""
    names = [choice.name for choice in space.choices]
    yield from (space.everything(name) for name in names)
    random = np.random.default_rng(len(formats))
    for _ in range(2):
        yield {unit.id: str(random.choice(("fp", *unit.labels))) for unit in space.units}


@pytest.mark.parametrize("formats", [(fmt,) for fmt in FORMATS] + list(MIXES), ids="-".join)
def test_placements_build_for_each_gpu_that_has_the_formats(path, formats, compiler, tmp_path) -> None:
    capabilities, profiles = having(*formats), profiles_of(path)
    options = options_for(capabilities, profiles)
    rules = QuantizeRules(format="+".join(formats), corrections="none")
    case = Case(
        id="default", model=path, inputs=Inputs(profiles=profiles) if profiles else Inputs(), quantize=rules
    )
    resources = Resources(backend=compiler, options=options, settings=Settings(seed=0))
    prepared = Prepared(case, given_model(path, {}), resources)
    space = prepared.calibrated[0]
    inserter = Inserter(prepared.folded, prepared.calibrated[1])
    placements = {(found := space.resolve(labels)).digest: found for labels in labellings(space, formats)}
    refused = []
    for digest, placement in placements.items():
        if not placement.sites:
            continue
        file = tmp_path / f"{digest}.onnx"
        save_model(inserter.insert(placement).proto, file, base=path.parent)
        assert not [f for f in lint_model(load_model(file), "tensorrt-rtx-1") if f.severity == "refused"]
        try:
            compiler.build(file, options).close()
        except BackendError as error:
            refused.append(error.what)
    assert not refused
