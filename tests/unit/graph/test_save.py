"""Models are written completely or not at all, and never over files of the user."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from qdqspec.errors import OutputError
from qdqspec.graph.model import load_model
from qdqspec.graph.protos import map_tensors
from qdqspec.graph.save import save_model, write_text
from qdqspec.graph.weights import WeightStore


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


def test_a_large_model_is_saved_with_external_weights(tmp_path: Path) -> None:
    values = np.arange(512, dtype=np.float32)
    proto = parsed("g (float[512] x) => (float[512] y) { y = Add(x, w) }", w=values).proto
    save_model(proto, tmp_path / "a.onnx", limit_bytes=1500)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "a.onnx.data"]
    assert (tmp_path / "a.onnx").stat().st_size < 1000
    np.testing.assert_array_equal(load_model(tmp_path / "a.onnx").array("w"), values)


def test_the_file_of_weights_does_not_overwrite_an_input(proto: onnx.ModelProto, tmp_path: Path) -> None:
    given = tmp_path / "a.onnx.data"
    given.write_bytes(b"the user's own")
    with pytest.raises(OutputError, match="would overwrite the input"):
        save_model(proto, tmp_path / "a.onnx", inputs=[given], limit_bytes=1)
    assert given.read_bytes() == b"the user's own"


def test_an_external_weight_is_copied_in_blocks(tmp_path: Path) -> None:
    weight = np.arange(4 << 20, dtype=np.float32)  # 16 MiB
    given = parsed("g (float[1] x) => (float[4194304] y) { y = Add(x, w) }", w=weight).proto
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


def test_text_is_written_but_not_over_an_input(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "é\n")
    with pytest.raises(OutputError, match="would overwrite"):
        write_text(tmp_path / "a.json", "", inputs=[tmp_path / "a.json"])
    assert (tmp_path / "a.json").read_bytes() == "é\n".encode()
