"""The list of kernels that a build logs, in recordings of TensorRT for RTX 1.7.1.116."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from graph_text import saved

from qdqspec.backends.tensorrt.layers import (
    Layer,
    kernel_list_hash,
    metadata_names,
    parse_layers,
    read_layers,
)
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.search import groups_of

DATA = Path(__file__).parents[2] / "data"
SAMPLES = DATA / "tensorrt" / "samples"
QUANTIZED = (SAMPLES / "rtx1.7-digits-modelopt.layers.log").read_text(encoding="utf-8")
FLOAT = (SAMPLES / "rtx1.7-digits-float.layers.log").read_text(encoding="utf-8")
EXCERPT = (SAMPLES / "rtx1.7-kernels.excerpt.layers.log").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def quantized() -> Model:
    return load_model(DATA / "qdq_modelopt_digits_resnet.onnx")


@pytest.fixture(scope="module")
def excerpt() -> dict[str, Layer]:
    return {layer.name: layer for layer in read_layers(EXCERPT)}


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


def test_a_log_around_the_list_is_no_part_of_it():
    log = f"[V] [TRT] Engine generation completed.\n[V] [TRT] {QUANTIZED}\n[I] Name: other\n"
    assert read_layers(log) == read_layers(QUANTIZED)


def test_kernels_that_compute_in_eight_bits_are_counted(quantized):
    layers = parse_layers(QUANTIZED, None, model=quantized)
    assert len(layers) == 26
    assert Counter(layer.op_type for layer in layers if layer.integer) == {"correlation": 10}
    assert {layer.milliseconds for layer in layers} == {0.0}
    scaled = layers[8]  # what scales and quantizes the result of the convolution before it
    assert scaled.nodes == ("/layer2/layer2.0/conv1/Conv", "/layer2/layer2.0/Relu")
    assert (scaled.integer, scaled.precision) == (False, "fp32 > int8")


def test_kernels_that_only_convert_are_boundaries(quantized):
    boundaries = [layer for layer in parse_layers(QUANTIZED, None, model=quantized) if layer.boundary]
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
def test_the_type_that_a_kernel_computes_in(excerpt, name, computes):
    assert excerpt[name].computes == computes


def test_synchronization_of_streams_is_left_out_if_it_took_no_time(excerpt):
    streams = [layer for layer in excerpt.values() if layer.layer_type in ("signal", "wait")]
    assert len(streams) == 2
    assert {layer.name for layer in parse_layers(EXCERPT)} == set(excerpt) - {layer.name for layer in streams}
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


@pytest.fixture
def padded(tmp_path):
    """x > Q > DQ > an unnamed Conv > Relu."""
    text = """g (float[1,1,4,4] x) => (float[1,1,4,4] y)
        <float[1,1,1,1] w = {1}, float s = {0.1}, int8 z = {0}> {
        [q] xq = QuantizeLinear(x, s, z)
        [dq] xd = DequantizeLinear(xq, s, z)
        a = Conv(xd, w)
        [relu] y = Relu(a)
    }"""
    return load_model(saved(tmp_path / "padded.onnx", text))


PADDED = listed(
    row("__myl_MulMinMaxRounCastConc_myl0_0", "kgen", ("q", "node_of_a", "dq"), writes="Int8"),
    row("node_of_a_myl0_1", "correlation", ("node_of_a", "dq"), "Int8", constants=("Int8", "Float")),
    row("__myl_MulAddRelu_myl0_2", "kgen", ("node_of_a", "relu")),
)


def test_a_kernel_before_that_of_its_operator_only_prepares_it(padded):
    """Channels are added to the input of a convolution where it is quantized, and metadata names both."""
    first, second, third = parse_layers(PADDED, model=padded)
    assert (first.boundary, first.op_type, first.nodes) == (True, "QuantizeLinear", ())
    assert (second.integer, second.nodes) == (True, ("Conv#0",))
    assert third.nodes == ("Conv#0", "relu")
    assert groups_of((first, second, third)) == (("Conv#0",), ("relu",))


def test_an_operator_of_generated_kernels_alone_is_in_each_of_them(padded):
    text = listed(
        row("__myl_ReshMulSum_myl0_0", "kgen", ("a",)), row("__myl_Add_myl0_1", "kgen", ("a", "relu"))
    )
    assert [layer.nodes for layer in parse_layers(text, model=padded)] == [("Conv#0",), ("Conv#0", "relu")]


def test_fusion_groups_of_a_float_model(models):
    model = load_model(models / "digits_resnet.onnx")
    groups = groups_of(parse_layers(FLOAT, None, model=model))
    nodes = [node for group in groups for node in group]
    assert len(nodes) == len(set(nodes))
    assert ("/layer1/layer1.0/conv2/Conv", "/layer1/layer1.0/Relu_1", "/layer1/layer1.0/Add") in groups
    assert sum(len(group) > 1 for group in groups) == 13


# ---- the hash -----------------------------------------------------------------------------------


def test_numbers_of_the_compiler_do_not_change_the_hash():
    renumbered = QUANTIZED.replace("__mye3655", "__mye77")
    other, tactics = re.subn(r"_0x[0-9a-f]{32}", f"_0x{32 * '0'}", renumbered)
    assert tactics == 10
    assert renumbered != QUANTIZED
    assert kernel_list_hash(f"[V] {other}") == kernel_list_hash(QUANTIZED)


def test_other_kernels_have_another_hash():
    changes = (("Datatype: Int8", "Datatype: FP8"), ("[2,24,8,8]", "[2,24,8,9]"), ("kgen", "gemm"))
    others = [QUANTIZED.replace(old, new, 1) for old, new in changes]
    assert len({*map(kernel_list_hash, (QUANTIZED, FLOAT, *others))}) == 5
