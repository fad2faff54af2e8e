"""Data files with false headers are one error before memory is allocated or time is spent."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from qdqspec.accuracy.data import open_data
from qdqspec.accuracy.shapes import InputSpec
from qdqspec.accuracy.sources import read_members
from qdqspec.errors import DataError

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


HOSTILE = {
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


@pytest.mark.parametrize("what", HOSTILE)
def test_an_array_with_a_false_header_is_an_error(tmp_path: Path, what: str) -> None:
    content, reason = HOSTILE[what]
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
