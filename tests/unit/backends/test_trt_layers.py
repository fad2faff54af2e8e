"""TensorRT's layer information, profiles and lists of kernels: every recorded sample, and each irregularity in one."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx_text import saved

from qdqspec.backends.tensorrt.layers import (
    EngineNames,
    kernel_list_hash,
    metadata_names,
    parse_layers,
    read_layers,
    read_profile,
    read_times,
)
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.search import groups_of

DATA = Path(__file__).parents[2] / "data"
SAMPLES = DATA / "tensorrt" / "samples"


def text(name):
    return (SAMPLES / name).read_text(encoding="utf-8")


def layers_of(name, *, profiled=True):
    return parse_layers(text(f"{name}.graph.json"), text(f"{name}.profile.json") if profiled else None)


def graph(*layers, **more):
    return {"Layers": list(layers), "Bindings": ["x", "y"], **more}


def layer(name, kind="kgen", reads="Float", writes="Float", **more):
    inputs = [{"Name": f"in_{name}", "Format/Datatype": reads}]
    outputs = [{"Name": f"out_{name}", "Format/Datatype": writes}]
    return {"Name": name, "LayerType": kind, "Inputs": inputs, "Outputs": outputs, **more}


# ---- recorded samples ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.graph.json")), ids=lambda p: p.name)
def test_every_recorded_graph_is_parsed_and_all_times_of_its_profile_are_attributed(path):
    found = parse_layers(path.read_text())
    assert len(found) == len(json.loads(path.read_text())["Layers"])
    assert all(one.name and one.op_type for one in found)
    assert all(bool(one.nodes) != one.boundary for one in found)
    tensors = [tensor for one in read_layers(path.read_text()) for tensor in (*one.inputs, *one.outputs)]
    assert all(tensor.dtype for tensor in tensors)
    name = path.name.removesuffix(".graph.json")
    if (SAMPLES / f"{name}.profile.json").exists():
        found, profile = layers_of(name), read_profile(text(f"{name}.profile.json"))
        assert sum(one.milliseconds for one in found) == pytest.approx(sum(spent for _, spent in profile))
        assert len(found) == len(profile), "names of profile and graph match one to one"


def test_metadata_of_cask_and_myelin_layers_is_read_in_one_engine():
    """``--dumpLayerInfo`` writes one line per layer; the separator in metadata is not a line break."""
    exported = layers_of("trt10.16-mnist-detailed", profiled=False)
    found = {one.name: one for one in exported}
    assert found["node_conv2d + node_relu"].nodes == ("node_conv2d", "node_relu")
    assert found["__myl_AddMaxrSubExpSum_myl4_2"].nodes == ("node_linear_1", "node_softmax")
    cast = found["__myl_CastReshCast_myl4_4"]  # its metadata is empty
    assert (cast.boundary, cast.tensors, cast.precision) == (True, ("z",), "int32 > int64")
    log = text("trt10.16-mnist-dumpLayerInfo.log")
    printed = [line for line in log.split("\n") if line.startswith("Name: ")]
    assert [one.nodes for one in parse_layers({"Layers": printed})] == [one.nodes for one in exported]


def test_the_schema_of_tensorrt_11_is_read():
    found = {one.name: one for one in layers_of("trt11-mnist-detailed.excerpt", profiled=False)}
    convolution = found["node_conv2d_myl0_2"]
    assert (convolution.op_type, convolution.nodes) == ("correlation", ("node_conv2d", "node_relu"))
    assert convolution.precision == "fp32"
    assert found["__mye1085_myl0_0"].tensors == ("x",), "the engine's input, for a layer without a node"
    assert found["__myl_Move_myl0_1"].boundary


def test_compute_times_are_read_from_exports_of_all_versions():
    assert len(read_times(text("trt8-resnet50tf-rtx3090-fp32.times.json"))) == 30
    new = {"startEnqMs": 5, "startComputeMs": 4, "computeMs": 1.5, "h2dMs": 0, "latencyMs": 9}
    old = {"startInMs": 0, "inMs": 1, "computeMs": 2.5, "outMs": 1, "latencyMs": 9}
    assert read_times(json.dumps([new, old])) == (1.5, 2.5)


# ---- irregularities -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("Conv_1 || Conv_2", ("Conv_1", "Conv_2")),
        ("PWN(PWN(Sigmoid_1), Mul_2)", ("Sigmoid_1", "Mul_2")),
        ("w + Q_QuantizeLinear_3 + Conv_4 + PWN(Clip_5)", ("Q_QuantizeLinear_3", "Conv_4", "Clip_5")),
        ("{ForeignNode[MatMul_1...Softmax_9]}", ("MatMul_1", "Softmax_9")),
        ("{ForeignNode[18 + (Unnamed Layer* 1) [Shuffle]...If_6_OutputLayer]}", ("18", "If_6_OutputLayer")),
        ("node_linear_myl4_0", ("node_linear",)),
        ("__myl_MulSum_myl4_1", ()),
        ("Conv_1_clone_2", ("Conv_1",)),
        ("(Unnamed Layer* 12) [Shuffle]", ()),
        ("Conv_3 [profile 1]", ("Conv_3",)),
        ("copied_squeeze_after_(Unnamed Layer* 361) [ElementWise]", ()),
    ],
)
def test_node_names_are_read_from_layer_names_without_metadata(name, nodes):
    assert EngineNames().of_layer(name, "") == nodes


@pytest.mark.parametrize(
    ("entry", "integer", "precision"),
    [
        (layer("a", "gemm", "Int8", "Half"), True, "int8 > fp16"),
        (layer("a", "gemm", "FP8", "Half"), True, "fp8 > fp16"),
        (layer("a", "gemm", "Half", "Half", Constants=[{"Name": "w", "Datatype": "Int8"}]), False, "fp16"),
        (layer("a", "CaskPooling", "Channel major INT8 format where channel % 4 == 0", "Int8"), True, "int8"),
        (layer("a", "x", "Channel major FP16 format", "Row major linear FP32"), False, "fp16 > fp32"),
        (layer("a", "x", "a sentence that names none", "E8M0"), False, "e8m0"),
    ],
)
def test_the_precision_of_a_layer_is_read(entry, integer, precision):
    (found,) = parse_layers(graph(entry))
    assert (found.integer, found.precision) == (integer, precision)


def test_times_of_repeated_names_are_attributed_in_order_and_only_to_layers_of_the_timed_shape_profile():
    profile = [{"count": 3}, *({"name": "a", "averageMs": t} for t in (1.0, 2.0, 4.0))]
    found = parse_layers(graph(layer("a"), layer("a")), profile)
    assert [one.milliseconds for one in found] == [1.0, 2.0, 4.0], "three ran, though the graph has two"
    unmarked = graph(layer("a"), layer("b"), layer("a [profile 1]"), layer("b [profile 1]"))
    for mark in ("", " [profile 1]"):
        found = parse_layers(unmarked, [{"name": f"a{mark}", "averageMs": 2.0}])
        assert [(one.name, one.milliseconds) for one in found] == [(f"a{mark}", 2.0), (f"b{mark}", 0.0)]


@pytest.mark.parametrize(
    ("graph_text", "profile"),
    [
        ("", None), ("[]", None), ("{", None), ('{"Layers": 3}', None), ("[" * 100_000, None),
        ("{}", "no"), ("{}", "{}"), ("{}", '[{"name": "a"}]'), ("{}", '[{"name": "a", "averageMs": -1}]'),
        ("{}", '[{"name": "a", "averageMs": NaN}]'), ("{}", '[{"name": "a", "averageMs": true}]'), ("{}", "[3]"),
    ],
)  # fmt: skip
def test_unreadable_layer_information_is_one_error(graph_text, profile):
    with pytest.raises(BackendError, match="cannot be used") as caught:
        parse_layers(graph_text, profile)
    assert "\n" not in caught.value.what


# ---- with the model -----------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    """A pair, a convolution, an unnamed Relu and two more operators."""
    text = """g (float[1,1,4,4] x) => (float[1,1,4,4] y)
        <float[1,1,1,1] w = {1}, float s = {0.1}, int8 z = {0}> {
        [pair_Q] xq = QuantizeLinear(x, s, z)
        [pair_DQ] xd = DequantizeLinear(xq, s, z)
        [conv] a = Conv(xd, w)
        relu_out = Relu(a)
        [softmax] b = Softmax(relu_out)
        [neg] y = Neg(b)
    }"""
    proto = onnx.load(saved(tmp_path / "m.onnx", text))
    for node, name in zip(proto.graph.node, ("pair/Q", "pair/DQ", "conv"), strict=False):
        node.name = name
    return Model(proto)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("w + pair/Q + conv + relu_out", ("conv", "Relu#1")),
        ("{ForeignNode[conv...neg]}", ("conv", "neg")),
        ("PWN(relu_out)", ("Relu#1",)),
        ("softmax_myl3_4", ("softmax",)),
        ("nothing of the model", ()),
    ],
)
def test_node_names_are_those_of_the_model(model, name, nodes):
    (found,) = parse_layers(graph(name), model=model)
    assert found.nodes == nodes
    assert found.boundary == (not nodes)
    assert nodes or found.tensors == ("x",)


def test_conversions_are_attributed_to_the_tensors_before_their_pairs(model):
    alone = layer("pair/DQ", "Reformat", "Int8", Origin="QDQ")
    alone["Inputs"][0]["Name"], alone["Outputs"][0]["Name"] = "xq", "xd"
    (found,) = parse_layers(graph(alone), model=model)
    assert (found.op_type, found.tensors) == ("DequantizeLinear", ("x",))


# ---- lists of kernels, recorded with TensorRT for RTX 1.7.1.116 --------------------------------------


QUANTIZED = text("rtx1.7-digits-modelopt.layers.log")
FLOAT = text("rtx1.7-digits-float.layers.log")
EXCERPT = text("rtx1.7-kernels.excerpt.layers.log")


IN_EXCERPT = {layer.name: layer for layer in read_layers(EXCERPT)}


def test_every_kernel_is_read_with_its_tensors_and_nodes():
    for text in (QUANTIZED, FLOAT, EXCERPT):
        lines = [line for line in text.split("\n") if line.startswith("Name: ")]
        layers = read_layers(text)
        assert len(layers) == len(lines) > 0
        for line, layer in zip(lines, layers, strict=True):
            tensors = [*layer.inputs, *layer.constants, *layer.outputs]
            assert len(tensors) == line.count("{ Name: ")
            assert all(tensor.name and tensor.dtype for tensor in tensors)
            assert len(metadata_names(layer.metadata)) == line.count("[ONNX Layer: ")


def test_kernels_that_compute_in_eight_bits_are_counted_and_those_that_only_convert_are_boundaries():
    log = f"[V] [TRT] Engine generation completed.\n[V] [TRT] {QUANTIZED}\n[I] Name: other\n"
    layers = parse_layers(log, None, model=load_model(DATA / "qdq_modelopt_digits_resnet.onnx"))
    assert len(layers) == 26
    assert Counter(layer.op_type for layer in layers if layer.integer) == {"correlation": 10}
    assert {layer.milliseconds for layer in layers} == {0.0}
    scaled = layers[8]  # what scales and quantizes the result of the convolution before it
    assert scaled.nodes == ("/layer2/layer2.0/conv1/Conv", "/layer2/layer2.0/Relu")
    assert (scaled.integer, scaled.precision) == (False, "fp32 > int8")
    boundaries = [layer for layer in layers if layer.boundary]
    assert [(layer.op_type, layer.tensors) for layer in boundaries] == [
        ("kgen", ("input",)),
        ("QuantizeLinear", ("/layer1/layer1.1/Relu_1_output_0",)),
    ]


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("_gemm_mha_v2_myl0_7", "int8"),
        ("__myl_ReplCastMulCastFc_myl0_1", "fp32"),  # float data, an int4 weight decoded inside
        ("/up1/ConvTranspose_myl0_29", "fp32"),
        ("__myl_CastMulFc_myl0_105", "fp32"),  # int8 data, a float weight
        ("/features/features.2/conv/conv.2/Conv_myl0_7", "fp8"),
        ("__myl_Tran_myl0_62", "fp32"),
    ],
)
def test_the_type_that_a_kernel_computes_in(name, computes):
    assert IN_EXCERPT[name].computes == computes


def test_synchronization_of_streams_is_left_out_if_it_took_no_time():
    streams = [layer for layer in IN_EXCERPT.values() if layer.layer_type in ("signal", "wait")]
    assert len(streams) == 2
    assert {layer.name for layer in parse_layers(EXCERPT)} == {*IN_EXCERPT} - {
        layer.name for layer in streams
    }
    timed = parse_layers(EXCERPT, [{"name": streams[0].name, "averageMs": 0.5}])
    assert sum(layer.milliseconds for layer in timed) == 0.5


# ---- with small models --------------------------------------------------------------------------


def row(name, kind, nodes, reads="Float", writes="Float", constants=()):
    def tensors(*dtypes):
        return ", ".join(
            f"{{ Name: t{i}, Dimensions: [1,8,4,4], Strides: [128,16,4,1], StrideOrder: [3,2,1,0], "
            f"Datatype: {dtype}, Format: (Linear) Row major linear format }}"
            for i, dtype in enumerate(dtypes)
        )

    metadata = "\x1f".join(f"[ONNX Layer: {node}]" for node in nodes)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [ {tensors(reads)}], Constants: [ {tensors(*constants)}], "
        f"Outputs: [ {tensors(writes)}], TacticName: , StreamId: 0, Metadata: {metadata}"
    )


def listed(*rows):
    return "\n".join(["Layers:", *rows, "", "I/O Tensors:", " Name: x, IOMode: Input, DataType: Float"])


PADDED_MODEL = """g (float[1,1,4,4] x) => (float[1,1,4,4] y)
    <float[1,1,1,1] w = {1}, float s = {0.1}, int8 z = {0}> {
    [q] xq = QuantizeLinear(x, s, z)  [dq] xd = DequantizeLinear(xq, s, z)  a = Conv(xd, w)  [relu] y = Relu(a)
}"""
PADDED = listed(
    row("__myl_MulMinMaxRounCastConc_myl0_0", "kgen", ("q", "node_of_a", "dq"), writes="Int8"),
    row("node_of_a_myl0_1", "correlation", ("node_of_a", "dq"), "Int8", constants=("Int8", "Float")),
    row("__myl_MulAddRelu_myl0_2", "kgen", ("node_of_a", "relu")),
)


def test_a_kernel_before_that_of_its_operator_only_prepares_it(tmp_path):
    """Channels are added to the input of a convolution where it is quantized, and metadata names both."""
    model = load_model(saved(tmp_path / "padded.onnx", PADDED_MODEL))
    first, second, third = parse_layers(PADDED, model=model)
    assert (first.boundary, first.op_type, first.nodes) == (True, "QuantizeLinear", ())
    assert (second.integer, second.nodes) == (True, ("Conv#0",))
    assert third.nodes == ("Conv#0", "relu")
    assert groups_of((first, second, third)) == (("Conv#0",), ("relu",))


def test_of_several_shape_profiles_that_with_the_fewest_integer_kernels_is_read(tmp_path):
    """Each lists every kernel; names that the compiler makes hold only the number of their graph."""
    later = (
        row("__myl_MoveConc_myl1_0", "kgen", ("node_of_a",)),
        row("node_of_a [profile 1]_myl1_1", "correlation", ("node_of_a", "dq"), constants=("Float",)),
        row("__myl_AddRelu_myl1_2", "kgen", ("node_of_a", "relu")),
    )
    model = load_model(saved(tmp_path / "padded.onnx", PADDED_MODEL))
    for rows, integer in ((later, 0), (PADDED.splitlines()[1:4], 1)):
        again = [
            line.replace("node_of_a_myl0", "node_of_a [profile 1]_myl1").replace("myl0", "myl1")
            for line in rows
        ]
        found = parse_layers(listed(*PADDED.splitlines()[1:4], *again), model=model)
        assert (len(found), sum(layer.integer for layer in found)) == (3, integer)


BODIES = """g (float[2,2] x, bool c, int64 n) => (float[2,2] y)
    <float[2,2] w = {1,2,3,4}, float s = {0.1}, int8 z = {0}> {
    [outer] a = If (c) <
        then_branch = one () => (float[2,2] t) {
            [q] xq = QuantizeLinear(x, s, z)  [dq] xd = DequantizeLinear(xq, s, z)  t = MatMul(xd, w)
        },
        else_branch = two () => (float[2,2] e) {
            e = If (c) <
                then_branch = three () => (float[2,2] u) { [mm] u = MatMul(x, w) },
                else_branch = four () => (float[2,2] v) { [mm] v = Neg(x) }
            >
        }
    >
    [loop] y = Loop (n, c, a) <
        body = five (int64 i, bool k, float[2,2] p) => (bool m, float[2,2] r) { m = Identity(k)  [mm] r = MatMul(p, w) }
    >
}"""


def test_nodes_of_bodies_are_those_of_the_model(tmp_path):
    """Metadata names the branches of If around a node, and each If too; it names no loop. A jump is no kernel."""
    within, inner = "two (else_branch) | outer (If)", "node_of_e | two (else_branch) | outer (If)"
    read = listed(
        row(
            "__myl_MulMinMaxRounCast_myl0_0",
            "kgen",
            ("outer", "q | one (then_branch) | outer (If)"),
            writes="Int8",
        ),
        row(
            "a_myl0_1",
            "gemm",
            ("outer", "node_of_t | one (then_branch) | outer (If)"),
            "Int8",
            constants=("Int8",),
        ),
        row("b_myl0_2", "gemm", ("outer", inner, f"mm | three (then_branch) | node_of_e (If) | {within}")),
        row("c_myl0_3", "gemm", ("mm",)),
    )
    first, *others = parse_layers(read, model=load_model(saved(tmp_path / "bodies.onnx", BODIES)))
    assert (first.boundary, first.tensors) == (True, ("x",))
    nodes = ("outer/then_branch/MatMul#0", "outer/else_branch/If#0/then_branch/mm", "loop/body/mm")
    assert [layer.nodes for layer in others] == [(node,) for node in nodes]
    assert [layer.integer for layer in others] == [True, False, False]


def test_a_convolution_in_generated_code_computes_in_the_type_that_it_reads(tmp_path):
    """It is one kernel with the operators behind it, which convert and quantize its result."""
    model = load_model(saved(tmp_path / "padded.onnx", PADDED_MODEL))
    both, fused = ("node_of_a", "dq"), "__myl_CorrMulAddMulMinMaxRounCast_myl0_1"
    text = PADDED.replace("node_of_a_myl0_1, LayerType: correlation", f"{fused}, LayerType: kgen")
    first, second, _ = parse_layers(text, model=model)
    assert (first.nodes, second.nodes, second.integer) == ((), ("Conv#0",), True)
    for kernel in (
        row(fused, "kgen", both, "Int8", constants=("Float",)),
        row("__myl_CastMulCorr_myl0_1", "kgen", both, "Int8", constants=("Int8",)),
    ):
        (layer,) = parse_layers(listed(kernel), model=model)
        assert (layer.nodes, layer.integer) == (("Conv#0",), False)


# ---- the hash -----------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_kernels_without_numbers_of_the_compiler():
    renumbered = QUANTIZED.replace("__mye3655", "__mye77")
    other, tactics = re.subn(r"_0x[0-9a-f]{32}", f"_0x{32 * '0'}", renumbered)
    assert tactics == 10
    assert renumbered != QUANTIZED
    assert kernel_list_hash(f"[V] {other}") == kernel_list_hash(QUANTIZED)
    changes = (("Datatype: Int8", "Datatype: FP8"), ("[2,24,8,8]", "[2,24,8,9]"), ("kgen", "gemm"))
    others = [QUANTIZED.replace(old, new, 1) for old, new in changes]
    assert len({*map(kernel_list_hash, (QUANTIZED, FLOAT, *others))}) == 5
