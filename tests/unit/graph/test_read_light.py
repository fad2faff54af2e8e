"""Large models are read without their weights, and give the same results as with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqspec.errors import ModelError
from qdqspec.graph import model as graph_model
from qdqspec.graph.model import load_model
from qdqspec.graph.save import save_model
from qdqspec.graph.wire import read_light

VALUES = np.random.default_rng(0).standard_normal((256, 256), np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model with two large weights, one of them not as raw bytes, and a small weight between them."""
    listed = helper.make_tensor("b", TensorProto.FLOAT, VALUES.shape, VALUES.ravel().tolist())
    small = numpy_helper.from_array(np.ones(256, np.float32), "c")
    large = numpy_helper.from_array(VALUES, "a")
    large.doc_string = "said"
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,256] x) => (float[1,256] y) {
        p = MatMul(x, a)  q = MatMul(p, b)  y = Add(q, c) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend([large, small, listed])
    proto.metadata_props.add(key="of", value="nobody")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    return tmp_path / "m.onnx"


@pytest.fixture
def large(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same file, with a size limit above which every file is large."""
    monkeypatch.setattr(graph_model, "LARGE", 0)
    return path


def test_a_model_saved_again_is_equal(path: Path) -> None:
    save_model(read_light(path), path.with_name("again.onnx"), base=path.parent)
    assert onnx.load(path.with_name("again.onnx")) == onnx.load(path)


def test_a_model_read_without_weights_has_the_same_hash_types_and_arrays(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light = load_model(large)
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
