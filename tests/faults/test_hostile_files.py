"""Models and data with false or extreme contents are one error that names the file, in bounded time and memory."""

from __future__ import annotations

import io
import itertools
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qdqspec.accuracy.case_data import CaseData
from qdqspec.accuracy.data import InputSpec, open_data
from qdqspec.accuracy.sources import read_members
from qdqspec.errors import DataError, ModelError
from qdqspec.graph.model import load_model
from qdqspec.testing.backends import small_model
from qdqspec.types import Inputs

Spoil = Callable[[onnx.ModelProto], object]


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert caught.value.where is not None
    assert "\n" not in caught.value.what
    return caught.value


# ---- files ---------------------------------------------------------------------------------------


def test_a_model_that_is_a_pipe_or_a_device_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "zero.onnx").symlink_to("/dev/zero")
    for name in ("pipe.onnx", "zero.onnx"):
        assert "a device or a pipe" in refused(tmp_path / name).what


# ---- external data -------------------------------------------------------------------------------

WEIGHT = 432  # bytes of the first weight of the small model


def with_external(folder: Path, **entries: str) -> Path:
    proto = small_model()
    weight = proto.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder / "model.onnx"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with weights, links out of it, a link to itself and a named pipe."""
    (tmp_path / "secret.bin").write_bytes(bytes(WEIGHT))
    folder = tmp_path / "home"
    (folder / "folder").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(WEIGHT))
    (folder / "link").symlink_to(tmp_path / "secret.bin")
    (folder / "outside").symlink_to(tmp_path)
    (folder / "ring").symlink_to(folder / "ring")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"location": "../secret.bin"}, "lies outside the model's folder"),
        ({"location": "link"}, "lies outside the model's folder"),
        ({"location": "/etc/passwd"}, "lies outside the model's folder"),
        ({"location": "folder"}, "is missing"),
        ({"location": "pipe"}, "is missing"),
        ({"location": "ring"}, "is no name of a file"),
        ({}, "is missing"),
        ({"location": "w\0.bin"}, "is no name of a file"),
        ({"location": "weights.bin", "length": "abc"}, "the length of tensor 'w' is 'abc'"),
        ({"location": "weights.bin", "length": "9" * 5000}, "the length of tensor 'w'"),
        ({"location": "weights.bin", "length": "4"}, "has 4 bytes, and its shape needs 432"),
        ({"location": "weights.bin", "offset": "-8"}, "the offset of tensor 'w' is '-8'"),
        ({"location": "weights.bin", "offset": "1"}, "ends before its 432 bytes from 1 on"),
    ],
)
def test_external_data_outside_the_folder_or_of_another_length_is_an_error(home, entries, reason) -> None:
    assert reason in refused(with_external(home, **entries)).what


def test_an_absolute_path_into_the_folder_is_an_error_as_in_runtimes(home: Path) -> None:
    """ONNX's checker and ONNX Runtime refuse absolute paths."""
    found = refused(with_external(home, location=str(home / "weights.bin")))
    assert "is named by an absolute path" in found.what
    assert "location 'weights.bin'" in str(found)


# ---- contents of the file ------------------------------------------------------------------------


def cycle_behind_an_output_without_shape(proto: onnx.ModelProto) -> None:
    """A cycle that ONNX's checker does not reach because of the missing shape, which runtimes allow."""
    proto.graph.node[0].input[0] = "y"
    proto.graph.output[0].type.tensor_type.ClearField("shape")


def functions(count: int, calls: int) -> Spoil:
    """Local functions, each of which calls the previous one several times."""

    def spoil(proto: onnx.ModelProto) -> None:
        opsets = [helper.make_opsetid("", 19), helper.make_opsetid("own", 1)]
        nodes = [helper.make_node("Relu", ["a"], ["b"])]
        for number in range(count):
            proto.functions.append(helper.make_function("own", f"F{number}", ["a"], ["b"], nodes, opsets))
            steps = itertools.pairwise(["a", *(f"t{step}" for step in range(1, calls)), "b"])
            nodes = [helper.make_node(f"F{number}", [x], [y], domain="own") for x, y in steps]
        proto.opset_import.append(opsets[1])
        proto.graph.node[0].input[0] = "called"
        proto.graph.node.insert(0, helper.make_node(f"F{count - 1}", ["x"], ["called"], domain="own"))

    return spoil


def recursive(proto: onnx.ModelProto) -> None:
    functions(1, 1)(proto)
    proto.functions[0].node[0].op_type, proto.functions[0].node[0].domain = "F0", "own"


def first(**fields: object) -> Spoil:
    """A change of fields of the first weight."""

    def spoil(proto: onnx.ModelProto) -> None:
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(proto.graph.initializer[0], name)[:] = value
            else:
                setattr(proto.graph.initializer[0], name, value)

    return spoil


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "a cycle where the checker does not look": (
        cycle_behind_an_output_without_shape,
        "need their own results",
    ),
    "calls that double thirty times": (functions(30, 2), "its local functions expand to 536,8"),
    "calls in a long row": (functions(150, 1), "call each other more than 100 deep"),
    "a call of itself": (recursive, "its local functions call themselves"),
    "an unknown type": (first(data_type=99), "the unknown type 99"),
    "negative dimensions": (first(dims=[-4, 27]), "dimensions [-4, 27]"),
    "dimensions beyond all numbers": (first(dims=[2**40, 2**40]), "needs 4835703278458516698824704"),
    "more bytes than values": (first(dims=[4, 1, 3, 3]), "has 432 bytes, and its shape needs 144"),
    "a node twice": (lambda p: p.graph.node.append(p.graph.node[0]), "single static assignment"),
    "a cycle": (lambda p: p.graph.node[0].input.__setitem__(0, "y"), "need their own results"),
    "nothing": (lambda p: p.graph.ClearField("node"), "no nodes"),
    "no opset": (lambda p: p.ClearField("opset_import"), "opset_import"),
    "a version to come": (lambda p: setattr(p, "ir_version", 999), "ir_version 999"),
    "half a file": (lambda p: p.SerializeToString()[:300], "not a readable ONNX file"),
    "a node's name that is no text": (
        lambda p: p.SerializeToString().replace(b"\x04relu", b"\x04re\xffu"),
        "is not text",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_invalid_model_is_an_error(tmp_path: Path, what: str) -> None:
    spoil, reason = HOSTILE[what]
    proto = small_model()
    spoilt = spoil(proto)
    content = spoilt if isinstance(spoilt, bytes) else proto.SerializeToString()
    (tmp_path / "model.onnx").write_bytes(content)
    assert reason in refused(tmp_path / "model.onnx").what


def test_an_unusual_but_valid_model_is_loaded(tmp_path: Path) -> None:
    without_shape: Spoil = lambda p: p.graph.output[0].type.tensor_type.ClearField("shape")  # noqa: E731
    for spoil in (functions(12, 2), functions(100, 1), without_shape):
        proto = small_model()
        spoil(proto)
        onnx.save(proto, tmp_path / "model.onnx")
        assert load_model(tmp_path / "model.onnx").types


def test_an_input_larger_than_memory_is_an_error_before_allocation(tmp_path: Path) -> None:
    proto = small_model()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**62
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"input 'x' of shape .* takes [0-9,]+ bytes") as caught:
        _ = CaseData(load_model(tmp_path / "model.onnx"), Inputs()).shapes
    assert caught.value.where == str(tmp_path / "model.onnx")


MAGIC = b"\x93NUMPY"


def array(shape: object, body: bytes = b"", dtype: str = "<f4", header: str | None = None) -> bytes:
    """The bytes of a .npy file, whose header need not be true."""
    text = header or f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}"
    padded = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    return MAGIC + bytes((1, 0)) + len(padded).to_bytes(2, "little") + padded + body


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


FALSE_HEADERS = {
    "a row longer than memory": (array((1, 10**10), bytes(10**6)), "it holds 1,000,000 bytes"),
    "rows without number": (array((10**15, 0)), "1,000,000,000,000,000 rows with nothing in them"),
    "true rows": (array((True, 4), bytes(16)), "its shape is (True, 4)"),
    "rows beyond all numbers": (array((2**62, 2**62)), "its shape needs"),
    "a header longer than the file": (
        MAGIC + bytes((2, 0)) + (2**31).to_bytes(4, "little") + bytes(10**6),
        "its header is not one of numpy's (EOF",
    ),
    "a header with code in it": (
        array(None, header="{'descr': __import__('os').system('id'), 'fortran_order': False, 'shape': (2,)}"),
        "malformed",
    ),
    "a header in a hundred brackets": (
        array(None, header="{'descr': " + "(" * 2000 + ")" * 2000 + "}"),
        "its header is not one of numpy's",
    ),
    "pickled objects": (array((2,), b"cos\nsystem\n(S'id'\ntR.", dtype="|O"), "pickled objects"),
    "no array": (b"words", "its header is not one of numpy's"),
}  # fmt: skip


@pytest.mark.parametrize("what", FALSE_HEADERS)
def test_an_array_with_a_false_header_is_an_error(tmp_path: Path, what: str) -> None:
    content, reason = FALSE_HEADERS[what]
    path = archive(tmp_path / "data.npz", x=content)
    tracemalloc.start()
    with pytest.raises(DataError) as caught:
        read_members(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reason in str(caught.value)
    assert caught.value.where == str(path)
    assert peak < 8 << 20


def test_the_number_of_labels_is_checked_before_they_are_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "data.npz", x=array((2, 3), bytes(24)), labels=array((1 << 20, 0)))
    with pytest.raises(DataError, match="there are 1048576 labels for 2 samples"):
        open_data(path, {"x": InputSpec(dtype=np.dtype("float32"), shape=(1, 3))})


def test_a_name_in_an_archive_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    """The archive declares its names as UTF-8, but one is not."""
    file = io.BytesIO()
    np.savez(file, ä=np.ones((2, 3), np.float32))
    path = tmp_path / "data.npz"
    path.write_bytes(file.getvalue().replace("ä".encode(), b"\x9b\x9b"))
    with pytest.raises(DataError, match="cannot be read"):
        read_members(path)
