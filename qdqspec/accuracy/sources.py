"""Finds the files of a case's data, and the arrays in them: .npz, .npy, folders and globs of these, and images.

Arrays are read row by row, and images one at a time. No pickle: object arrays are rejected.
"""

from __future__ import annotations

import glob
import importlib.metadata
import io
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array
from qdqspec._core.registry import did_you_mean
from qdqspec.errors import DataError
from qdqspec.types import Data, DataSource, ImageRules

IMAGE_SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".avif", ".jp2", ".ppm", ".pgm", ".tif", ".tiff",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One array of a file, under the name of the input it is for. ``shape`` includes the first axis, the samples.

    ``read`` gives the samples one by one. ``is_npy``: the file holds this array alone.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    read: Callable[[Member], Iterator[Array]]
    is_npy: bool = False
    is_image: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self) -> Iterator[Array]:
        """The samples, each in its own memory."""
        return self.read(self)


Arrays: TypeAlias = dict[str, Member]  # by the name of the input, or `LABELS`


def _image(file: Path, name: str, rules: ImageRules) -> Member:
    """One image as an array of one sample: float32, or uint8 if the pixels are not changed."""
    channels, (height, width) = 1 if rules.colors == "gray" else 3, rules.size
    is_plain = rules.scale == 1 and set(rules.mean) == {0.0} and set(rules.std) == {1.0}

    def samples(_: Member) -> Iterator[Array]:
        pixels = _pixels(file, rules)
        sample: Array = pixels[..., ::-1] if rules.colors == "bgr" else pixels
        if not is_plain:
            mean, std = np.array(rules.mean, np.float32), np.array(rules.std, np.float32)
            sample = (sample.astype(np.float32) * np.float32(rules.scale) - mean) / std
        yield np.ascontiguousarray(sample if rules.layout == "nhwc" else np.moveaxis(sample, -1, 0))

    return Member(
        file=file,
        name=name,
        shape=(1, channels, height, width) if rules.layout == "nchw" else (1, height, width, channels),
        dtype=np.dtype(np.uint8 if is_plain else np.float32),
        read=samples,
        is_image=True,
    )


def _pixels(file: Path, rules: ImageRules) -> npt.NDArray[np.uint8]:
    """The pixels [row, column, channel], scaled to ``resize`` or to cover ``size``, and cut from the centre.

    Sizes and places are rounded as by ``Resize`` and ``CenterCrop`` of torchvision, so that the pixels are the same.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError(
            "images are decoded with Pillow, which is not installed",
            where=file,
            cure="pip install 'qdqspec[images]'",
        ) from None
    try:
        with Image.open(file) as opened:
            # An EXIF orientation is the intended one, which every viewer applies.
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16"):  # Pillow's own conversion clips these at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            elif image.mode in ("I", "F"):
                raise ValueError(f"its pixels of mode {image.mode} have no known range")
            image = image.convert("L" if rules.colors == "gray" else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"the image cannot be read ({error})", where=file, cure="take it out") from None
    height, width = rules.size
    if rules.resize is None:
        factor = max(width / image.width, height / image.height)
        scaled = max(round(image.width * factor), width), max(round(image.height * factor), height)
    else:
        shorter = min(image.size)
        scaled = rules.resize * image.width // shorter, rules.resize * image.height // shorter
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels


_HOW = "write it with numpy.savez(path, input_name=array), one array per model input"
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LARGEST_ROW = 1 << 31  # bytes: a row is held in memory
_MOST_EMPTY = 1 << 20  # rows of zero bytes: an empty file may claim any number


class _DataFile(io.FileIO):
    """An open data file, closed without a warning when nothing uses it: rows may be left unread.

    An error that is kept holds the iterator whose sample it is about, and both may be collected in any order.
    """

    def __del__(self) -> None:
        self.close()


def _stored_rows(member: Member) -> Iterator[Array]:
    """The rows of an array in an .npz or .npy file; one in column-major order is read whole."""

    def read(size: int, row: int) -> npt.NDArray[np.generic]:
        data = stream.read(size)
        if len(data) < size:
            raise _damaged(member.file, member.name, f"it ends in row {row} of {member.shape[0]}")
        return np.frombuffer(data, member.dtype)

    count, size = member.shape[0], member.row_bytes
    with _reading(member.file, member.name), ExitStack() as opened:
        stream: IO[bytes] = opened.enter_context(io.BufferedReader(_DataFile(member.file)))
        if not member.is_npy:
            archive = opened.enter_context(zipfile.ZipFile(stream))
            stream = opened.enter_context(archive.open(f"{member.name}.npy"))
        stored, is_fortran, _ = _header(stream, member.file, member.name)
        if is_fortran:
            whole = read(size * count, 0).reshape(stored, order="F").reshape(member.shape)
            yield from (np.array(row, order="C") for row in whole)
            return
        for row in range(count):
            yield read(size, row).reshape(member.shape[1:])


def read_members(file: Path, wanted: Collection[str] | None = None) -> Arrays:
    """The arrays of an .npz file by name. Only headers are read.

    Raises `DataError` if the file is missing or not an .npz, or an array that is ``wanted`` (default: any) is no plain
    numbers by sample, is not as long as its shape needs, or would need more than 2 GiB of memory.
    """
    with _reading(file), zipfile.ZipFile(file) as archive:
        found = {}
        for info in archive.infolist():
            if (name := info.filename.removesuffix(".npy")) != info.filename:
                with archive.open(info) as stream:
                    is_wanted = wanted is None or name in wanted
                    found[name] = _described(stream, file, name, info.file_size, is_wanted=is_wanted)
        if not found:
            raise DataError("this .npz file holds no array", where=file, cure=_HOW)
        return found


def read_npy(file: Path, name: str) -> Member:
    """The array of an .npy file, under a name. Only the header is read. Raises `DataError` as `read_members`."""
    with _reading(file), file.open("rb") as stream:
        return replace(_described(stream, file, name, file.stat().st_size), is_npy=True)


def npz_bytes(arrays: Mapping[str, Array], beside: Mapping[str, str] | None = None) -> bytes:
    """An .npz file of these arrays, with texts ``beside`` them by file name. Its bytes depend on nothing else."""
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


def _described(stream: IO[bytes], file: Path, name: str, size: int, *, is_wanted: bool = True) -> Member:
    """The array at the start of a stream of ``size`` bytes. Its header is checked if it ``is_wanted``."""
    shape, fortran, dtype = _header(stream, file, name)
    member = Member(file=file, name=name, shape=shape, dtype=dtype, read=_stored_rows)
    if not is_wanted:
        return member
    where, held = f"array '{name}'", size - stream.tell()
    if dtype.hasobject or dtype.names is not None:
        raise DataError(
            f"{where} holds pickled objects, which are never loaded",
            where=file,
            cure="store plain numbers: numpy.asarray(array, dtype=numpy.float32); samples of several shapes as one "
            ".npz file a sample, in a folder",
        )
    if not shape:
        what = f"{where} is a single number; its first axis must count samples"
        raise DataError(what, where=file, cure="stack one entry a sample")
    rows, row_bytes = shape[0], member.row_bytes
    if not row_bytes and rows > _MOST_EMPTY:
        raise _damaged(file, name, f"it has {rows:,} rows with nothing in them")
    if rows * row_bytes != held:
        raise _damaged(file, name, f"it holds {held:,} bytes, and its shape needs {rows * row_bytes:,}")
    if row_bytes > _LARGEST_ROW:
        cure = f"give samples of at most {_LARGEST_ROW:,} bytes; the first axis counts them"
        raise DataError(f"a sample of {where} has {row_bytes:,} bytes", where=file, cure=cure)
    if fortran and held > _LARGEST_ROW:
        what = f"{where} is stored column by column (Fortran order) and has {held:,} bytes, too many to read whole"
        raise DataError(what, where=file, cure="save numpy.ascontiguousarray(array)")
    return member


def _header(stream: IO[bytes], file: Path, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    try:
        read = _READERS[np.lib.format.read_magic(stream)]
        shape, fortran, dtype = read(stream)
        if any(isinstance(size, bool) or size < 0 for size in shape):
            raise ValueError(f"its shape is {shape}")
    except (KeyError, ValueError, tokenize.TokenError) as error:
        raise _damaged(file, name, f"its header is not one of numpy's ({error})") from None
    return shape, fortran, dtype


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
    except FileNotFoundError:
        raise DataError("there is no such data file", where=file, cure="check the path") from None
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", where=file) from None


LABELS = "labels"  # the one array of a data file that is not a model input
_WILD = frozenset("*?[")
_ADVICE = "give .npz or .npy files, a folder or a glob of them, or {images: 'photos/*.jpg', size: 224}"


def as_table(source: DataSource) -> Data:
    """The data as a table of a spec; a path alone names its arrays."""
    return source if isinstance(source, Data) else Data(path=source)


def place_of(source: DataSource) -> Path:
    """The path of data, for messages."""
    return source if isinstance(source, Path) else source.path or Path(source.name)


def all_files(source: DataSource) -> list[Path]:
    """The files of the data, those of labels included, on which the identity of a case depends."""
    data = as_table(source)
    return [*_files_of(data), *([] if data.labels is None else [data.labels])]


def _files_of(data: Data) -> list[Path]:
    """The files of the data in order of name, without those of labels. Raises `DataError` if there are none."""
    path, is_image = place_of(data), data.images is not None
    if data.loader:
        installed = sorted({point.name for point in importlib.metadata.entry_points(group="qdqspec.data")})
        raise DataError(
            f"no data loader is called '{data.loader}'{did_you_mean(data.loader, installed)}",
            cure="return it from fixture qdq_data, which only pytest reads, or register it in entry-point group "
            "qdqspec.data",
        )
    if path.is_dir():
        return _of_folder(path, is_image=is_image)
    if path.exists():
        return [path]
    if not _WILD & set(str(path)):
        raise DataError("there is no such data file", where=path, cure=_ADVICE)
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute
    wanted = [file for file in found if file.is_file() and (not is_image or _is_image(file))]
    if not wanted:
        raise DataError("no file matches this pattern", where=path, cure=_ADVICE)
    return wanted


def read_arrays(source: DataSource, names: Collection[str]) -> list[Arrays]:
    """The arrays for inputs that need data, by ``names``, a dictionary for each file or group of files."""
    data, place = as_table(source), place_of(source)
    files = _files_of(data)
    if unknown := sorted(set(data.names) - {*names, LABELS}):
        raise DataError(
            f"`names` maps an array to '{unknown[0]}', which is not an input that needs data",
            where=place,
            cure=f"inputs: {', '.join(names)}",
        )
    if data.images is not None:
        if len(names) != 1:
            raise DataError(
                f"images are data for one input, and the model has {len(names)}: {', '.join(names)}",
                where=place,
                cure="fix the others with inputs.values, or give .npz files or a Python loader",
            )
        (name,) = names
        found: list[Arrays] = [{name: _image(file, name, data.images)} for file in files]
    elif (image := next(filter(_is_image, files), None)) is not None:
        raise DataError("it is an image, and no transform is given", where=image, cure=_ADVICE)
    else:
        found = _arrays(files, names, data.names)
    taken = set(data.names.values())
    for number, arrays in enumerate(found):
        if missing := sorted(taken - set(arrays)):
            what = f"`names` refers to array '{missing[0]}', which is not there"
            file = next(iter(arrays.values())).file
            raise DataError(what, where=file, cure=f"its arrays: {', '.join(arrays)}")
        others = {name: member for name, member in arrays.items() if name not in taken}
        found[number] = {**others, **{name: arrays[array] for name, array in data.names.items()}}
    if data.labels is not None:
        for arrays in found:
            own = arrays.pop(LABELS, None)
            if own is not None and not arrays:
                what = f"it has no array beside '{LABELS}', which are in {data.labels.name}"
                raise DataError(what, where=own.file, cure="take it out, or save the samples in it")
        found[0][LABELS] = _labels(data.labels)
    return found


def _of_folder(path: Path, *, is_image: bool) -> list[Path]:
    """The files of a folder: images, else its .npz files, or its .npy files if it has no .npz."""
    files = sorted(file for file in path.iterdir() if file.is_file())
    for suffixes in (IMAGE_SUFFIXES,) if is_image else ({".npz"}, {".npy"}):
        if wanted := [file for file in files if file.suffix.lower() in suffixes]:
            return wanted
    if not is_image and any(_is_image(file) for file in files):
        raise DataError("this folder holds images, and no transform is given", where=path, cure=_ADVICE)
    below = {file.suffix.lower() for file in path.rglob("*") if file.is_file()}
    if not is_image and (arrays := [suffix for suffix in (".npz", ".npy") if suffix in below]):
        glob_below = f"{path}/**/*{arrays[0]}"
    elif below & IMAGE_SUFFIXES:
        glob_below = f"{{images: '{path}/**/*', size: 224}}"
    else:
        what = f"this folder holds no {'image' if is_image else '.npz or .npy file'}"
        raise DataError(what, where=path, cure="put the samples there")
    raise DataError("its files are in folders of it", where=path, cure=f"name them with a glob: {glob_below}")


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES


def _arrays(files: Sequence[Path], names: Collection[str], mapped: Mapping[str, str]) -> list[Arrays]:
    """The arrays of .npz files, and of .npy files: one for each input by its name, or samples of the only input.

    Several folders may each have .npy files of these names.
    """
    known = {*names, *mapped.values(), LABELS}
    found = [read_members(file, known) for file in files if file.suffix != ".npy"]
    single = [file for file in files if file.suffix == ".npy"]
    stems = {file.stem for file in single}
    if len(names) == 1 and not stems <= known:
        (name,), labels = names, [file for file in single if file.stem == LABELS]
        parts: list[Arrays] = [
            {mapped.get(name, name): read_npy(file, name)} for file in single if file.stem != LABELS
        ]
        parts += [{} for _ in labels[len(parts) :]]  # which have no samples: an error
        for part, file in zip(parts, labels, strict=False):
            part[LABELS] = read_npy(file, LABELS)
        return found + parts
    groups: dict[Path | None, Arrays] = {}
    for file in single:
        own = groups.setdefault(file.parent if len(stems) < len(single) else None, {})
        own[file.stem] = read_npy(file, file.stem)
    return [*found, *groups.values()]


def _labels(file: Path) -> Member:
    """Labels from a file of their own: .npy, .npz with ``labels`` or one array, or text."""
    if file.suffix == ".npy":
        return read_npy(file, LABELS)
    if file.suffix == ".npz":
        arrays = read_members(file)
        if LABELS not in arrays and len(arrays) > 1:
            cure = f"its arrays: {', '.join(arrays)}"
            raise DataError(f"there is no array '{LABELS}'", where=file, cure=cure)
        return arrays.get(LABELS) or next(iter(arrays.values()))
    try:
        (values,) = np.loadtxt(file, ndmin=2, encoding="utf-8-sig").T
    except OSError as error:
        raise DataError(f"the labels cannot be read: {error.strerror}", where=file) from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise DataError(
            f"the labels are not one number a line ({error})", where=file, cure="write one number a line"
        ) from None
    whole = values.astype(np.int64) if np.isfinite(values).all() else values
    labels = whole if (whole == values).all() else values
    return Member(file=file, name=LABELS, shape=labels.shape, dtype=labels.dtype, read=lambda _: iter(labels))
