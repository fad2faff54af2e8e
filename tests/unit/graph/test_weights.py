"""A file of weights shared by several models: each weight is written once, aligned, and loaded by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from qdqspec.errors import ModelError, OutputError
from qdqspec.graph.weights import WeightStore, array_of


def floats(name: str, count: int = 512, start: float = 0.0) -> TensorProto:
    return numpy_helper.from_array(np.arange(count, dtype=np.float32) + np.float32(start), name)


def place(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def test_equal_bytes_are_stored_once_and_aligned(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    first = store.externalize(floats("a", 500))
    second = store.externalize(floats("b", 500, start=1))
    again = store.externalize(floats("c", 500))
    assert place(first)["offset"] == place(again)["offset"] == "0"
    assert int(place(second)["offset"]) % 64 == 0
    assert store.path.stat().st_size == int(place(second)["offset"]) + 2000
    assert (again.name, again.dims, again.data_type) == ("c", [500], TensorProto.FLOAT)


def test_a_file_of_an_earlier_run_is_kept_and_used(tmp_path: Path) -> None:
    before = WeightStore(tmp_path).externalize(floats("a"))
    resumed = WeightStore(tmp_path)
    assert place(resumed.externalize(floats("a"))) == place(before)
    size = resumed.path.stat().st_size
    other = WeightStore(tmp_path)
    assert int(place(other.externalize(floats("z", start=9)))["offset"]) >= size
    assert resumed.path.read_bytes()[:size] == floats("a").raw_data


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


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nowhere.weights\.bin: the weights' file cannot be written"):
        WeightStore(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8, ml_dtypes.bfloat16, ml_dtypes.int4])
def test_an_external_array_is_equal_to_the_array_in_the_model(tmp_path: Path, kind: type) -> None:
    values = (np.arange(6000) % 15 - 7).reshape(50, 120).astype(kind)
    tensor = numpy_helper.from_array(values, "w")
    beside = WeightStore(tmp_path).externalize(tensor)
    assert place(beside)
    np.testing.assert_array_equal(array_of(beside, tmp_path), array_of(tensor, None))
    np.testing.assert_array_equal(array_of(beside, tmp_path), values)
