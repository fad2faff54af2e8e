"""The parsers of TensorRT's outputs return a result for any text or raise one error, in bounded time."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from qdqspec._core.units import without_passwords
from qdqspec.backends.tensorrt.layers import (
    EngineNames,
    Tensor,
    metadata_names,
    parse_layers,
    read_layers,
    read_profile,
)
from qdqspec.backends.trtexec.process import read_log
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


@given(
    st.lists(names.filter(lambda name: name and not set(name) & set("\x1e\x1f")), min_size=1),
    st.sampled_from("\x1e\x1f"),
)
@example(["a]", "[b"], "\x1e")
def test_names_of_nodes_are_recovered_from_metadata(nodes, separator):
    glued = [node for node in nodes if "][ONNX Layer: " not in node]
    written = separator.join(f"[ONNX Layer: {node}]" for node in glued)
    assert metadata_names(written) == tuple(dict.fromkeys(glued))


def test_a_kernel_with_separators_in_its_names_is_read():
    """TensorRT for RTX writes names without escaping."""
    tensor = "}, { Name: c], Inputs: ["
    row = (
        f"Name: a], Outputs: [b, LayerType: kgen, Inputs: [ {{ Name: {tensor}, Dimensions: [1], Strides: [1], "
        "StrideOrder: [0], Datatype: Int8, Format: (Linear) Row major linear format }], Constants: [], "
        "Outputs: [], TacticName: tactic, StreamId: 0, Metadata: [ONNX Layer: d, Metadata: ]"
    )
    (found,) = read_layers(f"Layers:\n{row}\n\nI/O Tensors:\n Name: x, IOMode: Input")
    assert (found.name, found.layer_type) == ("a], Outputs: [b", "kgen")
    assert found.metadata == "[ONNX Layer: d, Metadata: ]"
    assert (found.inputs, found.constants, found.outputs) == ((Tensor(tensor, "int8"),), (), ())


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
    read_log(hostile)
    without_passwords(hostile)
