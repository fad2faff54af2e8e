"""Loading of models, messages for models that cannot be loaded, and the flat form of bodies."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from onnx import TensorProto, numpy_helper
from onnx_text import parsed
from random_models import onnx_models

from qdqspec.errors import ModelError
from qdqspec.graph.flat import closed, flat_form
from qdqspec.graph.model import Model, load_model


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
