"""Loading and saving of models, messages for files that are no models, and the flat form of bodies."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from onnx import TensorProto, helper, numpy_helper
from onnx_text import parsed
from random_models import onnx_models

from qdqspec._core.files import write_text
from qdqspec.errors import ModelError, OutputError
from qdqspec.graph import model as graph_model
from qdqspec.graph.flat import closed, flat_form
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.storage import WeightStore, array_of, save_model


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model whose only weight is in weights.bin in the same folder."""
    (tmp_path / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="weights.bin")
    proto = parsed("g (float[4] x) => (float[4] y) { y = Add(x, w) }").proto
    proto.graph.initializer.append(weight)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


INVALID = parsed("g (float[4] x) => (float[4] y) { y = Relu(nobody) }").proto.SerializeToString()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such model file"),
        ("", "this is a folder"),
        *((content, "") for content in (b"", b"not a model", b"\xff" * 64)),
        (INVALID, "the model is not valid ONNX: .*nobody"),
    ],
)
def test_a_file_that_is_no_model_is_refused_with_its_name(tmp_path: Path, content, message: str) -> None:
    path = tmp_path / "broken.onnx"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(ModelError, match=rf"broken\.onnx: .*{message}") as caught:
        load_model(path)
    assert caught.value.cure


@pytest.mark.parametrize(
    ("operator", "opset"),
    [("LayerNormalization", 14), ("SimplifiedLayerNormalization", 17), ("SimplifiedLayerNormalization", 23)],
)
def test_operators_that_a_runtime_has_in_the_default_domain_are_valid(
    tmp_path: Path, operator: str, opset: int
) -> None:
    text = f"g (float[2,4] x, float[4] w) => (float[2,4] y) {{ y = {operator}(x, w) }}"
    onnx.save(parsed(text, opset).proto, tmp_path / "net.onnx")
    model = load_model(tmp_path / "net.onnx")
    assert [(node.op_type, node.domain) for node in model.nodes] == [(operator, "")]
    assert [imported.domain for imported in model.proto.opset_import] == [""]


def test_missing_external_data_is_named_with_its_path(external: Path) -> None:
    (external.parent / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"'weights\.bin' is missing") as caught:
        load_model(external)
    assert str(external.parent / "weights.bin") in (caught.value.cure or "")


def test_the_hash_is_that_of_the_bytes_with_their_external_data(external: Path, tmp_path: Path) -> None:
    before = load_model(external)
    assert before.array("w").tolist() == [0, 1, 2, 3]
    copy = shutil.copytree(external.parent, tmp_path / "elsewhere")
    assert load_model(copy / "model.onnx").sha256 == before.sha256
    (external.parent / "weights.bin").write_bytes(bytes(16))
    assert load_model(external).sha256 != before.sha256


def test_generated_node_names_do_not_depend_on_pairs() -> None:
    proto = parsed(
        """g (float[4] x) => (float[4] y) { a = Relu(x)  b = Relu(a)  s = Constant<value_float = 0.1>()
            q = QuantizeLinear(b, s)  d = DequantizeLinear(q, s)  y = Neg(d) }"""
    ).proto
    for node in proto.graph.node[:2]:
        node.name = "same"
    names = "same Relu#1 Constant#2 QuantizeLinear#0 DequantizeLinear#1 Neg#3"
    assert [node.name for node in Model(proto).nodes] == names.split()


TWO = """g (bool yes, float[4] x) => (float[4] y)
    <float[4] w = {1, 2, 3, 4}> {
    h = Relu(x)
    [choice] y = If(yes) <
        then_branch = then () => (float[4] a) <float[4] k = {1, 1, 1, 1}> { b = Add(h, k) [act] a = Mul(b, w) },
        else_branch = other () => (float[4] a) <float[4] k = {2, 2, 2, 2}> { [act] a = Add(h, k) }
    >
}"""


@given(onnx_models(repeated_names=True))
def test_any_model_is_equal_byte_for_byte_after_conversion_back(proto: onnx.ModelProto) -> None:
    found = Model(flat_form(proto)).proto
    before, after = (each.SerializeToString(deterministic=True) for each in (proto, found))
    assert after == before


def test_nodes_are_in_one_graph_under_unique_names() -> None:
    model = parsed(TWO)
    operators = [node for node in model.nodes if not node.is_marker]
    assert [node.name for node in operators] == [
        "Relu#0",
        "choice/then_branch/Add#0",
        "choice/then_branch/act",
        "choice/else_branch/act",
        "choice",
    ]
    assert [node.scope for node in operators] == ["", *["choice/then_branch"] * 2, "choice/else_branch", ""]
    assert operators[2].outputs == ("choice/then_branch/a",)
    assert operators[-1].inputs == ("yes",)
    assert model.captured == {"h"}
    np.testing.assert_array_equal(model.array("choice/else_branch/k"), [2, 2, 2, 2])
    assert model.shape("b") == (4,)
    assert {end.name for end in model.bodies["choice"]} == {"choice/then_branch", "choice/else_branch"}


def test_a_new_constant_is_stored_in_the_graph_that_reads_it() -> None:
    flat = flat_form(parsed(TWO).proto)
    by_name = {node.name: node for node in flat.graph.node}
    for name, value in (("in_then", 5), ("in_both", 6)):
        flat.graph.initializer.append(numpy_helper.from_array(np.full(4, value, np.float32), name))
    by_name["choice/then_branch/Add#0"].input[1] = "in_then"
    by_name["choice/then_branch/act"].input[1] = "in_both"
    by_name["choice/else_branch/act"].input[1] = "in_both"
    proto = closed(flat)
    onnx.checker.check_model(proto, full_check=True)
    then, other = (attribute.g for attribute in proto.graph.node[1].attribute)
    assert [t.name for t in proto.graph.initializer] == ["w", "in_both"]
    assert [t.name for t in then.initializer] == ["k", "in_then"]
    assert [t.name for t in other.initializer] == ["k"]


def test_a_path_that_is_a_prefix_of_a_node_name_is_changed() -> None:
    proto = parsed(TWO).proto
    proto.graph.node[0].name = "choice/then_branch/act"
    scopes = {node.scope for node in Model(proto).nodes}
    assert scopes == {"", "choice/then_branch~1", "choice/else_branch"}


# ---- model files: written completely or not at all, with weights beside the model, and read without them


@pytest.fixture
def proto() -> onnx.ModelProto:
    return parsed("g (float[64] x) => (float[64] y) { y = Add(x, w) }", w=(64,)).proto


@pytest.mark.parametrize("alias", ["itself", "relative", "symlink", "hardlink"])
def test_an_input_is_never_overwritten(
    proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    given = tmp_path / "given.onnx"
    given.write_bytes(b"the user's own")
    monkeypatch.chdir(tmp_path)
    output = {"itself": given, "relative": Path("given.onnx")}.get(alias, tmp_path / "alias.onnx")
    if alias == "symlink":
        output.symlink_to(given)
    if alias == "hardlink":
        output.hardlink_to(given)
    with pytest.raises(OutputError, match="would overwrite the input"):
        save_model(proto, output, inputs=[given])
    assert given.read_bytes() == b"the user's own"


def test_a_missing_folder_or_a_folder_in_place_of_the_file_is_named(
    proto: onnx.ModelProto, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="nowhere: there is no such folder"):
        save_model(proto, tmp_path / "nowhere" / "a.onnx")
    with pytest.raises(OutputError, match="this is a folder"):
        save_model(proto, tmp_path)
    with pytest.raises(OutputError, match=r"nowhere.weights\.bin: the weights' file cannot be written"):
        WeightStore(tmp_path / "nowhere")


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_a_failure_while_writing_keeps_the_old_file(
    proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    (tmp_path / "a.onnx").write_bytes(b"old")
    monkeypatch.setattr(Path, "open", Mock(side_effect=raised))
    with pytest.raises((KeyboardInterrupt, OutputError)):
        save_model(proto, tmp_path / "a.onnx")
    monkeypatch.undo()
    assert (tmp_path / "a.onnx").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.onnx"]


def test_a_large_model_is_saved_with_external_weights(tmp_path: Path) -> None:
    values = np.arange(512, dtype=np.float32)
    proto = parsed("g (float[512] x) => (float[512] y) { y = Add(x, w) }", w=values).proto
    save_model(proto, tmp_path / "a.onnx", limit_bytes=1500)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "a.onnx.data"]
    assert (tmp_path / "a.onnx").stat().st_size < 1000
    np.testing.assert_array_equal(load_model(tmp_path / "a.onnx").array("w"), values)


def test_texts_and_files_of_weights_do_not_overwrite_an_input(proto: onnx.ModelProto, tmp_path: Path) -> None:
    given = tmp_path / "a.onnx.data"
    write_text(given, "é\n")
    with pytest.raises(OutputError, match="would overwrite the input"):
        save_model(proto, tmp_path / "a.onnx", inputs=[given], limit_bytes=1)
    assert given.read_bytes() == "é\n".encode()


def floats(name: str, count: int = 512, start: float = 0.0) -> TensorProto:
    return numpy_helper.from_array(np.arange(count, dtype=np.float32) + np.float32(start), name)


def place(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def test_equal_bytes_are_stored_once_and_aligned_also_in_the_file_of_an_earlier_run(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    first = store.externalize(floats("a", 500))
    second = store.externalize(floats("b", 500, start=1))
    again = store.externalize(floats("c", 500))
    assert place(first)["offset"] == place(again)["offset"] == "0"
    assert int(place(second)["offset"]) % 64 == 0
    size = store.path.stat().st_size
    assert size == int(place(second)["offset"]) + 2000
    other = numpy_helper.from_array(np.frombuffer(floats("a", 500).raw_data, np.int8), "d")
    assert int(place(store.externalize(other))["offset"]) >= size  # a type of its own
    assert (again.name, again.dims, again.data_type) == ("c", [500], TensorProto.FLOAT)
    resumed = WeightStore(tmp_path)
    assert place(resumed.externalize(floats("a", 500))) == place(first)
    assert place(resumed.externalize(floats("b", 500, start=1))) == place(second)
    assert int(place(WeightStore(tmp_path).externalize(floats("z", start=9)))["offset"]) >= size
    assert store.path.read_bytes()[:2000] == floats("a", 500).raw_data


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.bool_])
def test_shapes_and_axes_remain_in_the_model_for_shape_inference(tmp_path: Path, dtype: type) -> None:
    shape = numpy_helper.from_array(np.ones(4096, dtype), "shape")
    assert WeightStore(tmp_path).externalize(shape) is shape


def test_external_data_that_ends_early_is_named(tmp_path: Path) -> None:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    there = WeightStore(tmp_path / "there").externalize(floats("a"))
    (tmp_path / "there" / "weights.bin").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"weights\.bin: .*'a' ends after 5 of 2048 bytes"):
        WeightStore(tmp_path / "here", base=tmp_path / "there").externalize(there)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8, ml_dtypes.bfloat16, ml_dtypes.int4])
def test_an_external_array_is_equal_to_the_array_in_the_model(tmp_path: Path, kind: type) -> None:
    values = (np.arange(6000) % 15 - 7).reshape(50, 120).astype(kind)
    tensor = numpy_helper.from_array(values, "w")
    beside = WeightStore(tmp_path).externalize(tensor)
    assert place(beside)
    np.testing.assert_array_equal(array_of(beside, tmp_path), values)


VALUES = np.random.default_rng(0).standard_normal((256, 256), np.float32)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, of any size, with two large weights, one of them not as raw bytes, and a small weight between them."""
    monkeypatch.setattr(graph_model, "LARGE", 0)
    listed = helper.make_tensor("b", TensorProto.FLOAT, VALUES.shape, VALUES.ravel().tolist())
    small = numpy_helper.from_array(np.ones(256, np.float32), "c")
    large = numpy_helper.from_array(VALUES, "a")
    large.doc_string = "said"
    body = "p = MatMul(x, a)  q = MatMul(p, b)  y = Add(q, c)"
    proto = parsed(f"g (float[1,256] x) => (float[1,256] y) {{ {body} }}").proto
    proto.graph.initializer.extend([large, small, listed])
    proto.metadata_props.add(key="of", value="nobody")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    return tmp_path / "m.onnx"


def test_a_model_read_without_weights_has_the_same_hash_types_and_arrays(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light = load_model(large)
    save_model(light.proto, large.with_name("again.onnx"), base=large.parent)
    assert onnx.load(large.with_name("again.onnx")) == onnx.load(large)
    monkeypatch.undo()
    whole = load_model(large)
    assert light.sha256 == whole.sha256
    assert light.types == whole.types
    assert light.external_files() == ()
    np.testing.assert_array_equal(light.array("a"), whole.array("a"))
    assert not light.constants["a"].raw_data


def test_the_file_may_be_a_link_to_another_folder(large: Path, tmp_path: Path) -> None:
    """As in the caches of model hubs; weights in the target of the link are not data outside the model's folder."""
    (tmp_path / "project").mkdir()
    link = tmp_path / "project" / "net.onnx"
    link.symlink_to(large)
    assert np.array_equal(load_model(link).array("a"), VALUES)


def test_a_weight_of_another_size_than_its_shape_is_refused(large: Path) -> None:
    proto = onnx.load(large)
    proto.graph.initializer[0].dims[0] = 255
    large.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="tensor 'a' has 262144 bytes, and its shape needs 261120"):
        load_model(large)


@pytest.mark.parametrize("kept", [1, 100, 200_000, 400_000])
def test_a_truncated_file_is_one_error(large: Path, kept: int) -> None:
    large.write_bytes(large.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"m\.onnx"):
        load_model(large)
