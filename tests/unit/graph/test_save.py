"""Models are written completely or not at all, and never over files of the user."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.errors import OutputError
from qdqspec.graph.model import load_model
from qdqspec.graph.protos import map_tensors
from qdqspec.graph.save import save_model, write_text
from qdqspec.graph.weights import WeightStore


@pytest.fixture
def proto() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[64] x) => (float[64] y) { y = Add(x, w) }'
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.arange(64, dtype=np.float32), "w"))
    return proto


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


def test_a_missing_folder_is_named(proto: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere: there is no such folder"):
        save_model(proto, tmp_path / "nowhere" / "a.onnx")


def test_a_folder_in_place_of_the_file_is_an_error(proto: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="this is a folder"):
        save_model(proto, tmp_path)


@pytest.mark.parametrize(
    ("number", "cure"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "choose another folder")]
)
def test_a_full_or_read_only_disk_keeps_the_old_file(
    proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    target = tmp_path / "a.onnx"
    target.write_bytes(b"old")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OutputError, match=os.strerror(number)) as caught:
        save_model(proto, target)
    monkeypatch.undo()
    assert cure in str(caught.value)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.onnx"]


def test_an_exception_while_writing_leaves_no_file(
    proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", crash)
    with pytest.raises(KeyboardInterrupt):
        save_model(proto, tmp_path / "a.onnx")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_large_model_is_saved_with_external_weights(proto: onnx.ModelProto, tmp_path: Path) -> None:
    proto.graph.initializer[0].ClearField("raw_data")
    proto.graph.initializer[0].raw_data = np.arange(64, dtype=np.float32).tobytes() * 8
    proto.graph.initializer[0].dims[0] = 512
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 512
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 512
    save_model(proto, tmp_path / "a.onnx", limit_bytes=1500)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "a.onnx.data"]
    assert (tmp_path / "a.onnx").stat().st_size < 1000
    assert load_model(tmp_path / "a.onnx").array("w").tolist() == list(range(64)) * 8


def test_the_file_of_weights_does_not_overwrite_an_input(proto: onnx.ModelProto, tmp_path: Path) -> None:
    given = tmp_path / "a.onnx.data"
    given.write_bytes(b"the user's own")
    with pytest.raises(OutputError, match="would overwrite the input"):
        save_model(proto, tmp_path / "a.onnx", inputs=[given], limit_bytes=1)
    assert given.read_bytes() == b"the user's own"


def test_an_external_weight_is_copied_in_blocks(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.arange(4 << 20, dtype=np.float32), "w")  # 16 MiB
    given = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[4194304] y) { y = Add(x, w) }'
    )
    given.graph.initializer.append(weight)
    (tmp_path / "given").mkdir()
    light = map_tensors(given, WeightStore(tmp_path / "given").externalize)
    tracemalloc.start()
    try:
        save_model(light, tmp_path / "whole.onnx", base=tmp_path / "given")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert onnx.load(tmp_path / "whole.onnx") == given
    assert peak < 4 << 20


def test_text_is_written_completely(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "é\n")
    assert (tmp_path / "a.json").read_bytes() == "é\n".encode()
    with pytest.raises(OutputError, match="would overwrite"):
        write_text(tmp_path / "a.json", "", inputs=[tmp_path / "a.json"])
