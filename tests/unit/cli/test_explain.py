"""``qdqspec explain`` with files of TensorRT, with a tuned case, and with a model."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import quantize_dynamic
from PIL import Image

from qdqspec._core.units import at_least_text
from qdqspec.accuracy import given_data
from qdqspec.app.report.explain_text import explain_text
from qdqspec.app.report.record import case_to_json
from qdqspec.backends.tensorrt.layers import parse_layers
from qdqspec.graph.model import load_model
from qdqspec.testing.records import alone_case, faster_case, sample_corrections
from qdqspec.timing.explained import ExplainedEngine
from qdqspec.types import Interval

DATA = Path(__file__).parents[2] / "data"
SAMPLES = DATA / "tensorrt" / "samples"
QUARTET = ("fp16", "qat", "qat-residual", "qat-residual-qgap")


def graph(placement):
    return SAMPLES / f"trt8-resnet18-a100-{placement}.graph.json"


def test_an_error_for_an_unknown_operator_names_the_quantized_model(verb, models, tmp_path):
    """The name is not that of the temporary float copy with which the model is compared."""
    model = onnx.load(models / "digits_resnet.onnx")
    x, y = model.graph.input[0], model.graph.output[0]
    last = model.graph.node[-1]
    last.output[0] = "before"
    constants = {"s": np.float32(0.1), "z": np.uint8(0)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in constants.items())
    model.graph.node.extend(
        [
            onnx.helper.make_node("QuantizeLinear", ["before", "s", "z"], ["q"]),
            onnx.helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            onnx.helper.make_node("Nope", ["d"], [y.name], domain="my.ops"),
        ]
    )
    model.opset_import.append(onnx.helper.make_opsetid("my.ops", 1))
    onnx.save(model, tmp_path / "odd.onnx")
    shape = "x".join(str(dim.dim_value or 1) for dim in x.type.tensor_type.shape.dim)
    found = verb("explain", "odd.onnx", "--backend", "onnxruntime", "--shapes", f"{x.name}:{shape}")
    assert found.code != 0
    assert "odd.onnx: ONNX Runtime could not build the model" in found.err
    assert "reference.onnx" not in found.err


def test_four_placements_are_ranked_and_explained(verb, golden):
    """The files alone give the fastest placement, its ratio to the others, and the cause; their order is free."""
    result = verb("explain", *map(graph, QUARTET))
    assert result.code == 0
    golden("explain/quartet.txt", result.out)
    assert verb("explain", *map(graph, reversed(QUARTET))).out == result.out


@pytest.mark.parametrize("tuned", QUARTET[1:])
def test_a_placement_is_compared_with_the_reference(verb, golden, tuned):
    result = verb("explain", graph("fp16"), graph(tuned))
    assert result.code == 0
    golden(f"explain/fp16-{tuned}.txt", result.out)


def test_an_engine_of_tensorrt_8_is_explained(verb, golden):
    result = verb("explain", SAMPLES / "trt8-mobilenetv2-qat.graph.json", "--layers", "5")
    golden("explain/mobilenet.txt", result.out)


def test_a_log_with_a_list_of_kernels_is_explained(verb):
    logs = (SAMPLES / f"rtx1.7-digits-{name}.layers.log" for name in ("float", "modelopt"))
    result = verb("explain", *logs)
    assert result.code == 0
    assert re.search(r"heavy operators in float +16 of 16 +6 of 16\n", result.out)


def test_the_candidates_of_an_unchanged_model_are_compared_with_the_reference(golden):
    """The kernel times of one agree with its speed-up, and those of the other do not."""
    reference = ExplainedEngine(name="reference", layers=engine_layers("fp16"), end_to_end_ms=0.72)
    candidates = [
        ExplainedEngine(
            name=name,
            layers=engine_layers(placement),
            end_to_end_ms=0.72 / ratio,
            speedup=Interval(median=ratio, low=low, high=high),
        )
        for name, placement, ratio, low, high in (
            ("fastest candidate", "qat-residual-qgap", 0.99, 0.99, 0.99),
            ("everything quantized", "qat", 0.93, 0.90, 0.96),
        )
    ]
    search = alone_case().evidence.search
    golden("explain/unchanged.txt", explain_text([reference, *candidates], most=4, search=search))


def engine_layers(placement):
    parts = ("graph", "profile")
    texts = [(SAMPLES / f"trt8-resnet18-a100-{placement}.{part}.json").read_text() for part in parts]
    return parse_layers(*texts)


def test_a_list_of_kernels_is_explained_in_the_names_of_its_model(golden):
    model = load_model(DATA / "qdq_modelopt_digits_resnet.onnx")
    ops = {node.name: node.op_type for node in model.nodes}
    engines = []
    for name in ("float", "modelopt"):
        text = (SAMPLES / f"rtx1.7-digits-{name}.layers.log").read_text(encoding="utf-8")
        layers = parse_layers(text, None, model=model)
        engines.append(ExplainedEngine(name=name, layers=layers, ops=ops))
    golden("explain/kernels.txt", explain_text(engines))


def test_a_case_without_results_is_an_error_with_the_reason(verb, tmp_path):
    case = faster_case()
    evidence = replace(case.evidence, search=None, latency=None, pairs=())
    failed = replace(
        case.results[0], verdict=replace(case.results[0].verdict, headline="not judged: no labels")
    )
    record = case_to_json(replace(case, evidence=evidence, results=(failed,)))
    (tmp_path / "result.json").write_text(json.dumps(record))
    result = verb("explain", tmp_path)
    assert result.code == 2
    assert "nothing was searched for this case: not judged: no labels" in result.err


def test_json_has_ranking_comparisons_and_layers(verb):
    found = verb("explain", "--json", *map(graph, QUARTET)).json
    assert found["schema_version"] == 1
    assert found["reference"] == "fp16"
    assert found["ranking"] == ["qat-residual-qgap", "qat-residual", "fp16", "qat"]
    engines = {engine["name"]: engine for engine in found["engines"]}
    assert [len(engines[name]["unfused_pairs"]) for name in QUARTET] == [0, 10, 3, 1]
    assert [engines[name]["integer_kernels"] for name in QUARTET] == [0, 21, 21, 22]
    assert engines["qat"]["end_to_end_ms"] == 0.882568
    for engine in found["engines"]:
        assert sum(layer["milliseconds"] for layer in engine["layers"]) == pytest.approx(engine["sum_ms"])
        assert {layer["precision"] for layer in engine["layers"]}
    comparison = found["comparisons"][0]
    assert comparison["decided_by"] == "end to end"
    assert comparison["renamed"]["Conv_34"] == "Conv_5", "each export numbers its nodes differently"
    assert sum(row["difference_ms"] for row in comparison["rows"]) == pytest.approx(
        engines["qat"]["sum_ms"] - engines["fp16"]["sum_ms"]
    ), "every layer's time is in some row"


def test_layers_profile_and_times_are_given_together(verb, tmp_path):
    shutil.copy(graph("qat"), tmp_path / "layers.json")
    shutil.copy(SAMPLES / "trt8-resnet18-a100-qat.profile.json", tmp_path / "p.json")
    (tmp_path / "t.json").write_text(
        json.dumps([{"computeMs": 0.25}, {"computeMs": 0.5}, {"computeMs": 0.75}])
    )
    assert "0.500" in verb("explain", "layers.json,p.json,t.json").out
    without = verb("explain", "layers.json").out
    assert "note: layers has no profile: give one with GRAPH,PROFILE" in without
    assert " ms" not in without


def test_without_end_to_end_times_the_sum_of_layers_is_reported_as_such(verb, tmp_path):
    for placement in ("fp16", "qat"):
        for kind in ("graph", "profile"):
            shutil.copy(SAMPLES / f"trt8-resnet18-a100-{placement}.{kind}.json", tmp_path)
    out = verb("explain", *sorted(path.name for path in tmp_path.glob("*.graph.json"))).out
    assert "1.10 against 1.02 ms by the sum of its layers" in out
    assert "prove no gain" in out


@pytest.fixture
def spec(tmp_path, models):
    shutil.copy(models / "digits_resnet.onnx", tmp_path / "digits.onnx")
    path = tmp_path / "digits.qdq.yaml"
    path.write_text(
        "qdqspec: 1\nmodel: digits.onnx\ntune: {trials: 2}\nchecks:\n  - {kind: size, max_ratio: 2}\n"
    )
    return path.name


@pytest.fixture
def folder(verb, spec, tmp_path):
    """The results of the case, tuned on the simulated device."""
    missing = verb("explain", f"{spec}::default", "--backend", "fake")
    assert missing.code == 2
    assert "no results of digits::default yet" in missing.err
    assert verb("tune", spec, "--backend", "fake").code == 0
    return tmp_path / "reports" / "digits" / "default"


def test_a_tuned_case_is_explained_by_name_and_by_folder(verb, spec, folder):
    by_case = verb("explain", f"{spec}::default", "--backend", "fake")
    assert by_case.code == 0
    assert "end to end, median ms" in by_case.out
    assert "tuned is" in by_case.out
    assert verb("explain", folder).out == by_case.out
    found = verb("explain", folder, "--json").json
    assert [engine["name"] for engine in found["engines"]] == ["reference", "tuned"]
    result = json.loads((folder / "result.json").read_text())
    assert found["engines"][0]["end_to_end_ms"] == result["reference"]["median_ms"]
    assert found["comparisons"][0]["renamed"] == {}


def test_a_case_is_compared_with_its_baseline(verb, folder):
    result = json.loads((folder / "result.json").read_text())
    assert result["regression"] == {}
    result["regression"] = case_to_json(faster_case())["regression"]
    (folder / "result.json").write_text(json.dumps(result))
    told = verb("explain", folder).out
    assert "note: regression: +0.4 % (95 %: -1.6 % to +2.4 %) against the baseline of 2026-01-08" in told
    assert "note: onnxruntime: was 1.31.0, is 1.31.1" in told


def test_the_reason_is_given_why_a_recurrent_operator_stays_float(verb, tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[3,1,8] x) => (float[3,1,1,4] y) {
      f = MatMul(x, v)  [cell] y = GRU<hidden_size = 4>(f, w, r) }"""
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, shape in {"v": (8, 8), "w": (1, 12, 8), "r": (1, 12, 4)}.items():
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name)
        )
    onnx.save(proto, tmp_path / "net.onnx")
    quantize_dynamic(tmp_path / "net.onnx", tmp_path / "tuned.onnx", op_types_to_quantize=["MatMul"])
    told = verb("explain", "tuned.onnx", "--reference", "net.onnx").out
    assert "note: cell has no label: GRU: there is no integer kernel of it" in told


def test_the_gain_of_each_correction_of_a_case_is_listed(verb, folder):
    assert "correction" not in verb("explain", folder).out
    result = json.loads((folder / "result.json").read_text())
    result["search"]["corrections"] = [asdict(gain) for gain in sample_corrections()]
    (folder / "result.json").write_text(json.dumps(result))
    rows = [line.split() for line in verb("explain", folder).out.splitlines()]
    assert ["ranges", "17.4", "20.9", "11", "applied"] in rows
    assert ["rounding", "20.9", "20.9", "0", "not", "applied"] in rows
    engines = verb("explain", folder, "--json").json["engines"]
    assert [engine["corrections"] for engine in engines] == [[], result["search"]["corrections"]]


def test_the_speedup_of_a_case_is_that_of_its_table_with_and_without_its_journal(verb, folder):
    """Without the journal both models are profiled again."""
    result = json.loads((folder / "result.json").read_text())
    found = [verb("explain", folder, "--json").json]
    (folder / "trials.jsonl").unlink()
    found.append(verb("explain", folder, "--json").json)
    for each in found:
        assert each["comparisons"][0]["speedup"] == pytest.approx(result["speedup"]["median"])
        times = [engine["end_to_end_ms"] for engine in each["engines"]]
        assert times == [result["reference"]["median_ms"], result["tuned"]["median_ms"]]
    before, after = ([engine["kernels"] for engine in each["engines"]] for each in found)
    assert before == after
    assert f", {at_least_text(result['speedup']['at_least'])}: " in verb("explain", folder).out


def test_an_unchanged_case_is_explained_by_its_best_candidates(verb, spec, tmp_path):
    """Also without its journal."""
    assert verb("tune", spec, "--backend", "fake", "-o", "out", "--min-gain", "90%").code == 0
    folder = tmp_path / "out" / "default"
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "unchanged"
    out = verb("explain", folder).out
    assert out.startswith(f"Unchanged:\n{result['reason']}\n\nCandidates that were not selected\n")
    found = verb("explain", folder, "--json").json
    assert found["search"]["unchanged"]
    assert found["search"]["rejected"] == result["search"]["rejected"]
    names = [candidate["role"] for candidate in found["search"]["rejected"]]
    assert [engine["name"] for engine in found["engines"]] == ["reference", *names[:2]]
    assert [one["tuned"] for one in found["comparisons"]] == names[:2]
    assert all(f"\n{name} is " in out for name in names[:2])
    (folder / "trials.jsonl").unlink()
    assert verb("explain", folder).out.startswith(f"Unchanged:\n{result['reason']}\n\nCandidates")


def test_the_profile_of_a_part_is_not_used_for_the_tuned_model(verb, folder):
    """`subgraph` builds parts with the same pairs that the selected model may have."""
    before = verb("explain", folder, "--json").json
    winner = json.loads((folder / "scheme.json").read_text())["digest"]
    lines = (folder / "trials.jsonl").read_text().splitlines(keepends=True)
    whole = next(found for line in lines if (found := json.loads(line))["placement"] == winner)
    part = {**whole, "phase": "isolated", "subgraph": ["conv"], "layers": whole["layers"][:1]}
    (folder / "trials.jsonl").write_text("".join([json.dumps(part) + "\n", *lines]))
    assert verb("explain", folder, "--json").json == before


def test_a_model_is_profiled_against_itself_without_pairs(verb):
    found = verb("explain", DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx", "--json").json
    reference, tuned = found["engines"]
    assert reference["integer_kernels"] == 0
    assert tuned["integer_kernels"] == tuned["kernels"] > 10, "read back from what ONNX Runtime runs"
    slow = verb("explain", DATA / "digits_resnet_qat_qdq.onnx").out
    assert "still run in float" in slow, (
        "int8 activations have no kernel there, and their pairs are not fused"
    )


def test_pairs_with_the_largest_errors_are_ranked_in_a_model_of_another_tool(verb, models):
    words = ("--culprits", "--reference", models / "digits_resnet.onnx")
    data = models.parent / "data" / "digits_calibration.npz"
    result = verb(
        "explain", DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx", *words, "--data", data, "--layers", "2"
    )
    assert result.code == 0
    assert "dB SQNR with 41 Q/DQ pairs (8 samples of evaluation data)" in result.out
    assert "logits > graph output" in result.out
    assert "the other 39" in result.out
    assert "outputs: false" in result.out


def test_pairs_with_the_largest_errors_are_ranked_in_a_case_and_in_its_folder(verb, spec, folder):
    found = verb("explain", spec, "--culprits", "--backend", "fake", "--json").json
    scheme = json.loads((folder / "scheme.json").read_text())
    assert found["total"] == len(found["pairs"]) == sum(s["format"] != "int32" for s in scheme["sites"])
    assert found["data"] == "random"
    assert any("random inputs are used" in note for note in found["notes"])
    of_folder = verb("explain", folder, "--culprits", "--backend", "fake", "--json").json
    assert of_folder["pairs"] == found["pairs"]


def test_a_model_without_its_original_is_ranked_against_itself_without_pairs(verb):
    result = verb("explain", DATA / "qdq_nncf_digits_resnet.onnx", "--culprits", "--layers", "1")
    assert result.code == 0
    assert "input > /conv1/Conv:0" in result.out
    assert "random inputs are used" in result.out


@pytest.mark.parametrize("more", [(), ("--culprits", "--layers", "2")])
def test_a_model_and_its_tuned_model_are_given_in_the_order_of_verify(verb, models, more):
    original, tuned = models / "digits_resnet.onnx", DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx"
    words = ("--data", models.parent / "data" / "digits_calibration.npz", "--json", *more)
    found = verb("explain", original, tuned, *words)
    same = verb("explain", tuned, "--reference", original, *words)
    assert (found.code, same.code) == (0, 0)
    if more:
        assert found.json == same.json
    else:
        names, others = (
            [[layer["name"] for layer in engine["layers"]] for engine in each.json["engines"]]
            for each in (found, same)
        )
        assert names == others


def test_dynamic_dimensions_are_given_on_the_command_line(verb, tmp_path):
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[batch,steps] x) => (float[batch,steps] y) {
          [relu] y = Relu(x) }"""
    )
    onnx.save(model, tmp_path / "net.onnx")
    missing = verb("explain", "net.onnx")
    assert missing.code == 2
    assert "--shapes" in missing.err
    result = verb("explain", "net.onnx", "--shapes", "x:2x5")
    assert result.code == 0
    assert "relu" in result.out
    assert verb("explain", "net.onnx", "--shapes", "z:2x5").code == 2


def test_a_model_is_profiled_with_the_values_of_the_data(verb, tmp_path):
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[batch,steps] x, int64 rate) => (float[batch,steps] y)
        <int64 wide = {16000}> {
          is_wide = Equal(rate, wide)
          [choice] y = If (is_wide) <then_branch = t () => (float[batch,steps] p) { [wide] p = Relu(x) },
                            else_branch = e () => (float[batch,steps] q) { [narrow] q = Sigmoid(x) }> }"""
    )
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=np.ones((3, 5), np.float32), rate=np.full(3, 16000))
    result = verb("explain", "net.onnx", "--data", "data.npz")
    assert result.code == 0, result.err
    assert "choice/then_branch/wide" in result.out
    assert "narrow" not in result.out


@pytest.fixture
def pair(tmp_path):
    """``net.onnx``: a Q/DQ pair before a Relu, for images of any size."""
    text = """<ir_version: 8, opset_import: ["": 17]>
        net (float[n,3,h,w] x) => (float[n,3,h,w] y) <float s = {0.1}, int8 z = {0}> {
          q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Relu(d) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")


@pytest.mark.parametrize("culprits", [(), ("--culprits",)])
def test_images_are_transformed_as_in_a_search(verb, tmp_path, pair, culprits):
    Image.new("RGB", (8, 8), (7, 9, 9)).save(tmp_path / "a.png")
    words = ("explain", "net.onnx", *culprits, "--data")
    found = verb(*words, "{images: '*.png', size: 8}", "--json")
    assert found.code == 0, found.err
    assert found.json.get("data", "evaluation") == "evaluation"
    missing = verb(*words, "{images: '*.jpg', size: 8}")
    assert (missing.code, "*.jpg" in missing.err) == (2, True)
    wrong = verb(*words, "{images: '*.png', sise: 8}")
    assert (wrong.code, "--data" in wrong.err, "did you mean 'size'?" in wrong.err) == (2, True, True)


@pytest.mark.parametrize("words", [("explain", "--culprits"), ("inspect",)])
def test_data_is_read_with_a_loader_of_an_entry_point(verb, pair, monkeypatch, words):
    point = importlib.metadata.EntryPoint("batches", "builtins:dict", "qdqspec.data")
    batches = [{"x": np.ones((3, 8, 8), np.float32)}] * 3
    monkeypatch.setattr(type(point), "load", lambda self: lambda: batches)
    own = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **by: [point] if by == {"group": "qdqspec.data"} else own(**by),
    )
    given_data._installed.cache_clear()
    found = verb(*words, "net.onnx", "--data", "{loader: batches}", "--json")
    assert found.code == 0, found.err
    unknown = verb(*words, "net.onnx", "--data", "{loader: batch}")
    assert (unknown.code, "did you mean 'batches'?" in unknown.err) == (2, True)
    given_data._installed.cache_clear()


def test_the_data_of_the_command_line_replaces_that_of_the_spec(verb, tmp_path):
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[n,steps] x) => (float[n,steps] y) {
          [relu] y = Relu(x) }"""
    )
    onnx.save(model, tmp_path / "net.onnx")
    for name, steps in (("spec", 5), ("other", 7)):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((3, steps), np.float32))
    (tmp_path / "a.qdq.yaml").write_text(
        "qdqspec: 1\nmodel: net.onnx\ninputs: {calibration: spec.npz}\nchecks: [{kind: parity, min_sqnr_db: 1}]\n"
    )
    assert verb("tune", "a.qdq.yaml", "--backend", "fake").code == 0
    (tmp_path / "spec.npz").unlink()
    (tmp_path / "reports" / "a" / "default" / "trials.jsonl").unlink()
    found = verb("explain", "a.qdq.yaml", "--backend", "fake", "--data", "other.npz")
    assert found.code == 0, found.err


@pytest.mark.parametrize("words", [(), ("--shapes", "x:1x4x8x8")])
def test_an_error_of_a_ranked_model_names_the_file_of_the_user(verb, tmp_path, pair, words):
    found = verb("explain", "net.onnx", "--culprits", *words)
    assert (found.code, found.err.startswith(f"qdqspec: {tmp_path / 'net.onnx'}: ")) == (2, True), found.err
