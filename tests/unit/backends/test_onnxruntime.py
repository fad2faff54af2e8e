"""The ONNX Runtime backend: errors, the hash of the optimized graph, models in float16."""

from __future__ import annotations

import importlib.metadata
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import saved
from refused_models import pad_that_no_run_survives

from qdqspec.backends._engine import known_cure
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.onnxruntime.engine import CURES, OnnxRuntime, OnnxRuntimeEngine, half_model, plainly
from qdqspec.errors import BackendError
from qdqspec.graph.model import load_model
from qdqspec.testing.backends import small_model

FEEDS = {"x": np.ones((1, 3, 8, 8), np.float32)}


def build(path: Path, model: onnx.ModelProto, threads: int = 1) -> OnnxRuntimeEngine:
    onnx.save(model, path)
    return OnnxRuntime().build(path, BuildOptions(threads=threads))


@pytest.mark.parametrize("name", ["x", "image"])
def test_wrong_inputs_and_calls_after_close_are_refused(tmp_path: Path, name: str) -> None:
    engine = build(tmp_path / "small.onnx", small_model())
    engine.bind(FEEDS)
    for value in (np.ones((3, 8), np.float32), FEEDS["x"].astype(np.float64)):
        with pytest.raises(BackendError) as caught:
            engine.run({name: value})
        assert f"the model could not be run with {name} {list(value.shape)}: " in caught.value.what
    engine.close()
    for call in (lambda: engine.run(FEEDS), lambda: engine.time(1)):
        with pytest.raises(BackendError, match="closed"):
            call()


def test_external_weights_give_the_same_outputs_hash_and_kernels(tmp_path: Path) -> None:
    """An engine without a hash runs the same graph too."""
    plain = build(tmp_path / "plain.onnx", small_model(quantized=True))
    unhashed = OnnxRuntime().build(tmp_path / "plain.onnx", BuildOptions(hashed=False))
    path, apart = tmp_path / "external.onnx", {"location": "external.weights", "size_threshold": 0}
    onnx.save(small_model(quantized=True), path, save_as_external_data=True, **apart)
    external = OnnxRuntime().build(path, BuildOptions())
    assert (external.graph_hash, unhashed.graph_hash) == (plain.graph_hash, "")
    for engine in (plain, external, unhashed):
        np.testing.assert_array_equal(engine.run(FEEDS)["y"], plain.run(FEEDS)["y"])
        engine.bind(FEEDS)
        assert [kernel.name for kernel in engine.layers(2)] == [kernel.name for kernel in plain.layers(2)]


def test_outputs_in_float8_are_values_and_not_their_bits(tmp_path: Path) -> None:
    text = "g (float[3] x) => (float8e4m3fn[3] y) { y = QuantizeLinear<output_dtype = 17>(x, s) }"
    engine = OnnxRuntime().build(
        saved(tmp_path / "m.onnx", text, opset=21, s=np.float32(0.5)), BuildOptions()
    )
    found = engine.run({"x": np.array([1, 3, -4], np.float32)})["y"]
    assert found.astype(np.float32).tolist() == [2, 6, -8]


# ---- the hash of the optimized graph


def hash_of(folder: Path, model: onnx.ModelProto) -> str:
    return build(folder / "hashed.onnx", model).graph_hash


def test_the_hash_depends_on_weights_attributes_and_bodies_and_not_on_inner_names(tmp_path: Path) -> None:
    model = small_model(quantized=True)
    original = hash_of(tmp_path, model)
    for tensor in model.graph.initializer:
        tensor.name = f"other_{tensor.name}"
    for node in model.graph.node:
        node.name = f"other_{node.name}"
        node.input[:] = [n if n in "xy" else f"other_{n}" for n in node.input]
        node.output[:] = [n if n in "xy" else f"other_{n}" for n in node.output]
    assert hash_of(tmp_path, model) == original
    text = "big (float[1,64] x) => (float[1,64] y) { y = MatMul(x, w) }"
    weight = np.ones((64, 64), np.float32)
    full = hash_of(tmp_path, onnx.load(saved(tmp_path / "big.onnx", text, w=weight)))
    weight[3, 4] = 0.25
    assert hash_of(tmp_path, onnx.load(saved(tmp_path / "big.onnx", text, w=weight))) != full
    wider = small_model()
    wider.graph.node[0].attribute[0].ints[:] = [2, 2, 2, 2]
    assert hash_of(tmp_path, wider) != hash_of(tmp_path, small_model())
    branching = """g (float[4] x, bool c) => (float[4] y) { h = Abs(x)
        y = If (c) <then_branch = a () => (float[4] t) { t = Exp(h) },
                    else_branch = b () => (float[4] e) { e = Neg(h) }> }"""
    texts = branching, branching.replace("Neg", "Sqrt")
    one, other = (hash_of(tmp_path, onnx.load(saved(tmp_path / "if.onnx", text))) for text in texts)
    assert one != other, "of bodies too"


OLD_IR = """[ONNXRuntimeError] : 1 : FAIL : Load model from /a b/m.onnx failed:/onnxruntime_src/graph/model.cc:256
onnxruntime::Model::Model(onnx::ModelProto&&, const std::function<void()>&) Unsupported model IR version: 14, max
supported IR version: 13
"""
NO_KERNEL = "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for MatMul(13) node"


@pytest.mark.parametrize(
    ("said", "plain", "cure"),
    [
        (OLD_IR, "Unsupported model IR version: 14, max supported IR version: 13", "older IR version"),
        (NO_KERNEL, "Could not find an implementation for MatMul(13) node", "float32"),
        ("something\nelse", "something else", None),
        ("", "ValueError", None),
    ],
)
def test_messages_of_onnx_runtime_are_reported_without_its_source_files(
    said: str, plain: str, cure: str | None
) -> None:
    assert plainly(ValueError(said)) == plain
    found = known_cure(plain, CURES)
    assert found is None if cure is None else cure in (found or "")


def test_the_version_of_other_packages_of_onnxruntime_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """These packages have other names, and the same module name."""

    def version(name: str) -> str:
        if name != "onnxruntime-gpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.99.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    device = OnnxRuntime().device(BuildOptions(threads=4))
    assert device.key.endswith("-onnxruntime-1.99-t4")
    assert device.details["onnxruntime"] == "1.99.3"


def test_pairs_that_are_kept_are_computed_as_onnx_defines_them(tmp_path: Path) -> None:
    """Kernels for integers, which replace pairs otherwise, round elsewhere."""
    text = """pairs (float[1,64] x) => (float[1,64] y) <float scale = {0.03}, uint8 zero = {128}> {
      q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)
      v = DequantizeLinear(w, scale, zero)  p = MatMul(d, v)
      r = QuantizeLinear(p, scale, zero)  y = DequantizeLinear(r, scale, zero) }"""
    random = np.random.default_rng(0)
    path = saved(tmp_path / "pairs.onnx", text, w=random.integers(0, 256, (64, 64)).astype(np.uint8))
    feed = {"x": random.normal(size=(1, 64)).astype(np.float32)}
    kernels, found = {}, {}
    for level in ("off", "pairs-kept", "all"):
        options = BuildOptions(extra={"onnxruntime.optimization": level})
        with closing(OnnxRuntime().build(path, options)) as engine:
            found[level] = engine.run(feed)["y"]
            engine.bind(feed)
            kernels[level] = {layer.op_type for layer in engine.layers(5)}
    assert np.abs(found["pairs-kept"] - found["off"]).max() < 0.031  # one step, where a sum is between two
    assert "MatMul" in kernels["pairs-kept"]
    assert "MatMul" not in kernels["all"]


def test_a_run_that_only_the_optimized_model_fails_names_the_optimizer(tmp_path: Path) -> None:
    path = pad_that_no_run_survives(tmp_path / "pad.onnx")
    feeds = {"x": np.ones((1, 32, 16, 16), np.float32)}
    with closing(OnnxRuntime().build(path, BuildOptions())) as engine:
        with pytest.raises(BackendError) as wrong:
            engine.run({"x": np.ones((1, 3, 16, 16), np.float32)})
        assert wrong.value.cure == "check the names, types and shapes of the inputs"
        try:
            engine.run(feeds)
        except BackendError as error:
            refused = error
        else:
            pytest.skip("this ONNX Runtime optimizes the model to one that runs")
    assert "idx=4" in refused.what
    assert str(refused.cure).startswith("ONNX Runtime's optimizer breaks the model")


def test_a_kernel_that_refuses_its_shapes_is_named_with_its_reason(tmp_path: Path) -> None:
    """ONNX broadcasts the mask, ONNX Runtime 1.32 does not."""
    text = """g (float[1,4,8,16] q, bool[1,1,1,8] mask) => (float[1,4,8,16] y) { y = Attention(q, q, q, mask) }"""
    path = saved(tmp_path / "attention.onnx", text, opset=23, ir_version=11)
    feed = {"q": np.ones((1, 4, 8, 16), np.float32), "mask": np.ones((1, 1, 1, 8), np.bool_)}
    with closing(OnnxRuntime().build(path, BuildOptions())) as engine:
        try:
            engine.run(feed)
        except BackendError as error:
            refused = error
        else:
            pytest.skip("this ONNX Runtime broadcasts the mask")
    assert refused.what.endswith("inconsistent q_sequence_length (between attn_mask and Q)")
    assert str(refused.cure).startswith("the inputs fit the model, and ONNX Runtime's kernel")


# ---- models in float16, whose build reports fusions --------------------------------------------------


CASTED = {
    "a Resize always reads float32 scales": """resize (float[1,1,2,2] x) => (float[1,1,4,4] y)
      <float[4] scales = {1, 1, 2, 2}> {
        a = Relu(x)
        [last] y = Resize(a, , scales)
    }""",
    "the branches read what a cast makes": """choice (float[2] x, bool c) => (float[2] y) {
        a = Relu(x)
        [last] y = If(c)<then_branch = t () => (float[2] u) { u = Neg(a) },
                         else_branch = e () => (float[2] v) { v = Abs(a) }>
    }""",
}


@pytest.mark.parametrize("text", CASTED.values(), ids=CASTED)
def test_casts_precede_their_readers(text: str, tmp_path: Path):
    """The converter appends the casts that it inserts."""
    model = load_model(saved(tmp_path / "m.onnx", text, opset=17, ir_version=8))
    half = half_model(model, tmp_path / "m.onnx", keep_io=True)
    onnx.checker.check_model(half)
    assert [node.name for node in half.graph.node if node.op_type != "Cast"] == ["Relu#0", "last"]
