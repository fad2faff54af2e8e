"""``qdqspec explain`` with files of TensorRT, with a tuned case, and with a model."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from onnx_text import saved
from PIL import Image

from qdqspec._core.units import at_least_text
from qdqspec.app.evidence.explained import ExplainedEngine
from qdqspec.app.report.explain_text import explain_text
from qdqspec.backends.tensorrt.layers import parse_layers
from qdqspec.graph.model import load_model
from qdqspec.testing.records import alone_case, sample_corrections
from qdqspec.types import Interval

DATA = Path(__file__).parents[2] / "data"
SAMPLES = DATA / "tensorrt" / "samples"
QUARTET = ("fp16", "qat", "qat-residual", "qat-residual-qgap")


def graph(placement):
    return SAMPLES / f"trt8-resnet18-a100-{placement}.graph.json"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quartet", [graph(placement) for placement in reversed(QUARTET)]),  # their order is free
        *((f"fp16-{tuned}", [graph("fp16"), graph(tuned)]) for tuned in QUARTET[1:]),
        ("mobilenet", [SAMPLES / "trt8-mobilenetv2-qat.graph.json", "--layers", "5"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_of_placements_are_ranked_and_explained(verb, golden, name, words):
    """The files alone give the fastest placement, its ratio to the others, and the cause.

    Counts and times of the four placements of ResNet-18 are those that NVIDIA published.
    """
    result = verb("explain", *words)
    assert result.code == 0
    golden(f"explain/{name}.txt", result.out)


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


def test_json_has_ranking_comparisons_and_layers(verb):
    found = verb("explain", "--json", *map(graph, QUARTET)).json
    assert found["reference"] == "fp16"
    assert found["ranking"] == ["qat-residual-qgap", "qat-residual", "fp16", "qat"]
    engines = {engine["name"]: engine for engine in found["engines"]}
    assert [len(engines[name]["unfused_pairs"]) for name in QUARTET] == [0, 10, 3, 1]
    assert [engines[name]["integer_kernels"] for name in QUARTET] == [0, 21, 21, 22]
    comparison = found["comparisons"][0]
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
    assert "tuned is" in by_case.out
    assert verb("explain", folder).out == by_case.out


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
    found = verb("explain", folder, "--json").json
    assert found["search"]["rejected"] == result["search"]["rejected"]
    names = [candidate["role"] for candidate in found["search"]["rejected"]][:2]
    assert [engine["name"] for engine in found["engines"]] == ["reference", *names]
    assert [one["tuned"] for one in found["comparisons"]] == names
    head = f"Unchanged:\n{result['reason']}\n\nCandidates that were not selected\n"
    out = verb("explain", folder).out
    assert out.startswith(head)
    assert all(f"\n{name} is " in out for name in names)
    (folder / "trials.jsonl").unlink()
    assert verb("explain", folder).out.startswith(head)


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


def test_pairs_with_the_largest_errors_are_ranked_in_a_case_and_in_its_folder(verb, spec, folder):
    found = verb("explain", spec, "--culprits", "--backend", "fake", "--json").json
    scheme = json.loads((folder / "scheme.json").read_text())
    assert found["total"] == len(found["pairs"]) == sum(s["format"] != "int32" for s in scheme["sites"])
    assert any("random inputs are used" in note for note in found["notes"])
    assert (
        verb("explain", folder, "--culprits", "--backend", "fake", "--json").json["pairs"] == found["pairs"]
    )


def test_the_data_of_a_folder_are_those_of_its_spec(verb, spec, folder, models, tmp_path):
    """Unless the spec, or its model, is another one now."""
    shutil.copy(models.parent / "data" / "digits_calibration.npz", tmp_path)
    text = Path(spec).read_text()
    data = "inputs: {shapes: {input: [4, 1, 16, 16]}, calibration: digits_calibration.npz}\n"
    Path(spec).write_text(text + data)
    words = ("--culprits", "--backend", "fake", "--json")
    by_case, found = (verb("explain", what, *words).json for what in (spec, folder))
    assert (found["data"], found["pairs"]) == ("calibration", by_case["pairs"])
    (folder / "trials.jsonl").unlink()  # so that both models are profiled
    (folder / "reference.onnx").unlink()
    assert "reference.onnx" in verb("explain", folder).err
    saved(tmp_path / "digits.onnx", "net (float[1,4] x) => (float[1,4] y) { y = Relu(x) }")
    assert "reference.onnx" in verb("explain", folder, *words).err
    Path(spec).write_text("no spec")
    assert "reference.onnx" in verb("explain", folder, *words).err


def test_a_model_and_its_tuned_model_are_given_in_the_order_of_verify(verb, models):
    original, tuned = models / "digits_resnet.onnx", DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx"
    data = models.parent / "data" / "digits_calibration.npz"
    words = ("--data", data, "--culprits", "--layers", "2", "--json")
    found = verb("explain", original, tuned, *words)
    assert found.code == 0
    assert found.json == verb("explain", tuned, "--reference", original, *words).json


def test_figures_of_pairs_in_a_reference_that_lacks_a_scaling_do_not_hold(verb, tmp_path):
    """SmoothQuant divides activations by factors, and multiplies the weight by them."""
    random = np.random.default_rng(0)
    factors = np.exp(random.normal(size=64)).astype(np.float32)
    weight = random.normal(size=(64, 64)).astype(np.float32)
    head = "net (float[8,64] x) => (float[8,64] y)"
    saved(tmp_path / "net.onnx", f"{head} {{ y = MatMul(x, w) }}", w=weight)
    stored = np.rint(weight * factors[:, None] / np.float32(0.2)).clip(-127, 127).astype(np.int8)
    text = """<float s = {0.05}, uint8 z = {128}, float t = {0.2}, int8 o = {0}> {
        h = Mul(x, f)  q = QuantizeLinear(h, s, z)  d = DequantizeLinear(q, s, z)
        w = DequantizeLinear(stored, t, o)  y = MatMul(d, w) }"""
    saved(tmp_path / "tuned.onnx", f"{head} {text}", f=1 / factors, stored=stored)
    words = ("explain", "tuned.onnx", "--culprits", "--json")
    alone, found = verb(*words).json, verb(*words, "--reference", "net.onnx").json
    assert found["together_db"] < 0 < 10 < found["model_db"]
    assert found["words"][0].startswith("The figures do not hold for the quantized model")
    assert alone["model_db"] == pytest.approx(alone["together_db"], abs=0.5)
    assert not alone["words"][0].startswith("The figures do not hold")
    assert "do not hold" in verb("explain", "net.onnx", "tuned.onnx", "--culprits").out


def test_dynamic_dimensions_are_given_on_the_command_line(verb, tmp_path):
    saved(
        tmp_path / "net.onnx", "net (float[batch,steps] x) => (float[batch,steps] y) { [relu] y = Relu(x) }"
    )
    missing = verb("explain", "net.onnx")
    assert missing.code == 2
    assert "--shapes" in missing.err
    result = verb("explain", "net.onnx", "--shapes", "x:2x5")
    assert result.code == 0
    assert "relu" in result.out
    assert verb("explain", "net.onnx", "--shapes", "z:2x5").code == 2


@pytest.mark.parametrize("culprits", [(), ("--culprits",)])
def test_images_are_transformed_as_in_a_search(verb, tmp_path, culprits):
    text = """net (float[n,3,h,w] x) => (float[n,3,h,w] y) <float s = {0.1}, int8 z = {0}> {
          q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Relu(d) }"""
    saved(tmp_path / "net.onnx", text)
    Image.new("RGB", (8, 8), (7, 9, 9)).save(tmp_path / "a.png")
    words = ("explain", "net.onnx", *culprits, "--data")
    found = verb(*words, "{images: '*.png', size: 8}", "--json")
    assert found.code == 0, found.err
    assert found.json.get("data", "evaluation") == "evaluation"
    wrong = verb(*words, "{images: '*.png', sise: 8}")
    assert (wrong.code, "--data" in wrong.err, "did you mean 'size'?" in wrong.err) == (2, True, True)


@pytest.mark.parametrize(
    ("second", "missing"), [("s", ""), ("t", "no pair that a scheme can carry is in it")]
)
def test_pairs_that_no_scheme_carries_are_named_beside_the_culprits(verb, tmp_path, second, missing):
    """Their noise is not in the figures."""
    path = saved(
        tmp_path / "q.onnx",
        f"""g (float[1, 4] x) => (float[1, 4] y) <float s = {{0.5}}, float t = {{0.25}}> {{
            q = QuantizeLinear (x, s)  d = DequantizeLinear (q, {second})  y = Neg (d) }}""",
    )
    found = verb("explain", path, "--culprits", "--json").json
    assert (found.get("missing") or "") == missing
    assert any("other numbers than its QuantizeLinear" in note for note in found["notes"]) == bool(missing)
