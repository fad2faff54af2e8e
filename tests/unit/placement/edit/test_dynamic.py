"""Dynamic labels: insertion, the kernels of ONNX Runtime, and stripping, import and comparison of the result."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_text import kernels_of, outputs_of, parsed
from onnxruntime.quantization import QuantType, quantize_dynamic
from random_models import bytes_of, floating

from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.graph.fold import fold_weights
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.protos import CONTRIBUTED
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.dynamic_pairs import with_pairs
from qdqspec.qdq.formats import RUN_TIME
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.search_space import SchemeSpace, judge, labels_of
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import QuantizeRules

_WIDTH, _HIDDEN = 8, 4
_TAKES = "QAttention takes float32, equal sizes of queries, keys and values, and here no earlier ones"


def _model(
    text: str, opset: int = 17, width: int = _WIDTH, inputs: str = "", **weights: tuple[int, ...] | np.ndarray
) -> Model:
    """A model of an input ``x``, three steps wide; ``weights`` are arrays, or shapes of random ones."""
    values = {n: _drawn(n, *weight) if isinstance(weight, tuple) else weight for n, weight in weights.items()}
    head = f"g (float[3, 1, {width}] x{inputs}) => (float y)"
    proto = parsed(f"{head} {{ {text} }}", opset, **values).proto
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return Model(onnx.shape_inference.infer_shapes(proto))


def _drawn(name: str, *shape: int) -> np.ndarray:
    """Random numbers, the same in each run and others for each name."""
    return np.random.default_rng([*name.encode(), *shape]).standard_normal(shape).astype(np.float32)


def _lstm(directions: int = 1, width: int = _WIDTH, more: str = "", **weights: object) -> Model:
    rows, both = 4 * _HIDDEN, ', direction = "bidirectional"' if directions > 1 else ""
    return _model(
        f"[lstm] h, last = LSTM<hidden_size = {_HIDDEN}{both}>(x, W, R, B{more}) [relu] y = Relu(h)",
        width=width, W=(directions, rows, width), R=(directions, rows, _HIDDEN), B=(directions, 2 * rows),
        **weights,
    )  # fmt: skip


def _attention(inputs: str = "a, w, bias", attributes: str = "", **weights: object) -> Model:
    """The attention of com.microsoft between two operators of ONNX."""
    return _model(
        f"""[abs] a = Abs(x) [attention] h = com.microsoft.Attention<num_heads = 2{attributes}>({inputs})
            [neg] y = Neg(h)""",
        w=(_WIDTH, 3 * _WIDTH), bias=(3 * _WIDTH,), mask=np.ones((3, 1), np.int32), **weights,
    )  # fmt: skip


def _in_body() -> Model:
    """A product in each branch of an If, with a weight of the branch."""

    def branch(weight: str) -> str:
        values = ", ".join(f"{value:.4f}" for value in _drawn(weight, _WIDTH * 5))
        return f"""{weight}_graph () => (float[3, 1, 5] {weight}_out)
            <float[{_WIDTH}, 5] {weight} = {{{values}}}> {{ [product] {weight}_out = MatMul(x, {weight}) }}"""

    return _model(
        f"""[abs] positive = Abs(x) [most] most = ReduceMax<keepdims = 0>(positive)
            [less] small = Less(most, limit)
            [if] y = If(small) <then_branch = {branch("w0")}, else_branch = {branch("w1")}>""",
        limit=np.float32(2),
    )


_PRODUCTS = "[left] a = MatMul(x, w0) [right] b = MatMul(x, w1) [add] c = Add(b, bias) [sub] y = Sub(a, c)"
_GEMM = "[flatten] f = Flatten<axis = 2>(x) [gemm] y = Gemm"
_NORMALIZED = """[product] a = MatMul(x, w) [residual] s = Add(a, x)
    [normalization] n = LayerNormalization(s, scale, shift) [add] m = Add(n, constant)
    [again] y = LayerNormalization(m, scale, shift)"""
_VECTORS = {"scale": (_WIDTH,), "shift": (_WIDTH,), "constant": (_WIDTH,)}
_STATE = {"state": (1, 1, _HIDDEN), "cell": (1, 1, _HIDDEN), "P": (1, 3 * _HIDDEN)}
MODELS = {
    "products": lambda: _model(_PRODUCTS, w0=(_WIDTH, 5), w1=(_WIDTH, 5), bias=(5,)),
    "gemm": lambda: _model(f"{_GEMM}(f, w, bias)", w=(_WIDTH, 5), bias=(5,)),
    "gemm transposed": lambda: _model(f"{_GEMM}<transB = 1>(f, w, bias)", w=(5, _WIDTH), bias=(5,)),
    "product of one column": lambda: _model("[product] y = MatMul(x, w)", w=(_WIDTH, 1)),
    "gemm of one column": lambda: _model(f"{_GEMM}(f, w, bias)", w=(_WIDTH, 1), bias=(1,)),
    "gemm of one row": lambda: _model(f"{_GEMM}<transB = 1>(f, w)", w=(1, _WIDTH)),
    "gemm without bias": lambda: _model(f"{_GEMM}<transB = 1>(f, w)", w=(5, _WIDTH)),
    "lstm": _lstm,
    "lstm of two directions": lambda: _lstm(2),
    "lstm with all inputs": lambda: _lstm(
        more=", lengths, state, cell, P", lengths=np.array([2], np.int32), **_STATE
    ),
    "attention": _attention,
    "attention with a mask": lambda: _attention("a, w, bias, mask", ", unidirectional = 1"),
    "bodies": _in_body,
    "normalized": lambda: _model(_NORMALIZED, w=(_WIDTH, _WIDTH), **_VECTORS),
}


def _space(model: Model, *labels: str) -> SchemeSpace:
    rules = replace(QuantizeRules(), labels=labels)  # type: ignore[arg-type]
    return SchemeSpace(model, OnnxRuntime().capabilities(), rules=rules)


def _inserted(model: Model, weights: str = "integer") -> onnx.ModelProto:
    space = _space(model)
    placement = space.resolve(space.uniform("dynamic"))
    numbers = Quantizer(model, {}, reduce_range=True)
    return insert_qdq(model, placement, numbers, floating=floating(placement.sites, weights)).proto


def _run(proto: onnx.ModelProto, width: int = _WIDTH) -> npt.NDArray[np.float32]:
    x = np.random.default_rng(0).standard_normal((3, 1, width)).astype(np.float32)
    return outputs_of(proto, {"x": x}, "ENABLE_ALL")[0]


@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_has_one_kernel_for_each_operator_with_results_close_to_the_float_model(
    name: str, tmp_path: Path
) -> None:
    model = MODELS[name]()
    expected, found = _run(model.proto), _run(_inserted(model))
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    kernels = Counter(kernels_of(_inserted(model), tmp_path))
    fused = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeLSTM", "QAttention")
    assert sum(kernels[op_type] for op_type in fused) == {"products": 2, "bodies": 2}.get(name, 1)
    left = {"Attention", "MatMul", "Gemm", "LSTM", "MatMulInteger", "DequantizeLinear", "Transpose"}
    assert not left & kernels.keys()


def test_a_residual_sum_is_not_fused_with_its_normalization(tmp_path: Path) -> None:
    model = MODELS["normalized"]()
    assert kernels_of(model, tmp_path).count("SkipLayerNormalization") == 1
    kernels = Counter(kernels_of(_inserted(model), tmp_path))
    assert (kernels["Sum"], kernels["Add"], kernels["LayerNormalization"]) == (1, 1, 2)
    assert "SkipLayerNormalization" not in kernels


@pytest.mark.parametrize("name", MODELS)
def test_strip_import_and_scheme_invert_the_insertion(name: str, tmp_path: Path) -> None:
    """Without the original, values of stored weights are not restored."""
    model = MODELS[name]()
    for weights in ("float", "integer"):
        quantized = Model(_inserted(model, weights))
        restored = strip_qdq(quantized, model)
        assert bytes_of(restored.proto) == bytes_of(model.proto)
        assert restored.notes[-1] == "equal to the reference"
        alone = Model(strip_qdq(quantized).proto)
        assert weights == "integer" or bytes_of(alone.proto) == bytes_of(model.proto)
        nodes = [[n.proto for n in each.nodes if not n.is_marker] for each in (alone, model)]
        assert nodes[0] == nodes[1]
        assert alone.proto.opset_import == model.proto.opset_import
        assert alone.constants.keys() == model.constants.keys()
    imported = import_placement(quantized, model)
    assert imported.notes == ()
    space, placement = _space(model), imported.placement
    assert labels_of(space, placement) == space.uniform("dynamic")
    pairs = Quantizer(model, {}, reduce_range=True).placed(placement)
    SchemeFile(backend="onnxruntime", pairs=pairs).write(tmp_path / "scheme.json")
    assert bytes_of(SchemeFile.read(tmp_path / "scheme.json").apply(model).proto) == bytes_of(quantized.proto)


@pytest.mark.parametrize(("directions", "width"), [(1, 24), (2, 32), (1, 256), (2, 300)])
def test_an_lstm_with_a_scale_for_each_row_comes_back(directions: int, width: int, tmp_path: Path) -> None:
    model = _lstm(directions, width)
    quantized = _dynamic(model, tmp_path, per_channel=True, weights=QuantType.QInt8)
    imported = import_placement(quantized, model)
    assert imported.notes == ()
    imported.write(tmp_path / "scheme.json")
    applied = Model(SchemeFile.read(tmp_path / "scheme.json").apply(model).proto)
    after, before = (
        next(node for node in each.nodes if node.op_type == "DynamicQuantizeLSTM")
        for each in (applied, quantized)
    )
    for index in (8, 10):
        np.testing.assert_array_equal(
            applied.array(after.inputs[index]), quantized.array(before.inputs[index])
        )
    np.testing.assert_array_equal(_run(applied.proto, width), _run(quantized.proto, width))
    found = diff_models(quantized, applied)
    assert [*found.added, *found.removed, *found.changed] == []


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    "name",
    ["products", "gemm transposed", "lstm", "lstm of two directions", "attention", "attention with a mask"],
)
def test_strip_and_import_invert_quantize_dynamic(name: str, per_channel: bool, tmp_path: Path) -> None:
    model = MODELS[name]()
    quantized = _dynamic(model, tmp_path, per_channel=per_channel, weights=QuantType.QInt8)
    kernels = ("MatMulInteger", "DynamicQuantizeLSTM", "QAttention")
    assert any(node.op_type in kernels for node in quantized.nodes)
    stripped = strip_qdq(quantized, model).proto
    assert np.array_equal(_run(stripped), _run(model.proto))
    assert not name.startswith("attention") or bytes_of(stripped) == bytes_of(model.proto)
    domains = {opset.domain for opset in stripped.opset_import}
    assert (CONTRIBUTED in domains) == name.startswith("attention")
    imported, space = import_placement(quantized, model), _space(model)
    assert imported.notes == ()
    assert labels_of(space, imported.placement) == space.uniform("dynamic")


@pytest.mark.parametrize("stored", ["external", "nodes"])
@pytest.mark.parametrize("name", ["gemm transposed", "lstm", "lstm of two directions"])
def test_strip_transposes_weights_wherever_they_are_stored(name: str, stored: str, tmp_path: Path) -> None:
    """The reference has these weights transposed; they may be external data or in Constant nodes."""
    model = MODELS[name]()
    proto = _dynamic(model, tmp_path, weights=QuantType.QInt8).proto
    if stored == "external":
        onnx.save(proto, tmp_path / "stored.onnx", save_as_external_data=True, size_threshold=0)
    else:
        for tensor in reversed(proto.graph.initializer):
            proto.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
        del proto.graph.initializer[:]
        onnx.save(proto, tmp_path / "stored.onnx")
    stripped = strip_qdq(load_model(tmp_path / "stored.onnx"), model)
    assert "equal to the reference" in stripped.notes
    assert np.array_equal(_run(stripped.proto), _run(model.proto))


def _convolutions() -> Model:
    """A convolution with a bias and most attributes, then one without, of two groups."""
    return _model(
        """[batch] x3 = Unsqueeze(x, axes) [channels] x4 = Transpose<perm = [0, 2, 1, 3]>(x3)
           [first] a = Conv<pads = [1, 0, 0, 1], strides = [1, 2], dilations = [1, 1], kernel_shape = [2, 3]>
               (x4, k0, bias)
           [relu] b = Relu(a) [second] y = Conv<group = 2>(b, k1)""",
        axes=np.array([0]), k0=(4, 1, 2, 3), bias=(4,), k1=(6, 2, 1, 1),
    )  # fmt: skip


def _dynamic(
    model: Model, folder: Path, *, per_channel: bool = False, weights: QuantType = QuantType.QUInt8
) -> Model:
    """The model that `quantize_dynamic` makes of it."""
    onnx.save(model.proto, folder / "float.onnx")
    quantize_dynamic(
        folder / "float.onnx", folder / "int8.onnx", per_channel=per_channel, weight_type=weights
    )
    return load_model(folder / "int8.onnx")


@pytest.mark.parametrize("per_channel", [False, True])
def test_strip_restores_convolutions_from_quantize_dynamic(per_channel: bool, tmp_path: Path) -> None:
    model = _convolutions()
    quantized = _dynamic(model, tmp_path, per_channel=per_channel)
    assert sum(node.op_type == "ConvInteger" for node in quantized.nodes) == 2
    restored = strip_qdq(quantized, model)
    assert bytes_of(restored.proto) == bytes_of(model.proto)
    assert "equal to the reference" in restored.notes
    alone = strip_qdq(quantized)
    assert [node.op_type for node in alone.proto.graph.node] == [node.op_type for node in model.nodes]
    assert not any(note.startswith("not removed") for note in alone.notes)
    found, expected = _run(alone.proto), _run(quantized.proto)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()  # activations were 8 bits
    sites = import_placement(quantized, model).placement.sites
    assert {site.tensor for site in sites} == {"x4", "k0", "b", "k1"}
    assert {site.format for site in sites if not site.weight} == {RUN_TIME}


def test_strip_restores_convolutions_with_weights_of_constant_nodes(tmp_path: Path) -> None:
    """`quantize_dynamic` quantizes such weights in each run; here the bias is added by a node of the model itself."""
    proto = _convolutions().proto
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    constants["shape"] = numpy_helper.from_array(np.array([1, -1, 1, 1], np.int64), "shape")
    del proto.graph.initializer[:]
    first = next(node for node in proto.graph.node if node.name == "first")
    del first.input[2]
    first.output[0] = "without"
    at = [node.name for node in proto.graph.node].index("first") + 1
    proto.graph.node.insert(at, helper.make_node("Add", ["without", "shaped"], ["a"], "add"))
    proto.graph.node.insert(at, helper.make_node("Reshape", ["bias", "shape"], ["shaped"], "shaped"))
    for name, tensor in reversed(constants.items()):
        proto.graph.node.insert(0, helper.make_node("Constant", [], [name], f"{name}_node", value=tensor))
    model = Model(proto)
    quantized = _dynamic(model, tmp_path)
    assert Counter(n.op_type for n in quantized.nodes)["DynamicQuantizeLinear"] == 4
    assert bytes_of(strip_qdq(quantized, model).proto) == bytes_of(proto)
    alone = strip_qdq(quantized)
    assert alone.notes == ()
    np.testing.assert_allclose(_run(alone.proto), _run(proto), rtol=1e-5, atol=1e-6)
    imported = import_placement(quantized, model)
    weights = [pair for pair in imported.pairs if pair.site.weight]
    assert {pair.site.tensor for pair in weights} == {"k0", "k1"}
    for pair in weights:
        values = numpy_helper.to_array(constants[pair.site.tensor])
        assert pair.scale == pytest.approx([(max(values.max(), 0) - min(values.min(), 0)) / 255])


def test_strip_restores_a_model_whose_tool_stored_weights_otherwise_and_dropped_unread_ones(
    tmp_path: Path,
) -> None:
    proto = _convolutions().proto
    bias = next(tensor for tensor in proto.graph.initializer if tensor.name == "bias")
    values = numpy_helper.to_array(bias).tolist()
    bias.ClearField("raw_data")
    bias.float_data.extend(values)
    proto.graph.initializer.append(numpy_helper.from_array(_drawn("unread", 3), "unread"))
    model = Model(proto)
    assert bytes_of(strip_qdq(_dynamic(model, tmp_path), model).proto) == bytes_of(proto)


def test_kernels_with_computed_weights_are_not_changed() -> None:
    model = _model(
        """[quantize] q, s, z = DynamicQuantizeLinear(x) [transpose] t = Transpose<perm = [0, 2, 1]>(q)
           [product] p = MatMulInteger(q, t, z, z) [cast] y = Cast<to = 1>(p)"""
    )
    assert with_pairs(model) is model
    assert bytes_of(strip_qdq(model).proto) == bytes_of(model.proto)


def test_metadata_that_does_not_fit_the_graph_is_ignored() -> None:
    proto = _inserted(MODELS["products"]())
    for node in proto.graph.node:
        for entry in node.metadata_props:
            entry.value = "damaged" if entry.key == "qdqspec.replaced" else entry.value
    stripped = strip_qdq(Model(proto), MODELS["products"]()).proto
    assert [node.op_type for node in stripped.graph.node] == ["MatMul", "MatMul", "Add", "Sub"]


def _tied() -> Model:
    """An embedding whose transpose is also the weight of the last product, as in language models."""
    return _model(
        """[embedding] start = Gather(table, token) [add] sum = Add(x, start) [inner] inner = Tanh(sum)
           [transpose] weight = Transpose<perm = [1, 0]>(table) [head] logits = MatMul(inner, weight)
           [end] y = Neg(logits)""",
        table=(40, _WIDTH), token=np.array(3),
    )  # fmt: skip


def test_a_transposed_embedding_is_quantized_as_a_weight(tmp_path: Path) -> None:
    given = _tied()
    folded = fold_weights(given)
    assert folded.computed == ("transpose",)
    quantized = _inserted(folded.model)
    kernels = kernels_of(quantized, tmp_path)
    assert kernels.count("DynamicQuantizeMatMul") == 1
    assert "Transpose" not in kernels
    error = np.abs(_run(quantized) - _run(given.proto)).max()
    assert 0 < error < 0.05 * np.abs(_run(given.proto)).max()
    placement = _space(folded.model).resolve({"head": "dynamic"})
    pairs = Quantizer(folded.model, {}, reduce_range=True).placed(placement)
    SchemeFile(backend="onnxruntime-cpu", pairs=pairs).write(tmp_path / "scheme.json")
    applied = SchemeFile.read(tmp_path / "scheme.json").apply(given)
    (note,) = applied.notes
    assert note.startswith("weights computed, 1 node")
    np.testing.assert_array_equal(_run(applied.proto), _run(quantized))
    assert bytes_of(strip_qdq(Model(quantized), given).proto) == bytes_of(given.proto)


def _recurrent(op_type: str, gates: int, inputs: str = "", attributes: str = "") -> Model:
    weights = {"W": (1, gates * _HIDDEN, _WIDTH), "R": (1, gates * _HIDDEN, _HIDDEN)}
    text = f"[cell] h = {op_type}<hidden_size = {_HIDDEN}{attributes}>(x, W, R) [end] y = Neg(h)"
    return _model(text, inputs=inputs, **({} if inputs else weights))


REASONS = [
    (_recurrent("GRU", 3), "GRU: there is no integer kernel of it, as DynamicQuantizeLSTM is of LSTM"),
    (_recurrent("LSTM", 4, attributes=", layout = 1"),
     "LSTM: DynamicQuantizeLSTM takes float32 only, and no attribute layout"),
    (_recurrent("LSTM", 4, ", float[1, 16, 8] W, float[1, 16, 4] R"),
     "LSTM: its weights W and R are computed from inputs, and DynamicQuantizeLSTM needs constant ones"),
    (_recurrent("LSTM", 4), ""),
    (_attention("a, w, bias, mask"), ""),
    (_attention("a, w"), "Attention: QAttention needs a constant weight, and a bias"),
    (_attention(attributes=", qkv_hidden_sizes = [8, 8, 8]"), f"Attention: {_TAKES}"),
    (_attention("a, w, bias, mask, past", past=(2, 3, 2, 4, _WIDTH // 2)), f"Attention: {_TAKES}"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "reason"), REASONS)
def test_the_reason_of_an_operator_without_dynamic_label(model: Model, reason: str) -> None:
    found = judge(model, OnnxRuntime().capabilities(), backend="onnxruntime").reasons
    assert found.get("cell", found.get("attention")) == reason


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        ("[node] h = Attention<q_num_heads = 2, kv_num_heads = 2>(x, w, bias) [end] y = Neg(h)", 23),
        ("[flat] f = Flatten<axis = 2>(x) [node] y = Gemm<alpha = 0.5>(f, matrix)", 17),
        ("[node] y = MatMul(x, x)", 17),
    ],
    ids=["attention of ONNX", "scaled", "no weight"],
)
def test_operators_without_a_dynamic_kernel_have_no_dynamic_label(text: str, opset: int) -> None:
    weights = {"w": (3, 1, _WIDTH), "bias": (3, 1, _WIDTH), "matrix": (_WIDTH, 5)}
    assert not _space(_model(text, opset, **weights)).uniform("dynamic")


def test_dynamic_labels_need_no_calibrated_range() -> None:
    space = _space(MODELS["products"]()).known(())
    assert space.by_id["left"].labels == ("fp", "dynamic")
    placement = space.resolve(space.uniform("dynamic"))
    assert {site.format for site in placement.sites if not site.weight} == {RUN_TIME}
