"""Loading of models, and the messages for models that cannot be loaded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from qdqspec.errors import ModelError
from qdqspec.graph.model import Model, load_model


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model whose only weight is in weights.bin in the same folder."""
    (tmp_path / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="weights.bin")
    proto = parsed("g (float[4] x) => (float[4] y) { y = Add(x, w) }")
    proto.graph.initializer.append(weight)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def redirect(path: Path, location: str) -> None:
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location
    path.write_bytes(proto.SerializeToString())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.onnx: there is no such model file"):
        load_model(tmp_path / "nowhere.onnx")


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{re.escape(str(tmp_path))}: this is a folder"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\xff" * 64])
def test_a_file_that_is_not_onnx_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.onnx") as caught:
        load_model(path)
    assert caught.value.cure


def test_a_model_that_breaks_onnx_rules_is_refused_with_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(parsed("g (float[4] x) => (float[4] y) { y = Relu(nobody) }").SerializeToString())
    with pytest.raises(ModelError, match=r"bad\.onnx: the model is not valid ONNX: .*nobody"):
        load_model(path)


def test_external_data_is_read_from_the_folder_of_the_model(external: Path) -> None:
    assert load_model(external).array("w").tolist() == [0, 1, 2, 3]


def test_missing_external_data_is_named_with_its_path(external: Path) -> None:
    (external.parent / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"'weights\.bin' is missing") as caught:
        load_model(external)
    assert str(external.parent / "weights.bin") in (caught.value.cure or "")


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname"])
def test_external_data_outside_the_folder_is_refused(external: Path, location: str) -> None:
    redirect(external, location)
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(external)


def test_a_link_to_a_file_outside_the_folder_is_refused(
    external: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.bin"
    secret.write_bytes(bytes(16))
    (external.parent / "link.bin").symlink_to(secret)
    redirect(external, "link.bin")
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(external)


def test_the_hash_is_that_of_the_bytes_with_their_external_data(external: Path, tmp_path: Path) -> None:
    before = load_model(external).sha256
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in ("model.onnx", "weights.bin"):
        (copy / name).write_bytes((external.parent / name).read_bytes())
    assert load_model(copy / "model.onnx").sha256 == before
    (external.parent / "weights.bin").write_bytes(bytes(16))
    assert load_model(external).sha256 != before


def test_generated_node_names_do_not_depend_on_pairs() -> None:
    proto = parsed(
        """g (float[4] x) => (float[4] y) {
            a = Relu(x)  b = Relu(a)
            s = Constant<value_float = 0.1>()
            q = QuantizeLinear(b, s)  d = DequantizeLinear(q, s)
            y = Neg(d)
        }"""
    )
    for node in proto.graph.node[:2]:
        node.name = "same"
    assert [node.name for node in Model(proto).nodes] == [
        "same",
        "Relu#1",
        "Constant#2",
        "QuantizeLinear#0",
        "DequantizeLinear#1",
        "Neg#3",
    ]
