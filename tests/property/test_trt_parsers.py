"""The parsers of TensorRT's outputs return a result for any text or raise one error, in bounded time."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qdqspec._core.units import without_passwords
from qdqspec.backends.tensorrt.layers import (
    EngineNames,
    Layer,
    Tensor,
    metadata_names,
    parse_layers,
    read_layers,
    read_profile,
)
from qdqspec.backends.trtexec.log import find_all, read_log
from qdqspec.errors import BackendError

names = st.text(st.sampled_from('abC_1 +|(){}[],.:*"\\\x1e\x1f') | st.characters(codec="utf-8"), max_size=40)


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


@given(
    st.lists(names.filter(lambda name: name and not set(name) & set("\x1e\x1f")), min_size=1),
    st.sampled_from("\x1e\x1f"),
)
@example(["a]", "[b"], "\x1e")
def test_names_of_nodes_are_recovered_from_metadata(nodes, separator):
    glued = [node for node in nodes if "][ONNX Layer: " not in node]
    written = separator.join(f"[ONNX Layer: {node}]" for node in glued)
    assert metadata_names(written) == tuple(dict.fromkeys(glued))


# Names without the text that is between two fields of a row: the format does not escape it.
FIELDS = (
    ", Dimensions: ", ", Location: ", ", LayerType: ", ", IOMode: ", "\nName: ", "\n\nI/O Tensors:", "\n\nBindings:",
)  # fmt: skip
row_names = names.filter(lambda name: name and not any(field in name for field in FIELDS))
written_types = {
    "Int8": "int8", "FP8": "fp8", "FP4E2M1": "fp4", "FP8UE8M0": "e8m0", "Float": "fp32", "Bool": "bool",
}  # fmt: skip
tensors = st.lists(
    st.tuples(
        row_names,
        st.sampled_from(sorted(written_types)),
        st.lists(st.integers(-1, 4096), max_size=5).map(tuple),
    ),
    max_size=3,
)
rows = st.tuples(
    row_names,
    st.sampled_from(["kgen", "correlation", "runtime_fusion"]),
    tensors,
    tensors,
    tensors,
    st.lists(row_names.filter(lambda name: not set(name) & set("\x1e\x1f\n")), max_size=3).map(
        lambda nodes: "\x1f".join(f"[ONNX Layer: {node}]" for node in nodes)
    ),
)
FORMATS = ("(Linear) Row major linear format", "(Arbitrary) Format with stride order = [1,2,0]")


def rendered(kernel):
    """A row as TensorRT for RTX writes it."""
    name, kind, *ends, metadata = kernel
    lists = [
        ", ".join(
            f"{{ Name: {tensor}, Dimensions: [{','.join(map(str, dims))}], Strides: [1], StrideOrder: [0], "
            f"Datatype: {dtype}, Format: {FORMATS[index % 2]} }}"
            for index, (tensor, dtype, dims) in enumerate(end)
        )
        for end in ends
    ]
    inputs, constants, outputs = (f" {text}" if text else "" for text in lists)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [{inputs}], Constants: [{constants}], Outputs: [{outputs}], "
        f"TacticName: tactic, StreamId: 0, Metadata: {metadata}"
    )


@given(st.lists(rows, max_size=4))
@example(
    [
        (
            "a], Outputs: [b",
            "kgen",
            [("}, { Name: c], Inputs: [", "Int8", (1,))],
            [],
            [],
            "[ONNX Layer: d, Metadata: ]",
        )
    ]
)
def test_kernels_are_read_as_a_build_writes_them(kernels):
    text = "\n".join(["Layers:", *map(rendered, kernels), "", "I/O Tensors:", " Name: x, IOMode: Input"])

    def read_back(tensors):
        return tuple(Tensor(name, written_types[dtype], dims) for name, dtype, dims in tensors)

    found = read_layers(text)
    assert [(each.name, each.layer_type, each.metadata, each.tactic) for each in found] == [
        (name, kind, metadata, "tactic") for name, kind, *_, metadata in kernels
    ]
    assert [(each.inputs, each.constants, each.outputs) for each in found] == [
        tuple(map(read_back, ends)) for _, _, *ends, _ in kernels
    ]
    assert all(isinstance(each, Layer) for each in found)
    check(parse_layers(text))


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
        "Layers:\n" + "Name: a, LayerType: b" * 50_000,
        "Layers:\n" + "Name: a, LayerType: b, Inputs: [" + " { Name: a, Dimensions: [1], Datatype: " * 50_000,
        "Layers:\nName: a, LayerType: b, Inputs: ["
        + " { Name: a, Dimensions: [1], Datatype: Int8 }," * 50_000,
        "Layers:\nName: a, LayerType: b, Inputs: [ { Name: a" + ", Dimensions: [1], Location: D" * 50_000,
        "Layers:\n" + "\n" * 200_000,
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
