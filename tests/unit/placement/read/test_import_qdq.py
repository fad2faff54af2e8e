"""Placements are imported from models that other tools, training or a person quantized."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx_text import outputs_of, parsed
from random_models import ranges_for

from qdqspec.graph.fold import fold_weights
from qdqspec.graph.model import Model, load_model
from qdqspec.qdq.diff import diff_models
from qdqspec.qdq.import_qdq import Imported, import_placement
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.lint.view import View
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Consumer, Placement, Site

DATA = Path(__file__).parents[3] / "data"
LEVELS = onnxruntime.GraphOptimizationLevel
IMAGES = np.random.default_rng(5).uniform(size=(6, 1, 1, 16, 16)).astype(np.float32)

# of Model-Optimizer, NNCF, ONNX Runtime's two recipes, and training
DIALECTS = (
    "qdq_modelopt_digits_resnet", "qdq_nncf_digits_resnet", "qdq_ort_s8s8_digits_resnet_b1",
    "qdq_ort_u8s8_digits_resnet_b1", "digits_resnet_qat_qdq",
)  # fmt: skip


def reapplied(model: Model, imported: Imported, folder: Path, reference: Model | None = None) -> Model:
    """The model after import, strip, writing the scheme and applying it."""
    scheme = folder / "scheme.json"
    replace(imported, positions={}).write(scheme)
    stripped = Model(strip_qdq(model, reference).proto, path=model.path)
    return Model(SchemeFile.read(scheme).apply(stripped).proto, path=model.path)


def ran(model: Model, level: LEVELS, folder: Path) -> tuple[list[np.ndarray], Counter[str]]:
    """The outputs of the model, and the number of nodes of each operator in the optimized graph."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    session = onnxruntime.InferenceSession(model.proto.SerializeToString(), options)
    answers = [session.run(None, {model.inputs[0]: image})[0] for image in IMAGES]
    optimized = onnx.load(options.optimized_model_filepath)
    return answers, Counter(node.op_type for node in optimized.graph.node)


def net(text: str, opset: int = 21, **constants: object) -> Model:
    return parsed(text, opset, ir=10, **constants)


F32 = np.float32
ONE = {"s": np.array(0.5, F32), "z": np.array(3, np.uint8)}


@pytest.mark.parametrize("level", [LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL], ids=["plain", "optimized"])
@pytest.mark.parametrize("renamed", [False, True], ids=["own names", "names of the reference"])
@pytest.mark.parametrize("name", DIALECTS)
def test_an_imported_and_reapplied_model_computes_the_same(
    name: str, renamed: bool, level: LEVELS, models: Path, tmp_path: Path
) -> None:
    """The outputs are equal bit for bit, without and with optimization, and the kernels are the same."""
    model = load_model(DATA / f"{name}.onnx")
    reference = load_model(models / "digits_resnet.onnx") if renamed else None
    imported = import_placement(model, reference)
    again = reapplied(model, imported, tmp_path, reference)
    assert sum(node.op_type == "DequantizeLinear" for node in again.nodes) == len(imported.pairs)
    ours, kernels = ran(again, level, tmp_path)
    theirs, wanted = ran(model, level, tmp_path)
    for mine, its in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, its)
    if level == LEVELS.ORT_ENABLE_ALL:
        assert kernels == wanted


def test_pairs_that_do_not_fit_another_model_are_reported(models: Path) -> None:
    quantized = load_model(DATA / "qdq_nncf_digits_resnet.onnx")
    other = load_model(models / "squeezenet10.onnx")
    placement, notes = import_placement(quantized, other).placement_for(other)
    assert placement.sites == frozenset()
    assert any("the model has no node '" in note for note in notes)
    assert len(notes) == 5
    assert notes[-1].endswith("more tensors without a place in this model")


def test_integers_of_weights_that_the_reference_does_not_have_are_no_part_of_the_scheme_and_named() -> None:
    weight, ends = (
        np.linspace(-4, 4, 16, dtype=np.float32).reshape(4, 4),
        "g (float[2,4] x) => (float[2,4] y)",
    )
    original = net(f"{ends} {{ h = MatMul(x, w)  y = Relu(h) }}", w=weight)
    numbers = {"s": np.float32(1), "z": np.int8(0), "lo": np.int8(-2), "hi": np.int8(2)}
    pair = "q = QuantizeLinear(w, s, z)  c = Clip(q, lo, hi)  d = DequantizeLinear(c, s, z)"
    quantized = net(f"{ends} {{ {pair}  k = MatMul(x, d)  y = Relu(k) }}", 19, w=weight, **numbers)
    (note,) = import_placement(
        quantized, original
    ).notes  # neither names of nodes nor tensors are those there
    assert note.startswith("weights that the reference does not have, 1: 'd'")


def test_pairs_of_nameless_nodes_with_other_numbers_in_the_reference_are_not_moved(tmp_path: Path) -> None:
    """The original has a Constant node more, for which the quantized model has an initializer."""
    ends, random = "g (float[2,4] x) => (float[2,4] y)", np.random.default_rng(0)
    weights = {name: random.normal(size=(4, 4)).astype(F32) for name in "abcd"}
    rest = "f = Tanh(e)  h = MatMul(f, {})  i = Tanh(h)  j = MatMul(i, c)  y = Tanh(j)"
    original = net(
        f"{ends} {{ o = Constant<value = float {{1}}>()  k = Mul(x, o)  e = MatMul(k, a)  {rest.format('b')} }}",
        **weights,
    )
    pair = "t = DequantizeLinear(b_int, s, z)"
    numbers = {
        "b_int": np.clip(np.rint(weights["b"] / F32(0.02)), -128, 127).astype(np.int8),
        "s": F32(0.02),
        "z": np.int8(0),
    }
    quantized = net(
        f"{ends} {{ {pair}  k = Mul(x, o)  e = MatMul(k, a)  {rest.format('t')} }}",
        o=F32(1),
        **numbers,
        **weights,
    )
    imported = import_placement(quantized, original)
    assert [(pair.site.tensor, pair.site.consumers) for pair in imported.pairs] == [
        ("b", (Consumer("MatMul#4", 1),))
    ]
    imported.write(tmp_path / "scheme.json")
    assert diff_models(Model(SchemeFile.read(tmp_path / "scheme.json").apply(original).proto), quantized).same
    assert diff_models(original, Model(strip_qdq(quantized, original).proto)).same


_LSTM = "LSTM<hidden_size = 4>"


@pytest.mark.parametrize(
    ("original", "quantized", "reader"),
    [
        # by their names, which are numbers, the nodes would be others
        (
            "[n0] h = Tanh(x)  [n1] t = Tanh(h)  [n2] y = Tanh(t)",
            "[n0] {pair}  [n2] h = Tanh(a)  [n3] t = Tanh(h)  [n4] y = Tanh(t)",
            "n0",
        ),
        # of nodes without names, whose first output has none
        (
            f'"", h = {_LSTM}(x, v, r)  "", y = {_LSTM}(h, v, r)',
            f'{{pair}}  "", h = {_LSTM}(a, v, r)  "", y = {_LSTM}(h, v, r)',
            "LSTM#0",
        ),
    ],
    ids=["numbers", "LSTM"],
)
def test_a_reader_is_the_node_of_the_reference_that_makes_its_tensor(
    original: str, quantized: str, reader: str
) -> None:
    pair = "q = QuantizeLinear(x, s, z) [n1] a = DequantizeLinear(q, s, z)"
    made, known = (
        net(f"g (float[2,1,4] x) => (y) {{ {text} }}", v=(1, 16, 4), r=(1, 16, 4), **ONE)
        for text in (quantized.format(pair=pair), original)
    )
    (found,) = import_placement(made, known).pairs
    assert found.site.consumers == (Consumer(reader, 0),)


def test_each_pair_of_a_shared_weight_keeps_its_own_integers(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(F32)
    ends = "g (float[2,4] x) => (float[2,4] y)"
    original = net(f"{ends} {{ [m] h = MatMul(x, w)  [n] y = MatMul(h, w) }}", w=weight)
    nearest = np.clip(np.rint(weight / F32(0.02)), -127, 127).astype(np.int8)
    moved = np.where(np.arange(16).reshape(4, 4) % 2, nearest, np.floor(weight / F32(0.02))).astype(np.int8)
    pairs = "a = DequantizeLinear(i, s)  b = DequantizeLinear(j, s)"
    quantized = net(
        f"{ends} {{ {pairs}  [m] h = MatMul(x, a)  [n] y = MatMul(h, b) }}", i=moved, j=nearest, s=F32(0.02)
    )
    again = reapplied(original, import_placement(quantized, original), tmp_path)
    assert diff_models(again, quantized).same


def test_a_quantizer_with_several_readers_is_one_site() -> None:
    model = net(
        """g (float[4] x) => (float[4] y) { q = QuantizeLinear(x, s, z)
            a = DequantizeLinear(q, s, z)  b = DequantizeLinear(q, s, z)  y = Add(a, b) }""",
        **ONE,
    )
    (pair,) = import_placement(model).pairs
    ends = (Consumer("Add#0", 0), Consumer("Add#0", 1))
    assert pair.site == Site(tensor="x", consumers=ends, format="uint8")
    assert (pair.scale, pair.zero_point) == ((0.5,), (3,))


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ("q = QuantizeLinear(x, s)  a = DequantizeLinear(q, s)", "uint8"),
        ("q = QuantizeLinear<output_dtype = 3>(x, s)  a = DequantizeLinear(q, s)", "int8"),
        (
            """z = Constant<value = int8 {0}>()  q = com.microsoft.QuantizeLinear(x, s, z)
               a = com.microsoft.DequantizeLinear(q, s, z)""",
            "int8",
        ),
    ],
    ids=["no zero point", "output_dtype", "another domain"],
)
def test_the_format_of_a_pair(nodes: str, kind: str) -> None:
    model = net(f"g (float[4] x) => (float[4] y) {{ {nodes}  y = Neg(a) }}", s=ONE["s"])
    (pair,) = import_placement(model).pairs
    assert (pair.site.format, pair.zero_point) == (kind, (0,))


@pytest.mark.parametrize(
    ("shape", "axis", "expected"), [((), 1, None), ((1,), 1, None), ((1,), 0, 0), ((4,), -1, 1)]
)
def test_one_scale_is_per_tensor_unless_the_axis_has_one_element(shape, axis, expected) -> None:
    model = net(
        f"""g (float[1,4] x) => (float[1,4] y)
           {{ q = QuantizeLinear<axis = {axis}>(x, s)  a = DequantizeLinear<axis = {axis}>(q, s)  y = Neg(a) }}""",
        s=np.full(shape, 0.5, F32),
    )
    (pair,) = import_placement(model).pairs
    assert (pair.site.axis, len(pair.scale)) == (expected, max(1, int(np.prod(shape))))


def int8(name: str, made: str) -> str:
    return f"{made} {name} = Cast<to = 3>({name}_wide)"


CONSTANT_NUMBERS = {
    "value_float": "t = Constant<value_float = 0.5>() k = Constant<value_floats = [0.25, 0.5]>()",
    "identity": "t = Identity(s) i = Constant<value_floats = [0.25, 0.5]>() k = Identity(i)",
    "computed": "t = Mul(two, quarter) i = Add(row, row) f = Constant<value_ints = [-1]>() k = Reshape(i, f)",
    "cast": "h = Cast<to = 10>(s) t = Cast<to = 1>(h) i = Cast<to = 10>(ends) k = Cast<to = 1>(i)",
}
CONSTANT_ZEROS = {
    "value_int": int8("z", "z_wide = Constant<value_int = 3>()")
    + int8("v", "v_wide = Constant<value_ints = [0, 0]>()"),
    "identity": "z = Identity(three) o = Identity(zeros) v = Identity(o)",
    "expanded": "z = Squeeze(threes) n = Constant<value_ints = [2]>() v = ConstantOfShape<value = int8[1] {0}>(n)",
}


@pytest.mark.parametrize("zeros", CONSTANT_ZEROS.values(), ids=CONSTANT_ZEROS)
@pytest.mark.parametrize("scales", CONSTANT_NUMBERS.values(), ids=CONSTANT_NUMBERS)
def test_numbers_that_constants_determine_are_constants(scales: str, zeros: str) -> None:
    text = """g (float[2,2] x) => (float[2,2] y) {{ {numbers}
        q = QuantizeLinear(x, t, z)  a = DequantizeLinear(q, t, z)
        {stored} w = DequantizeLinear<axis = 1>(stored, k, v)  [product] y = MatMul(a, w) }}"""
    own = {
        "s": np.array(0.5, F32), "two": np.array(2, F32), "quarter": np.array(0.25, F32), "three": np.array(3, np.int8),
        "row": np.array([[0.125, 0.25]], F32), "ends": np.array([0.25, 0.5], F32), "threes": np.array([3], np.int8),
        "zeros": np.zeros(2, np.int8), "integers": np.array([[1, 2], [3, 4]], np.int8),
    }  # fmt: skip
    made = net(text.format(numbers=scales + zeros, stored="stored = Identity(integers)"), **own)
    plain = net(
        text.format(numbers="", stored=""),
        t=np.array(0.5, F32), z=np.array(3, np.int8), k=np.array([0.25, 0.5], F32), v=np.zeros(2, np.int8),
        stored=np.array([[1, 2], [3, 4]], np.int8),
    )  # fmt: skip
    imported = import_placement(made)
    assert imported.notes == ()
    assert {(pair.scale, pair.zero_point) for pair in imported.pairs} == {
        ((0.5,), (3,)),
        ((0.25, 0.5), (0, 0)),
    }
    assert diff_models(made, plain).same
    stripped = strip_qdq(made)
    assert stripped.notes == strip_qdq(plain).notes
    assert [node.op_type for node in stripped.proto.graph.node] == ["MatMul"]
    assert View(made, "onnxruntime-cpu").pairs[0][1].same_scale(View(plain, "onnxruntime-cpu").pairs[0][1])
    findings = [
        [(found.id, found.message) for found in lint_model(model, "onnxruntime-cpu")]
        for model in (made, plain)
    ]
    assert findings[0] == findings[1]


FIRST = "q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)"


@pytest.mark.parametrize(
    ("first", "scales", "noted"),
    [
        (FIRST, [0.75], True),
        (f"{FIRST}  u = Abs(a)", [0.5, 0.75], True),
        ("a = DequantizeLinear(i, s)  u = Mul(x, a)", [0.5, 0.75], True),
        (FIRST.replace("s, z", "k, n"), [0.75], False),
    ],
    ids=["twice", "read between", "a weight", "the same twice"],
)
def test_a_repeated_pair_is_merged_and_a_different_second_pair_is_noted(
    first: str, scales: list[float], noted: bool
) -> None:
    u = "" if "u =" in first else "u = Neg(x)"
    model = net(
        f"""g (float[4] x) => (float[4] y, float[4] u) {{ {first} {u}
            p = QuantizeLinear(a, k, n)  b = DequantizeLinear(p, k, n)  y = Neg(b) }}""",
        **ONE, i=np.arange(4, dtype=np.int8), k=np.array(0.75, F32), n=np.array(0, np.int8),
    )  # fmt: skip
    imported = import_placement(model)
    assert sorted(pair.scale[0] for pair in imported.pairs) == scales
    said = any("quantized again at once, with other numbers" in note for note in imported.notes)
    assert said is noted is bool(imported.notes)


UNSAYABLE = {
    "is computed":
        "t = ReduceMax<keepdims = 0>(x)  q = QuantizeLinear(x, t, z)  a = DequantizeLinear(q, t, z)  y = Neg(a)",
    "other numbers than its QuantizeLinear":
        "q, f = trt.TRT_FP4DynamicQuantize<axis = -1, block_size = 4, scale_type = 17>(x, s)"
        "  c = DequantizeLinear(f, quarter)  a = DequantizeLinear<axis = -1, block_size = 4>(q, c)  y = Neg(a)",
    "int8 in blocks of 2": "w = DequantizeLinear<axis = 1, block_size = 2>(blocks, four)  y = Add(x, w)",
    "is float8e5m2, which schemes do not carry":
        "q = QuantizeLinear<output_dtype = 19>(x, s)  a = DequantizeLinear(q, s)  y = Neg(a)",
    "makes a graph output of a constant": "y = DequantizeLinear(blocks, s)",
    "a scale that is zero": "q = QuantizeLinear(x, none)  a = DequantizeLinear(q, none)  y = Neg(a)",
    "reads what no QuantizeLinear made, but a graph input": "a = DequantizeLinear(k, s, z)  y = Neg(a)",
    "operators of domain trt": "q = trt.TRT_INT4QuantizeLinear(x, s)  y = Neg(x)",
}  # fmt: skip


@pytest.mark.parametrize("words", UNSAYABLE)
def test_pairs_that_a_scheme_cannot_represent_are_noted(words: str) -> None:
    numbers = {"quarter": np.array(0.25, F32), "none": np.array(0, F32), "four": np.ones((2, 2), F32)}
    text = f"g (float[2,4] x, uint8[2,4] k) => (float[2,4] y) {{ {UNSAYABLE[words]} }}"
    imported = import_placement(net(text, **ONE, **numbers, blocks=np.ones((2, 4), np.int8)))
    assert imported.pairs == ()
    assert any(words in note for note in imported.notes), imported.notes


@pytest.mark.parametrize(("integers", "fits"), [([2**30 + 1, 5], False), ([2**20 + 1, -7], True)])
def test_integers_that_a_float_weight_cannot_reproduce_are_reported(integers: list[int], fits: bool) -> None:
    model = net(
        "g (float[2] x) => (float[2] y) { b = DequantizeLinear(i, s)  y = Add(x, b) }",
        i=np.array(integers, np.int32), s=np.array(1e-3, F32),
    )  # fmt: skip
    imported = import_placement(model)
    assert [pair.site.format for pair in imported.pairs] == ["int32"]
    text = "steps away from its integers: float32 cannot hold its integers"
    assert [text in note for note in imported.notes] == ([] if fits else [True])


def test_a_consumer_that_raising_the_opset_replaced_is_that_of_the_reference() -> None:
    """In opset 13, a Softmax over several axes becomes Shape, Flatten, Softmax and Reshape."""
    model = net(
        "g (float[2,3,4] x) => (float[2,3,4] y, float[2,3,4] z) { "
        "a = Relu(x) y = Softmax<axis = 1>(a) z = Neg(a) }",
        opset=12,
    )
    site = Site(tensor="a", consumers=(Consumer("Softmax#1", 0),), format="uint8")
    both = Site(tensor="a", consumers=(Consumer("Neg#2", 0), Consumer("Softmax#1", 0)), format="uint8")
    quantizer = Quantizer(model, ranges_for(model))
    for placed in (site, both):
        inserted = Model(insert_qdq(model, Placement(sites=frozenset([placed])), quantizer).proto)
        assert inserted.opset == 13
        assert "Flatten" in {node.op_type for node in inserted.nodes}
        imported = import_placement(inserted, model)
        assert (imported.placement.sites, imported.notes) == ({placed}, ())


def test_integers_of_a_weight_that_tuning_folded_a_node_into_are_kept(tmp_path: Path) -> None:
    lots = np.random.default_rng(4)
    norm = {name: lots.uniform(0.5, 2, 4).astype(F32) for name in ("scale", "shift", "mean", "variance")}
    reference = net(
        "g (float[1,2,4,4] x) => (float[1,4,4,4] y) { [conv] c = Conv(x, w) "
        "[norm] y = BatchNormalization(c, scale, shift, mean, variance) }",
        w=(4, 2, 1, 1),
        **norm,
    )
    folded = fold_weights(reference).model
    ends, tensor = (Consumer("conv", 1),), folded.by_name["conv"].inputs[1]
    site = Site(tensor=tensor, consumers=ends, format="int8", axis=0, weight=True)
    nearest = Quantizer(folded, ranges_for(folded))
    moved = nearest.integer_weight(site) + lots.integers(-2, 3, (4, 2, 1, 1))
    stored = np.clip(moved, -127, 127).astype(np.int8)
    proto = insert_qdq(folded, Placement(sites=frozenset([site])), nearest).proto
    (integers,) = (one for one in proto.graph.initializer if one.name == f"{tensor}_quantized")
    integers.CopyFrom(numpy_helper.from_array(stored, integers.name))
    quantized = Model(proto)

    imported = import_placement(quantized, reference)
    assert imported.notes == ()
    imported.write(tmp_path / "scheme.json")
    again = Model(SchemeFile.read(tmp_path / "scheme.json").apply(reference).proto)
    dequantize = again.producer[again.by_name["conv"].inputs[1]]
    assert np.array_equal(again.array(dequantize.inputs[0]), stored)


def test_scales_of_a_weight_before_a_batch_normalization_are_not_for_the_folded_weight(
    tmp_path: Path,
) -> None:
    ends = "g (float[1,2,3,3] x) => (float[1,2,3,3] y)"
    weight = np.array([[[[1.0]], [[-0.5]]], [[[0.25]], [[1.0]]]], F32)
    channels = {"g": np.array([8, 3], F32), "b": np.zeros(2, F32), "v": np.ones(2, F32)}
    rest = "[n] y = BatchNormalization(c, g, b, b, v)"
    original = net(f"{ends} {{ [c] c = Conv(x, w)  {rest} }}", w=weight, **channels)
    pair = "q = QuantizeLinear(mod_w, s, z)  d = DequantizeLinear(q, s, z)"
    numbers = {"s": np.array(1 / 127, F32), "z": np.int8(0)}
    quantized = net(f"{ends} {{ {pair}  [c] c = Conv(x, d)  {rest} }}", mod_w=weight, **numbers, **channels)
    applied = reapplied(original, import_placement(quantized, original), tmp_path)
    assert [node.op_type for node in applied.nodes][-2:] == ["Conv", "BatchNormalization"]
    assert diff_models(applied, quantized).same

    folded = fold_weights(original).model
    name = folded.by_name["c"].inputs[1]
    site = Site(tensor=name, consumers=(Consumer("c", 1),), format="int8", weight=True)
    scheme = tmp_path / "other.json"
    pairs = [replace(pair, site=site) for pair in import_placement(quantized, original).pairs]
    SchemeFile(backend="imported", pairs=tuple(pairs)).write(scheme)
    found = diff_models(Model(SchemeFile.read(scheme).apply(folded).proto), quantized)
    assert [change.kind for pair in found.changed for change in pair.changes] == ["weight"]


@pytest.mark.parametrize(
    "change",
    [
        "c = Clip(q, low, high)",
        "c = Identity(q)",
        "t = Transpose(q)  c = Transpose(t)",
        "c = Reshape(q, shape)",
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_operators_between_the_pair_of_a_weight_are_part_of_its_integers(
    change: str, tmp_path: Path, *, is_known: bool
) -> None:
    """Brevitas stores weights of fewer bits by a Clip."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(16, 8)).astype(F32)
    ends = "g (float[4,16] x) => (float[4,8] y)"
    scales = {"s": np.full(8, 0.2, F32), "z": np.zeros(8, np.int8), "low": np.int8(-7), "high": np.int8(7)}
    text = f"q = QuantizeLinear<axis = 1>(w, s, z)  {change}  v = DequantizeLinear<axis = 1>(c, s, z)"
    model = net(f"{ends} {{ {text}  [m] y = MatMul(x, v) }}", w=weight, shape=np.array([16, 8]), **scales)
    reference = net(f"{ends} {{ [m] y = MatMul(x, w) }}", w=weight) if is_known else None
    imported = import_placement(model, reference)
    assert [pair.site.format for pair in imported.pairs] == ["int8"]
    assert imported.notes == ()
    feed = {"x": random.normal(size=(4, 16)).astype(F32)}
    again = reapplied(model, imported, tmp_path, reference)
    np.testing.assert_array_equal(outputs_of(again, feed)[0], outputs_of(model, feed)[0])
    assert [node.op_type for node in again.nodes] == ["DequantizeLinear", "MatMul"]
