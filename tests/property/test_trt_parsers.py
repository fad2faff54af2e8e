"""The parsers of TensorRT's outputs return a result for any text or raise one error, in bounded time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qdqspec.backends.tensorrt.layers import (
    EngineNames,
    metadata_names,
    parse_layers,
    read_profile,
    read_times,
)
from qdqspec.backends.trtexec.log import find_all, read_log
from qdqspec.errors import BackendError
from qdqspec.units import without_passwords

SAMPLES = Path(__file__).parents[1] / "data" / "tensorrt" / "samples"
GRAPH = (SAMPLES / "trt10.16-mnist-detailed.graph.json").read_text()
PROFILE = (SAMPLES / "trt8-resnet18-a100-qat-residual.profile.json").read_text()
LOG = (SAMPLES / "trt10.16-mnist-dumpProfile.log").read_text()

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
keys = st.sampled_from(
    [
        "Name",
        "LayerType",
        "Inputs",
        "Outputs",
        "Origin",
        "Metadata",
        "Weights",
        "Constants",
        "TacticName",
        "Datatype",
    ]
)
layers = st.lists(st.dictionaries(keys, values, max_size=8) | st.text(max_size=30), max_size=5)
names = st.text(st.sampled_from('abC_1 +|(){}[],.:*"\\\x1e\x1f') | st.characters(codec="utf-8"), max_size=40)


def damaged(text):
    """A recorded text with one section replaced."""
    return st.builds(
        lambda start, length, patch: text[:start] + patch + text[start + length :],
        st.integers(0, len(text)),
        st.integers(0, 40),
        st.text(max_size=10),
    )


def read(reader, *arguments):
    """The result of the reader, or ``None`` for a `BackendError`, which must have a cure."""
    try:
        return reader(*arguments)
    except BackendError as caught:
        error = caught
    assert error.cure
    assert "\n" not in error.what
    return None


def check(found):
    for layer in found or ():
        assert math.isfinite(layer.milliseconds)
        assert layer.milliseconds >= 0
        assert layer.boundary != bool(layer.nodes)


@given(st.text(max_size=200) | damaged(GRAPH))
def test_any_text_is_accepted_as_layer_information(text):
    check(read(parse_layers, text))


@given(st.text(max_size=200) | damaged(PROFILE), layers)
def test_any_text_is_accepted_as_a_profile(text, found):
    check(read(parse_layers, {"Layers": found}, text))
    read(read_times, text)


@given(
    st.fixed_dictionaries({}, optional={"Layers": values | layers, "Bindings": values, "I/O Tensors": values})
)
def test_any_object_is_accepted_as_layer_information(graph):
    check(read(parse_layers, graph))
    check(read(parse_layers, json.dumps(graph)))


@given(st.lists(st.dictionaries(st.sampled_from(["name", "averageMs", "timeMs", "count"]), values)))
def test_any_list_is_accepted_as_a_profile(profile):
    check(read(parse_layers, {"Layers": ["a"]}, profile))


@given(names, names)
def test_names_of_nodes_from_any_layer_name_are_not_empty(name, metadata):
    for node in EngineNames().of_layer(name, metadata):
        assert node


@given(
    st.lists(names.filter(lambda name: name and not set(name) & set("\x1e\x1f")), min_size=1),
    st.sampled_from("\x1e\x1f"),
)
@example(["a]", "[b"], "\x1e")
def test_names_of_nodes_are_recovered_from_metadata(nodes, separator):
    glued = [node for node in nodes if "][ONNX Layer: " not in node]
    written = separator.join(f"[ONNX Layer: {node}]" for node in glued)
    assert metadata_names(written) == tuple(dict.fromkeys(glued))


@given(st.text(max_size=300) | damaged(LOG))
def test_any_text_is_accepted_as_a_log(text):
    report = read_log(text)
    assert report.median_ms is None or math.isfinite(report.median_ms)
    assert all(math.isfinite(milliseconds) for _, milliseconds in report.profile)
    assert all("\n" not in finding.text for finding in report.findings)


@given(st.dictionaries(names.filter(bool), st.floats(1e-6, 1e3), max_size=6))
def test_all_times_of_a_profile_are_read_for_any_names(times):
    """Names are written without escaping as by trtexec, so line breaks are excluded."""
    times = {name.replace("\n", " "): t for name, t in times.items() if '", "' not in name}
    rows = [
        f', {{ "name" : "{name}", "timeMs" : {t}, "averageMs" : {t}, "percentage" : 1 }}'
        for name, t in times.items()
    ]
    written = "\n".join(['[\n  { "count" : 1 }', *rows, "]"])
    found = read(read_profile, written)
    if found is not None and not any(
        "\\" in name for name in times
    ):  # escapes such as \n are decoded by the JSON reader
        assert dict(found) == pytest.approx(times)


@given(st.text("abc:/@ \n", min_size=1, max_size=12))
def test_passwords_are_removed_from_options(password):
    word = password.split()[0] if password.split() else "x"
    shown = without_passwords(f"--remoteAutoTuningConfig=ssh://user:{word}SECRET@host:22?a=b --safe")
    assert "SECRET" not in shown
    assert shown.endswith("--safe")


@pytest.mark.parametrize(
    "hostile",
    [
        "[" * 200_000,
        '{"Layers": ' * 50_000,
        "a + " * 100_000,
        "PWN(" * 100_000,
        "PWN(" * 50_000 + ")" * 50_000,
        "{ForeignNode[" * 50_000,
        "1 " * 200_000,
        "[ONNX Layer: a" * 50_000,
        "x://" * 100_000,
        "symmetric quantization " * 50_000,
        '{ "name" : "' * 50_000,
    ],
    ids=lambda text: f"{text[:10]}...{text[-6:]}",
)
def test_large_nested_texts_are_read_in_limited_time(hostile):
    read(parse_layers, hostile)
    read(parse_layers, {"Layers": [hostile]})
    read(read_profile, hostile)
    EngineNames().of_layer(hostile, hostile)
    read_log(f"=== Profile (1 iterations ) ===\nTime(ms) Avg.(ms) Time(%) Layer\n{hostile}\n")
    find_all(hostile)
    without_passwords(hostile)
