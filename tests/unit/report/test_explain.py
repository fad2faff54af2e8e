"""The text about engines whose layers are matched by position, and about Q/DQ pairs that cost accuracy."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, strategies as st
from sample_evidence import sample_culprits

from qdqspec.app.evidence.explained import (
    EngineComparison,
    ExplainedEngine,
    layer_changes,
    median_layers,
)
from qdqspec.app.report.culprits import culprits_text
from qdqspec.app.report.explain_text import advice, explain_json, explain_text, sentences
from qdqspec.types import Consumer, LayerTime


def kernel(*nodes, ms=1.0, integer=False, precision="", name="", op="K"):
    return LayerTime(
        name=name or "+".join(nodes),
        op_type=op,
        milliseconds=ms,
        nodes=nodes,
        integer=integer,
        precision=precision,
    )


def conversion(op="Reformat", ms=0.5, name="", tensor="t"):
    return LayerTime(name=name or op, op_type=op, milliseconds=ms, tensors=(tensor,), boundary=True)


def engine(*layers, name="tuned", ms=None, **more):
    return ExplainedEngine(name=name, layers=layers, end_to_end_ms=ms, **more)


def test_advice_depends_on_the_observed_layers():
    add = kernel("Conv_1", "Add_2", integer=True, precision="int8 > fp16")
    alone = conversion("QuantizeLinear", name="q")
    assert "skip input" in " ".join(advice(engine(add, alone)))
    assert advice(engine(kernel("Conv_1", "Add_2", integer=True, precision="int8"), alone)) == []
    assert advice(engine(add)) == []
    assert "before the pool" in " ".join(advice(engine(kernel("MaxPool_1"), alone)))
    assert "quantize their inputs" in " ".join(advice(engine(kernel("Conv_1"), alone)))
    refused = engine(conversion("DequantizeLinear"), kernel("Conv_1"), alone)
    assert "no integer kernel" in " ".join(advice(refused))


layers = st.lists(
    st.builds(
        LayerTime,
        name=st.text(max_size=8),
        op_type=st.sampled_from(["Conv", "QuantizeLinear", "DequantizeLinear", "Reformat", "NoOp"]),
        milliseconds=st.sampled_from([0.0, 0.25, 1.0]),
        nodes=st.lists(st.sampled_from(["Conv_1", "Add_2", "Relu_3", "MaxPool_4", "\n", ""]), max_size=3).map(
            tuple
        ),
        tensors=st.just(()),
        boundary=st.booleans(),
        integer=st.booleans(),
        precision=st.sampled_from(["", "int8", "int8 > fp16"]),
    ),
    max_size=6,
).map(tuple)
engines = st.builds(
    ExplainedEngine, name=st.text(max_size=6), layers=layers, end_to_end_ms=st.none() | st.floats(0, 9)
)


@given(st.lists(engines, min_size=1, max_size=4))
def test_any_engines_can_be_explained_and_times_add_up(found):
    text = explain_text(found)
    assert text
    assert all(line.isprintable() for line in text.splitlines())
    explain_json(found)
    for one in found:
        both = EngineComparison(found[0], one)
        counted = sum(layer.milliseconds for layer in one.layers)
        assert sum(row.tuned_ms for row in both.rows) == pytest.approx(counted)


def test_a_runtime_without_kernels_has_no_table_of_them():
    reference, tuned = engine(name="reference", ms=2.0), engine(ms=1.0)
    alone = explain_text([tuned])
    assert "end to end" in alone
    assert "kernels: only whole times are known" in alone
    assert "precision" not in alone
    assert "tuned is 2.00 times as fast as reference" in explain_text([reference, tuned])


def test_float_kernels_with_quantized_inputs_are_reported():
    layers = kernel("conv", integer=True), kernel("softmax"), kernel("other")
    tuned = engine(*layers, quantized=frozenset({"conv", "softmax"}))
    reference = engine(kernel("conv"), kernel("softmax"), kernel("other"), name="reference")
    left = "1 kernel with quantized inputs does not compute in integers (1.00 ms, 33.3 %): softmax."
    assert left in sentences(EngineComparison(reference, tuned))
    assert "compute in integers" not in " ".join(sentences(EngineComparison(tuned, reference)))
    (left,) = explain_json([reference, tuned])["engines"][1]["left_in_float"]
    assert left["name"] == "softmax"


# ---- kernels without times ----------------------------------------------------------------------


def listed(*layers, **more):
    return engine(*(replace(layer, milliseconds=0.0) for layer in layers), **more)


def test_kernels_are_counted_by_place_and_type_where_a_runtime_has_several_places() -> None:
    on_npu = [replace(kernel(node), place="npu", precision="float32") for node in "abc"]
    quantized = [replace(kernel("a", integer=True), place="npu", precision="uint8"), *on_npu[1:]]
    quantized[2] = replace(on_npu[2], place="cpu", precision="")
    moved = replace(conversion("QuantizeLinear", name="q"), place="cpu")
    text = explain_text([listed(*on_npu, name="reference"), listed(*quantized, moved)])
    rows = [line.split() for line in text.splitlines()]
    assert ["kernels", "of", "kind", "place", "type", "reference", "tuned"] in rows
    assert [row for row in rows if row[:1] == ["K"]] == [
        ["K", "npu", "float32", "3", "1"],
        ["K", "npu", "uint8", "-", "1"],
        ["K", "cpu", "float", "-", "1"],
    ]
    assert "QuantizeLinear of t: cpu, behind c" in text
    assert "place" not in explain_text([listed(kernel("a"), name="reference"), listed(kernel("a"))])


def test_an_engine_without_times_is_not_compared_with_a_timed_one() -> None:
    engines = [engine(kernel("a"), name="reference", ms=1.0), listed(kernel("a", integer=True))]
    assert "do not show which engine is faster" in explain_text(engines)
    assert "ms" not in re.findall(r"\w+", explain_text(engines))
    found = explain_json(engines)
    assert (found["ranking"], found["comparisons"], found["words"]) == ([], [], None)
    timed, untimed = found["engines"]
    assert (timed["sum_ms"], timed["layers"][0]["milliseconds"]) == (1.0, 1.0)
    assert (untimed["sum_ms"], untimed["layers"][0]["milliseconds"]) == (None, None)
    assert set(untimed["milliseconds_of"].values()) == {None}


# ---- Q/DQ pairs ranked by their error ------------------------------------------------------------


SAMPLE = sample_culprits()


def test_the_text_of_responsible_pairs(golden) -> None:
    golden("explain/culprits.txt", culprits_text(SAMPLE) + "\n")


def test_the_text_where_noise_is_spread_over_many_pairs(golden) -> None:
    pairs = tuple(replace(pair, share=0.05, without_db=31.0) for pair in SAMPLE.pairs)
    spread = replace(SAMPLE, pairs=pairs, rest=0.85, missing="the time was over")
    golden("explain/culprits-spread.txt", culprits_text(spread) + "\n")


def test_the_lines_for_a_spec_are_valid_yaml_for_any_names_of_nodes() -> None:
    names = ['say "a"\\b', "x: [1]*", "Conv#5", "-"]
    pairs = tuple(
        replace(pair, site=replace(pair.site, consumers=(Consumer(name, 0),)), without_db=32.0 + number)
        for number, name in enumerate(names)
        for pair in SAMPLE.pairs[:1]
    )
    text = culprits_text(replace(SAMPLE, pairs=pairs))
    lines = text[text.index("patterns:") :]
    read = yaml.safe_load("\n".join(line.removeprefix("  ") for line in lines.split("\n")))
    assert read["patterns"]["nodes"]["exclude"] == ['say "a"\\b', "x: [[]1][*]", "Conv#5", "-"]


# ---- differences between the kernels of two versions ---------------------------------------------


OLD = (kernel("conv1", "relu1", ms=1.0), kernel("conv2", ms=1.0), kernel("add", ms=0.5, op="Add"))


def changes(old, new):
    return layer_changes([old], [new])


def test_kernels_of_another_name_or_order_with_the_same_nodes_are_the_same():
    new = tuple(replace(kernel, name="x") for kernel in OLD)
    assert changes(OLD, new[::-1]) == ()


def test_a_kernel_that_falls_back_to_float_changes_its_precision_and_time():
    old = (kernel("conv1", ms=0.4, integer=True, precision="int8"), OLD[1])
    (change,) = changes(old, (kernel("conv1", ms=1.0, precision="f32"), OLD[1]))
    assert change.kinds == ("precision", "time")
    assert change.before == ("K (conv1), int8",)
    assert change.after == ("K (conv1), f32",)


def test_a_new_conversion_is_a_change_of_fusion_and_names_its_tensor():
    (change,) = changes(OLD, (*OLD, conversion(ms=0.01, tensor="y")))
    assert change.kinds == ("fusion",)
    assert (change.nodes, change.tensors, change.before) == ((), ("y",), ())


def test_small_changes_of_time_and_those_that_other_builds_do_not_confirm_are_not_listed():
    assert changes(OLD, (kernel("conv1", "relu1", ms=1.2), *OLD[1:])) == ()  # 20 %
    tiny = (*OLD, kernel("tiny", ms=0.01))
    assert changes(tiny, (*OLD, kernel("tiny", ms=0.05))) == ()  # 1.6 % of the model
    slow = (kernel("conv1", "relu1", ms=1.3), *OLD[1:])
    assert layer_changes((OLD, OLD), (slow, OLD)) == ()
    assert layer_changes((OLD, slow), (slow, OLD)) == ()  # opposite signs
    (change,) = layer_changes((OLD, OLD), (slow, slow))
    assert change.kinds == ("time",)


def test_the_median_of_profiles_is_taken_kernel_by_kernel():
    profiles = [(kernel("a", ms=ms), kernel("b", ms=10 * ms)) for ms in (1.0, 9.0, 2.0)]
    assert [layer.milliseconds for layer in median_layers(profiles)] == [2.0, 20.0]
