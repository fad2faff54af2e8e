"""Reads arrays of .npz and .npy files row by row, with one row in memory at a time, and writes .npz files.

No pickle: object arrays are rejected.
"""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from qdqspec.arrays import Array
from qdqspec.errors import DataError

_HOW = "write it with numpy.savez(path, input_name=array), one array per model input"
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LONGEST_HEADER = 1 << 16  # bytes; numpy reads the whole header before it checks its length
_LARGEST_ROW = 1 << 31  # bytes: a row is held in memory
_MOST_EMPTY = 1 << 20  # rows of zero bytes: an empty file may claim any number
_MOST_ARRAYS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """One array of a file, described by its header. ``shape`` includes the first axis, the samples.

    ``is_npy``: the file holds this array alone. ``is_sample``: the array is one sample, and its first axis was added.
    ``is_fortran``: it is stored in column-major order, and is read whole.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    is_npy: bool = False
    is_sample: bool = False
    is_fortran: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self) -> Iterator[Array]:
        """The array's rows along its first axis, each in its own memory."""
        size = self.row_bytes
        with _reading(self.file, self.name), self._opened() as stream:
            _header(stream, self.file, self.name)
            if self.is_fortran:
                whole = self._filled(_read_exactly(stream, size * self.shape[0]), size * self.shape[0], 0)
                array = np.frombuffer(whole, dtype=self.dtype).reshape(self.shape, order="F")
                yield from (np.array(row, order="C") for row in array)
                return
            for row in range(self.shape[0]):
                data = self._filled(_read_exactly(stream, size), size, row)
                yield np.frombuffer(data, dtype=self.dtype).reshape(self.shape[1:])

    def as_sample(self) -> StoredArray:
        """The same array as one sample."""
        return replace(self, shape=(1, *self.shape), is_sample=True)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        if self.is_npy:
            with self.file.open("rb") as stream:
                yield stream
        else:
            with zipfile.ZipFile(self.file) as archive, archive.open(f"{self.name}.npy") as inside:
                yield inside

    def _filled(self, data: bytes, size: int, row: int) -> bytes:
        if len(data) < size:
            raise _damaged(self.file, self.name, f"it ends in row {row} of {self.shape[0]}")
        return data


def read_members(file: Path) -> dict[str, StoredArray]:
    """The arrays of an .npz file by name. Only headers are read.

    Raises `DataError` if the file is missing or not an .npz, or an array is pickled, has no first axis, is
    larger than 2 GiB and in column-major order, or is not as long as its shape needs.
    """
    if not file.is_file():
        raise DataError("there is no such data file", where=file, cure="check the path")
    with _reading(file), zipfile.ZipFile(file) as archive:
        names = [info.filename for info in archive.infolist() if info.filename.endswith(".npy")]
        if not names:
            raise DataError("this .npz file holds no array", where=file, cure=_HOW)
        if len(names) > _MOST_ARRAYS:
            raise DataError(f"this .npz file holds {len(names):,} arrays", where=file, cure=_HOW)
        found = {}
        for name in names:
            with archive.open(name) as stream:
                shape, fortran, dtype = _header(stream, file, name[:-4])
                held = archive.getinfo(name).file_size - stream.tell()
            member = StoredArray(file=file, name=name[:-4], shape=shape, dtype=dtype, is_fortran=fortran)
            found[name[:-4]] = _described(member, held)
        return found


def read_npy(file: Path, name: str) -> StoredArray:
    """The array of an .npy file, under a name. Only the header is read. Raises `DataError` as `read_members`."""
    if not file.is_file():
        raise DataError("there is no such data file", where=file, cure="check the path")
    with _reading(file), file.open("rb") as stream:
        shape, fortran, dtype = _header(stream, file, name)
        held = file.stat().st_size - stream.tell()
    member = StoredArray(file=file, name=name, shape=shape, dtype=dtype, is_npy=True, is_fortran=fortran)
    return _described(member, held)


def npz_bytes(arrays: Mapping[str, Array], beside: Mapping[str, str] | None = None) -> bytes:
    """An .npz file of these arrays, with texts ``beside`` them by file name, which numpy ignores.

    Its bytes depend on nothing else; array names may be any text, as names of inputs are.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.array(array, order="C"), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), zipfile.ZIP_DEFLATED)
        for name, text in (beside or {}).items():
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def read_beside(file: Path, name: str, most: int) -> str | None:
    """A text stored beside the arrays; ``None`` if there is none. Raises `DataError` if it is longer than ``most``."""
    with _reading(file), zipfile.ZipFile(file) as archive:
        if name not in archive.namelist():
            return None
        with archive.open(name) as stream:
            content = stream.read(most + 1)
    if len(content) > most:
        raise DataError(f"'{name}' in it is longer than {most} bytes", where=file, cure=_HOW)
    return content.decode("utf-8", errors="replace")


def _described(member: StoredArray, held: int) -> StoredArray:
    """The array, checked; ``held`` is the number of bytes after its header."""
    where, file = f"array '{member.name}'", member.file
    if member.dtype.hasobject or member.dtype.names is not None:
        raise DataError(
            f"{where} holds pickled objects, which are never loaded",
            where=file,
            cure="store plain numbers: numpy.asarray(array, dtype=numpy.float32)",
        )
    if not member.shape:
        raise DataError(
            f"{where} is a single number; its first axis must count samples",
            where=file,
            cure="stack one entry a sample",
        )
    _check_size(member, held)
    if member.is_fortran and held > _LARGEST_ROW:
        raise DataError(
            f"{where} is stored column by column (Fortran order) and has {held:,} bytes, too many to read whole",
            where=file,
            cure="save numpy.ascontiguousarray(array)",
        )
    return member


def _check_size(member: StoredArray, held: int) -> None:
    """Verify that an array is as long as its header states, and that a row fits in memory."""
    rows, size = member.shape[0], member.row_bytes
    if not size and rows > _MOST_EMPTY:
        raise _damaged(member.file, member.name, f"it has {rows:,} rows with nothing in them")
    if rows * size != held:
        raise _damaged(
            member.file, member.name, f"it holds {held:,} bytes, and its shape needs {rows * size:,}"
        )
    if size > _LARGEST_ROW:
        raise DataError(
            f"a sample of array '{member.name}' has {size:,} bytes",
            where=member.file,
            cure=f"give samples of at most {_LARGEST_ROW:,} bytes; the first axis counts them",
        )


def _header(stream: IO[bytes], file: Path, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    try:
        read = _READERS[np.lib.format.read_magic(stream)]
        start = stream.tell()
        if read is _READERS[2, 0] and int.from_bytes(stream.read(4), "little") > _LONGEST_HEADER:
            raise ValueError(f"it is longer than {_LONGEST_HEADER:,} bytes")
        stream.seek(start)
        shape, fortran, dtype = read(stream)
        if any(isinstance(size, bool) or size < 0 for size in shape):
            raise ValueError(f"its shape is {shape}")
    except (KeyError, ValueError, tokenize.TokenError) as error:
        raise _damaged(file, name, f"its header is not one of numpy's ({error})") from None
    return shape, fortran, dtype


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    """Up to ``size`` bytes; fewer only at the end. A zip member may return less than requested at once."""
    parts = []
    while size and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _damaged(file: Path, name: str, why: str) -> DataError:
    return DataError(f"array '{name}' is damaged: {why}", where=file, cure="write the file again")


@contextmanager
def _reading(file: Path, name: str | None = None) -> Iterator[None]:
    """Convert errors of zipfile and zlib to a `DataError` that names the file."""
    subject = "the file" if name is None else f"array '{name}'"
    try:
        yield
    except (
        zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError
    ) as error:  # fmt: skip
        raise DataError(f"{subject} cannot be read as .npz ({error})", where=file, cure=_HOW) from None
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", where=file) from None
