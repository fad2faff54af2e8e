"""``inspect``, ``apply``, ``strip``, ``import``, ``diff``, ``fold`` and ``lint``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx_text import saved
from random_models import ranges_for
from refused_models import mixed_float_types, pair_that_no_build_takes

from qdqspec.graph.given import given_model
from qdqspec.graph.model import load_model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.types import Consumer, Placement, Site

DATA = Path(__file__).parents[2] / "data"
QAT = DATA / "digits_resnet_qat_qdq.onnx"


@pytest.fixture
def model(models, tmp_path):
    path = tmp_path / "digits.onnx"
    path.write_bytes((models / "digits_resnet.onnx").read_bytes())
    return path


def test_inspect_prints_the_regions_and_patterns(verb, model):
    result = verb("inspect", model)
    assert result.code == 0
    assert "quantizable on onnxruntime:" in result.out
    assert len(verb("inspect", model, "--verbose").out) > len(result.out)
    assert len(verb("inspect", model, "--lines", "2").out) < len(result.out)
    regions, patterns = (verb("inspect", model, word).out for word in ("--regions", "--patterns"))
    assert ("r0 ROOT" in regions, "Patterns" in regions) == (True, False)
    assert ("r0 ROOT" in patterns, "Patterns" in patterns) == (False, True)


def test_inspect_has_an_option_for_the_size_of_regions(verb, model):
    def leaves(*words):
        found = verb("inspect", model, "--json", *words).json
        sizes = [len(region["nodes"]) for region in found["regions"] if region["type"] == "LEAF"]
        assert sum(sizes) == found["coverage"]["nodes"] >= found["coverage"]["quantizable"] > 0
        return sizes

    assert max(leaves("--max-nodes", "3")) < max(leaves())
    assert verb("inspect", model, "--max-nodes", "0").code == 2


def test_inspect_counts_at_the_shapes_of_data_or_states_assumed_ones(verb, tmp_path):
    text = "net (float[n,steps,4] x) => (float[n,steps,4] y) { y = MatMul(x, w) }"
    saved(tmp_path / "net.onnx", text, w=np.ones((4, 4), np.float32))
    np.savez(tmp_path / "data.npz", x=np.ones((2, 30, 4), np.float32))
    assert "unknown sizes taken as 1: 'n', 'steps'" in verb("inspect", "net.onnx").out
    np.savez(tmp_path / "other.npz", y=np.ones((2, 30, 4), np.float32))
    named = "{arrays: other.npz, names: {x: y}}"
    given = (("--data", "data.npz"), ("--data", "dat*.npz"), ("--data", named), ("--shapes", "x:1x30x4"))
    for words in given:
        found = verb("inspect", "net.onnx", "--json", *words).json["forecast"]
        assert (found["multiplications"], found["assumed"]) == (30 * 16, [])


def test_a_written_model_that_is_not_valid_is_a_warning(verb, tmp_path):
    """The float types of data and weight differ, also once the pairs are removed (Model-Optimizer#2314)."""
    given = mixed_float_types(tmp_path / "mixed.onnx")
    stripped = verb("strip", given, "-o", "float.onnx", "--json")
    (warning,) = stripped.json["warnings"]
    assert warning.startswith("float.onnx: the model is not valid ONNX: ")
    assert "W has inconsistent type tensor(float)" in warning
    assert f"warning: {warning}" in stripped.err
    assert (
        "warning: folded.onnx: the model is not valid ONNX: " in verb("fold", given, "-o", "folded.onnx").err
    )


def test_import_strip_and_apply_give_the_same_model(verb, tmp_path) -> None:
    imported = verb("import", QAT, "-o", "scheme.json", "--json")
    assert imported.code == 0
    assert (imported.json["activations"], imported.json["weights"]) == (13, 15)
    assert imported.json["digest"] == json.loads((tmp_path / "scheme.json").read_text())["digest"]
    assert verb("strip", QAT, "-o", "float.onnx").code == 0
    assert verb("apply", "float.onnx", "scheme.json", "-o", "again.onnx").code == 0
    compared = verb("diff", QAT, "again.onnx")
    assert compared.code == 0, compared.out
    assert compared.out == "28 equal Q/DQ pairs; the float models are the same\n"


def test_apply_notes_a_scheme_without_sites_and_pairs_that_the_model_had(verb, model, tmp_path) -> None:
    """A search that selects the reference writes a scheme without sites."""
    (tmp_path / "scheme.json").write_text('{"schema_version": 1, "backend": "fake", "sites": []}')
    empty = verb("apply", model, "scheme.json", "-o", "same.onnx")
    assert (empty.code, "note: the scheme has no sites: no pair is inserted\n" in empty.out) == (0, True)
    assert (
        "28 dequantized tensors in it, 28 of them before"
        in verb("apply", QAT, "scheme.json", "-o", "b.onnx").out
    )


def test_strip_counts_what_it_removed_and_names_operators_that_it_keeps(verb, tmp_path) -> None:
    text = """g (float[1,4,4,4] x) => (float[1,4,4,4] y) <float s = {0.5}, uint8 z = {128}> {
        f = QuantizeLinear(x, s, z)  e = DequantizeLinear(f, s, z)  a = Neg(e)  q = QuantizeLinear(a, s, z)
        [integers] c = QLinearConv(q, s, z, w, s, z, s, z)  y = DequantizeLinear(c, s, z) }"""
    saved(tmp_path / "net.onnx", text, w=np.ones((4, 4, 1, 1), np.uint8))
    stripped = verb("strip", "net.onnx", "-o", "float.onnx")
    assert "float.onnx: 1 dequantized tensor removed, 1 left" in stripped.out
    kept = "operators that compute in integers themselves, QLinearConv, 1: 'integers': left as they are"
    assert kept in stripped.out
    assert kept in verb("import", "net.onnx", "-o", "scheme.json").out
    again = verb("strip", "float.onnx", "-o", "again.onnx", "--json")
    assert (again.json["pairs"], again.json["left"]) == (0, 1)


def test_import_reports_its_assumptions(verb) -> None:
    result = verb("import", DATA / "qdq_ort_u8s8_digits_resnet_b1.onnx", "-o", "scheme.json")
    assert result.code == 0
    assert "note: a Relu was inserted where a zero point cuts off negative values" in result.out
    assert result.out.endswith("scheme.json: 25 activation and 32 weight pairs in it\n")


def test_diff_lists_twelve_pairs_without_verbose(verb, models) -> None:
    words = ("diff", models / "digits_resnet.onnx", QAT)
    found = verb(*words, "--json").json
    assert (found["same"], len(found["added"])) == (False, 28)
    cut, whole = verb(*words), verb(*words, "--verbose")
    assert "and 16 more" in cut.out
    assert len(whole.out.splitlines()) > len(cut.out.splitlines())


def test_fold_writes_a_smaller_model(verb, models, tmp_path) -> None:
    result = verb("fold", models / "ultraface_rfb320.onnx", "-o", "folded.onnx", "--json")
    assert result.code == 0
    assert result.json["folded"] > 0
    assert len(load_model(tmp_path / "folded.onnx").nodes) == result.json["nodes"] < 244
    assert "0 nodes folded" in verb("fold", "folded.onnx", "-o", "again.onnx").out


# ---- lint ----------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    """Writes a model with one pair of this zero point."""

    def write(zero: str) -> str:
        text = """g (float[4,16] x) => (float[4,16] y) <float s = {0.1}, %s> {
          q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)  y = Neg(a) }"""
        return str(saved(tmp_path / "pair.onnx", text % zero, opset=21, ir_version=10))

    return write


def test_slow_findings_fail_only_if_strict(verb, pair):
    words = ["lint", pair("int8 z = {0}"), "--target", "tensorrt-11"]
    assert verb(*words).code == 0
    assert "slow TRT042" in verb(*words).out
    assert verb(*words, "--strict").code == 1


def test_json_has_findings_of_several_targets(verb, pair):
    words = ["--target", "tensorrt-10", "--target", "onnxruntime-cpu", "--json"]
    result = verb("lint", pair("uint8 z = {9}"), *words)
    assert result.code == 1
    assert result.json["schema_version"] == 1
    assert list(result.json["targets"]) == ["tensorrt-10", "onnxruntime-cpu"]
    first = result.json["targets"]["tensorrt-10"][0]
    assert first.keys() == {"id", "severity", "node", "message", "title", "cure", "source"}
    assert (first["id"], first["severity"]) == ("TRT001", "refused")


def test_the_runtime_of_the_target_loads_the_model(verb, tmp_path):
    """It refuses this one, whose nodes the static rules accept; without the option it is not loaded."""
    path = pair_that_no_build_takes(tmp_path / "pair.onnx")
    words = ["lint", path, "--target", "onnxruntime-cpu", "--json"]
    unloaded = verb(*words, "--no-load")
    assert unloaded.code == 0
    assert "; static rules only, not loaded: not asked for" in unloaded.json["text"]
    found = verb(*words)
    load = found.json["loads"]["onnxruntime-cpu"]
    if load["loaded"]:
        pytest.skip("this ONNX Runtime optimizes the model to one that it can load")
    assert found.code == 1
    assert "refused RUN001" in found.json["text"]
    assert load["note"] == f"{load['runtime']} refused it"
    assert f"; {load['note']}\n" in found.json["text"]


# ---- a model with an input fixed to a value, and a function in a branch --------------------------


TEXT = """g (float[n,4,8,8] x, int64 rate) => (float[n,4,8,8] y) <int64 wide = {16000}> {
  is_wide = Equal(rate, wide)
  [gate] y = If (is_wide) <
    then_branch = yes () => (t) { [block] t = local.block(x, w) },
    else_branch = no () => (e) { d = Neg(x)  e = Relu(d) }
  >
}
<domain: "local", opset_import: ["": 17]> block (x, w) => (y) {
  [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w)
  [relu] y = Relu(c)
}"""
CONV = "block/conv"
VALUES = ("--values", "rate:16000")


@pytest.fixture
def files(tmp_path: Path, verb) -> Path:
    """``rates.onnx``, a scheme for it at 16000, and ``tuned.onnx`` made of both."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(4, 4, 3, 3)).astype(np.float32)
    path = saved(tmp_path / "rates.onnx", TEXT, opset=17, ir_version=8, w=weights)
    sites = (
        Site(tensor="x", consumers=(Consumer(CONV, 0),), format="uint8"),
        Site(tensor="w", consumers=(Consumer(CONV, 1),), format="int8", weight=True),
    )
    given, placement = given_model(path, {"rate": 16000}), Placement(sites=frozenset(sites))
    numbers = Quantizer(given, ranges_for(given)).placed(placement)
    SchemeFile(backend="onnxruntime-cpu", pairs=numbers).write(tmp_path / "scheme.json")
    np.savez(tmp_path / "data.npz", x=random.uniform(-1, 1, size=(2, 1, 4, 8, 8)).astype(np.float32))
    applied = verb("apply", "rates.onnx", "scheme.json", "-o", "tuned.onnx", *VALUES)
    assert applied.code == 0, applied.err
    return tmp_path


def test_the_model_at_the_value_is_inspected_linted_applied_imported_and_stripped(files: Path, verb) -> None:
    def run(*words: str) -> None:
        result = verb(*words, *VALUES)
        assert result.code == 0, result.out + result.err

    shown = verb("inspect", "rates.onnx", "--json", *VALUES).json
    assert {node for region in shown["regions"] for node in region["nodes"]} == {CONV, "block/relu"}
    run("lint", "rates.onnx", "--target", "onnxruntime-cpu")
    tuned = load_model(files / "tuned.onnx")
    assert tuned.inputs == ("x",)
    assert sum(node.op_type == "DequantizeLinear" for node in tuned.nodes) == 2
    assert verb("apply", "rates.onnx", "scheme.json", "-o", "out.onnx", "--values", "rate:8000").code == 2
    assert not (files / "out.onnx").exists()
    run("import", "tuned.onnx", "-o", "again.json", "--reference", "rates.onnx")
    run("apply", "rates.onnx", "again.json", "-o", "again.onnx")
    assert verb("diff", "tuned.onnx", "again.onnx").code == 0
    run("strip", "tuned.onnx", "-o", "back.onnx", "--reference", "rates.onnx")
    given = given_model(files / "rates.onnx", {"rate": 16000})
    np.testing.assert_array_equal(load_model(files / "back.onnx").array("w"), given.array("w"))


def test_verify_runs_the_original_with_the_value(files: Path, verb) -> None:
    result = verb("verify", "rates.onnx", "tuned.onnx", "--data", "data.npz", *VALUES)
    assert result.code == 0, result.err
    np.savez(
        files / "input.npz", x=np.random.default_rng(1).uniform(-1, 1, (1, 1, 4, 8, 8)).astype(np.float32)
    )
    probed = verb("verify", "rates.onnx", "tuned.onnx", "--input", "input.npz", *VALUES, "--min-sqnr-db", "5")
    assert probed.code == 0, probed.out + probed.err
    assert verb("verify", "rates.onnx", "tuned.onnx", "--input", "input.npz").code == 2


@pytest.mark.parametrize("more", [(), ("--culprits",), ("--reference", "rates.onnx")])
def test_explain_reads_the_models_at_the_value(files: Path, verb, more: tuple[str, ...]) -> None:
    result = verb("explain", "tuned.onnx", "--data", "data.npz", *VALUES, *more)
    assert result.code == 0, result.err
    assert CONV in result.out
    noted = "tuned.onnx has no input 'rate': it is assumed to have been fixed when the model was made"
    assert (noted in result.out) == ("--reference" not in more)
