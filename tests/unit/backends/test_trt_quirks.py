"""Irregularities of TensorRT's output that a reader must handle: one test each, numbered as in `QUIRKS`, mostly on
recordings.

Other readings of the same files are in test_trt_layers.py and test_trtexec_log.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from qdqspec.backends.tensorrt.exported import _end_to_end
from qdqspec.backends.tensorrt.layers import (
    EngineNames,
    metadata_names,
    parse_layers,
    read_graph,
    read_layers,
    read_profile,
    read_times,
)
from qdqspec.backends.trtexec.log import find_all, read_log
from qdqspec.graph.regions.search import groups_of

SAMPLES = Path(__file__).parents[2] / "data" / "tensorrt" / "samples"

QUIRKS = {
    1: "Layers are objects, texts, or none",
    2: "the top keys changed in 11",
    3: "types are sentences, or two keys from 11 on",
    4: "Location is missing and dimensions hold -1",
    5: "metadata has two separators, glued or none",
    6: "names are joined, wrapped and numbered",
    7: "pairs that stand alone",
    8: "layer types are an open vocabulary",
    9: "what it computes in is not what it reads",
    10: "profile.json is not quite JSON, and names repeat",
    11: "the table of a profile changed its columns",
    12: "a profile instead of a summary",
    13: "times.json changed its words",
    14: "summaries of other versions, and filtered ones",
    15: "banners, verdicts and error lines",
    16: "weak typing is said, and strong typing too",
    17: "shapes that trtexec took itself",
    18: "the same in TensorRT's own words, with a space missing",
}


def text(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def layer(**entry: Any) -> dict[str, Any]:
    return {"Name": "a", "LayerType": "kgen", "Inputs": [], "Outputs": [], **entry}


def one(**entry: Any):
    (found,) = parse_layers({"Layers": [layer(**entry)]})
    return found


def test_quirk_01_layers_are_objects_or_strings_or_missing() -> None:
    detailed = parse_layers(text("trt10.16-mnist-detailed.graph.json"))
    names = [entry.name for entry in detailed]
    assert [entry.name for entry in parse_layers({"Layers": names})] == names
    lines = [
        line for line in text("trt10.16-mnist-dumpLayerInfo.log").split("\n") if line.startswith("Name: ")
    ]
    assert [entry.nodes for entry in parse_layers({"Layers": lines})] == [e.nodes for e in detailed]
    assert parse_layers({"Layers": []}) == ()


def test_quirk_02_top_level_keys_differ_in_tensorrt_11() -> None:
    ten, eleven = (
        read_graph(text(name))
        for name in ("trt10.16-mnist-detailed.graph.json", "trt11-mnist-detailed.excerpt.graph.json")
    )
    assert ("Bindings" in ten, "I/O Tensors" in ten) == (True, False)
    assert ("Bindings" in eleven, "I/O Tensors" in eleven) == (False, True)
    for graph, name in ((ten, ten["Bindings"][0]), (eleven, eleven["I/O Tensors"][0]["Name"])):
        (lost,) = parse_layers({**graph, "Layers": ["__myl_Nothing_myl0_1"]})
        assert lost.tensors == (name,), "a layer without a node is attributed to the engine's input"


@pytest.mark.parametrize(
    ("said", "is_"),
    [
        ({"Format/Datatype": "Row major Int8 format"}, "int8"),
        ({"Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}, "int8"),
        ({"Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}, "fp16"),
        ({"Format/Datatype": "Half"}, "fp16"),
        ({"Datatype": "FP8", "Format": "Row major linear FP8 format"}, "fp8"),
        ({"DataType": "Float", "Format": "N/A"}, "fp32"),
        ({"Datatype": "E8M0"}, "e8m0"),
        ({"Format/Datatype": "a sentence that names none"}, ""),
    ],
)
def test_quirk_03_tensor_types_are_sentences_or_two_keys(said: Mapping[str, str], is_: str) -> None:
    (read,) = read_layers({"Layers": [layer(Inputs=[{"Name": "x", **said}])]})
    assert read.inputs[0].dtype == is_


def test_quirk_03_every_recorded_tensor_has_a_type() -> None:
    for path in SAMPLES.glob("*.graph.json"):
        for found in read_layers(path.read_text()):
            assert all(tensor.dtype for tensor in (*found.inputs, *found.outputs)), (path.name, found)


def test_quirk_04_location_may_be_missing_and_dimensions_may_be_minus_one() -> None:
    tensor = {"Name": "x", "Dimensions": [-1, 3, -1, -1], "Format/Datatype": "Half"}
    bare, told = (one(Inputs=[t], Outputs=[t]) for t in (tensor, {**tensor, "Location": "Device"}))
    assert bare == told
    assert bare.precision == "fp16"


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ("[ONNX Layer: a]\x1e[ONNX Layer: b]", ("a", "b")),
        ("[ONNX Layer: a]\x1f[ONNX Layer: b]", ("a", "b")),
        ("[ONNX Layer: a][ONNX Layer: b]", ("a", "b")),
        ("[ONNX Layer: x[0]]\x1f[ONNX Layer: y]]", ("x[0]", "y]")),
        ("", ()),
    ],
)
def test_quirk_05_entries_of_metadata_have_either_separator_or_none(
    metadata: str, names: tuple[str, ...]
) -> None:
    assert metadata_names(metadata) == names


def test_quirk_05_several_layers_may_have_one_node_and_some_have_only_pairs() -> None:
    found = parse_layers(text("trt10.16-mnist-detailed.graph.json"))
    assert sum("node_softmax" in entry.nodes for entry in found) > 1
    groups = groups_of(found)
    assert sum("node_softmax" in group for group in groups) == 1, "each node is in a region once"
    pairs = one(Metadata="[ONNX Layer: x_QuantizeLinear]\x1f[ONNX Layer: x_DequantizeLinear]")
    assert (pairs.boundary, pairs.nodes) == (True, ())


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        (
            "conv1.weight + QuantizeLinear_7 + Conv_9 + MaxPool_12",
            ("QuantizeLinear_7", "Conv_9", "MaxPool_12"),
        ),
        ("Conv_1 + Relu_2 || Conv_3 + Relu_4", ("Conv_1", "Relu_2", "Conv_3", "Relu_4")),
        ("PWN(PWN(Sigmoid_1), Mul_2)", ("Sigmoid_1", "Mul_2")),
        ("{ForeignNode[MatMul_1...Softmax_9]}", ("MatMul_1", "Softmax_9")),
        ("__myl_MulSum_myl4_1", ()),
        ("node_linear_myl4_0", ("node_linear",)),
        ("__mye1085_myl0_0", ()),
        ("Reformatting CopyNode for Input Tensor 0 to Conv_3", ()),
        ("Reformatting CopyNode for Output Tensor 0 to Conv_3", ()),
        ("Conv_1_clone_1", ("Conv_1",)),
        ("(Unnamed Layer* 12) [Shuffle]", ()),
        ("Conv_3 [profile 1]", ("Conv_3",)),
    ],
)
def test_quirk_06_node_names_are_joined_wrapped_and_numbered(name: str, nodes: tuple[str, ...]) -> None:
    assert EngineNames().of_layer(name, "") == nodes


def test_quirk_06_metadata_takes_precedence_over_names() -> None:
    assert one(Name="a + b", Metadata="[ONNX Layer: a + b]").nodes == ("a + b",)


def test_quirk_07_unfused_pairs_are_recognized() -> None:
    tensors = [{"Name": "x", "Format/Datatype": "Half"}], [{"Name": "y", "Format/Datatype": "Int8"}]
    ends = {"Inputs": tensors[0], "Outputs": tensors[1]}
    alone = one(LayerType="Reformat", Origin="QDQ", **ends)
    copy = one(LayerType="Reformat", Origin="REFORMAT", **ends)
    myelin = one(Name="__myl_MulMinMaxRounCast_myl0_1", Metadata="[ONNX Layer: x_QuantizeLinear]", **ends)
    assert [entry.op_type for entry in (alone, copy, myelin)] == [
        "QuantizeLinear",
        "Reformat",
        "QuantizeLinear",
    ]
    assert all(entry.boundary for entry in (alone, copy, myelin))
    recorded = parse_layers(text("trt8-resnet18-a100-qat.graph.json"))
    assert sum(entry.op_type in ("QuantizeLinear", "DequantizeLinear") for entry in recorded) == 10


@pytest.mark.parametrize(
    "kind",
    [
        "CaskConvolution", "CaskGemmConvolution", "ConvActPool", "FusedConvActConvolution", "CudaDepthwiseConvolution",
        "PointWiseV2", "Shuffle", "gemm", "kgen", "correlation", "maxpool", "custom_layer", "reshape", "never heard of",
    ],
)  # fmt: skip
def test_quirk_08_unknown_layer_types_are_accepted(kind: str) -> None:
    found = one(LayerType=kind, Metadata="[ONNX Layer: node]")
    assert (found.op_type, found.nodes, found.boundary) == (kind, ("node",), False)


@pytest.mark.parametrize("kind", ["NoOp", "MyelinReformat", "memset", "shape_call"])
def test_quirk_08_some_layers_represent_no_node(kind: str) -> None:
    assert one(Name="__myl_housekeeping_myl0_1", LayerType=kind).boundary


@pytest.mark.parametrize(
    ("more", "integer", "precision"),
    [
        ({"TacticName": "sm80_xmma_fprop_i8f16_i8i32_f32"}, True, "int8 > fp16"),
        ({"Weights": {"Type": "Int8", "Count": 9}}, True, "int8 > fp16"),
        ({"TacticName": "sm90_xmma_gemm_e4m3f16_f32"}, True, "fp8 > fp16"),
        ({"Weights": {"Type": "Half", "Count": 9}}, True, "int8 > fp16"),
    ],
)
def test_quirk_09_the_precision_of_a_layer_may_differ_from_that_of_its_inputs(
    more, integer: bool, precision: str
) -> None:
    ends = {
        "Inputs": [{"Name": "x", "Format/Datatype": "Int8"}],
        "Outputs": [{"Name": "y", "Format/Datatype": "Half"}],
    }
    found = one(Metadata="[ONNX Layer: node]", **ends, **more)
    assert (found.integer, found.precision) == (integer, precision)


def test_quirk_10_profiles_may_be_invalid_json_with_repeated_names() -> None:
    recorded = read_profile(text("trt8-resnet18-a100-qat.profile.json"))
    first = json.loads(text("trt8-resnet18-a100-qat.profile.json"))[0]
    assert list(first) == ["count"], "the first entry has no name"
    assert all(name for name, _ in recorded)
    assert any(ms == 0 for _, ms in recorded), "layers without a time are listed, too"
    old = '[ {"count": 2}\n, {"name": "a", "timeMs": 3.0, "averageMs": 1.5, "percentage": 9}\n]'
    assert read_profile(old) == (("a", 1.5),), "no median before 8.5"
    odd = '[\n, { "name" : "say \\"a\\" and "b"", "timeMs" : 2, "averageMs" : 1, "percentage" : 9 }\n]'
    assert read_profile(odd)[0][1] == 1.0, "names are written without escapes"
    twice = [{"name": "a [profile 1]", "averageMs": 1.0}, {"name": "a [profile 1]", "averageMs": 2.0}]
    found = parse_layers({"Layers": ["a [profile 1]", "a [profile 1]"]}, twice)
    assert [entry.milliseconds for entry in found] == [1.0, 2.0]


def test_quirk_11_columns_of_the_profile_table_differ_between_versions() -> None:
    ten = read_log(text("trt10.16-mnist-dumpProfile.log")).profile
    eleven = read_log(text("trt11.0-mnist-dumpProfile.excerpt.log")).profile
    assert (len(ten), len(eleven)) == (15, 12)
    assert not any("Total" in name for name, _ in (*ten, *eleven))
    long = "a" * 1500
    eight = (
        f"[I] === Profile (2 iterations ) ===\n[I] {'Layer':>1500}   Time (ms)   Avg. Time (ms)   Time %\n"
    )
    eight += f"[I] {long}        2.00          1.0000     90.0\n[I] {'Total':>1500}        2.00    1.0000   100.0\n"
    assert read_log(eight).profile == ((long, 1.0),)


def test_quirk_12_a_log_may_have_a_profile_instead_of_a_summary() -> None:
    ten, eleven = (
        read_log(text(name))
        for name in ("trt10.16-mnist-dumpProfile.log", "trt11.0-mnist-dumpProfile.excerpt.log")
    )
    assert (ten.median_ms, ten.verdict) == (None, "PASSED")
    assert eleven.median_ms == 0.0587769
    assert ten.profile
    assert eleven.profile


def test_quirk_13_keys_of_exported_times_differ_between_versions() -> None:
    new = {"startEnqMs": 5, "startComputeMs": 4, "computeMs": 1.5, "h2dMs": 0, "latencyMs": 9}
    old = {"startInMs": 0, "inMs": 1, "computeMs": 2.5, "outMs": 1, "latencyMs": 9}
    assert read_times(json.dumps([new, old])) == (1.5, 2.5), (
        "the compute time alone, though compute began before the launch"
    )
    assert len(read_times(text("trt8-resnet50tf-rtx3090-fp32.times.json"))) == 30


def test_quirk_14_summaries_differ_between_versions_and_may_be_filtered() -> None:
    recorded = text("trt10.16-mnist-onnx-build-and-run.log")
    filtered = re.sub(r"^\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[I\] ", "", recorded, flags=re.MULTILINE)
    assert "] [I] GPU Compute" not in filtered
    assert read_log(filtered).median_ms == read_log(recorded).median_ms == 0.0361328
    own = "[I] GPU Compute Time: min = .01 ms, max = 1 ms, mean = 0.5 ms, median = 4.5e-02 ms, percentile(37.5%) = 1 ms"
    assert read_log(own).median_ms == 0.045
    assert read_log(own.replace("4.5e-02", "nan")).median_ms is None


@pytest.mark.parametrize(
    ("log", "version", "verdict"),
    [
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v8510] # trtexec", (8, 5, 1), ""),
        ("&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11] # trtexec", (10, 16, 1), ""),
        ("&&&& FAILED TensorRT.trtexec [TensorRT v110000] [b114] # trtexec --help", (11, 0, 0), "FAILED"),
        ("&&&& PASSED TensorRT.trtexec # trtexec", None, "PASSED"),
        ("[E] Error Code 2: OutOfMemory (no)\n&&&& PASSED TensorRT.trtexec [TensorRT v8601]", (8, 6, 1), "PASSED"),
    ],
)  # fmt: skip
def test_quirk_15_banners_verdicts_and_error_lines_are_read(log: str, version, verdict: str) -> None:
    report = read_log(log)
    assert (report.version, report.verdict) == (version, verdict)


def test_quirk_16_weak_and_strong_typing_are_reported() -> None:
    weak = read_log("[07/07/2026-02:10:54] [W] Weakly-typed networks have been deprecated in TensorRT 10.12.")
    assert weak.notes == ("Weakly-typed networks have been deprecated in TensorRT 10.12.",)
    strong = text("trt11.0-removed-flags.excerpt.log")
    assert "Precision: Strongly Typed" in strong
    assert read_log(strong).notes == ()


SHAPES_TAKEN = {
    17: "[W] Dynamic dimensions required for input: x, but no shapes were provided. Automatically overriding",
    18: "[W] Shape missing for input with dynamic shape: xAutomatically setting shape to: 1x1x28x28",
}


@pytest.mark.parametrize("number", SHAPES_TAKEN)
def test_quirk_17_and_18_assumed_shapes_are_found(number: int) -> None:
    (found,) = find_all(SHAPES_TAKEN[number])
    assert (found.rule.kind, found.rule.weight) == ("shapes_assumed", "fatal")


# ---- completeness --------------------------------------------------------------------------


def test_every_quirk_has_a_test() -> None:
    here = {int(n) for name in globals() for n in re.findall(r"(?:quirk_|and_)(\d\d)", name)}
    assert here == QUIRKS.keys()


def _messages(said: str) -> object:
    return [find_all("\n".join(json.loads(line)["lines"])) for line in said.splitlines()]


READERS: dict[str, Callable[[str], object]] = {
    ".graph.json": parse_layers,
    ".profile.json": read_profile,
    ".times.json": read_times,
    ".log": read_log,
    ".jsonl": _messages,
}
# Files of engine-explorer: of runs the summary, which `explain` reads, of builds the options.
MEDIANS = {"fp16": 0.862, "qat": 0.883, "qat-residual": 0.546, "qat-residual-qgap": 0.5}


@pytest.mark.parametrize("path", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_sample_is_parsed(path: Path) -> None:
    if path.name.endswith(".metadata.json"):
        name = path.name.split(".")[0]
        median = _end_to_end(path.with_name(f"{name}.graph.json"), None)
        assert median == pytest.approx(MEDIANS[name.removeprefix("trt8-resnet18-a100-")], abs=6e-4)
        return
    reader = next(reader for suffix, reader in READERS.items() if path.name.endswith(suffix))
    assert reader(path.read_text(encoding="utf-8"))
