"""Finds the files of a case's data, and the arrays in them: .npz, .npy, folders and globs of these, and images."""

from __future__ import annotations

import glob
import importlib.metadata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from qdqspec.errors import DataError
from qdqspec.parity.images import SUFFIXES, ImageMember
from qdqspec.parity.npz import StoredArray, read_members, read_npy
from qdqspec.registry import did_you_mean
from qdqspec.types import Data, DataSource

LABELS = "labels"  # the one array of a data file that is not a model input
_WILD = frozenset("*?[")
_ADVICE = "give .npz or .npy files, a folder or a glob of them, or {images: 'photos/*.jpg', size: 224}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMember:
    """Labels from a text file, one number a line."""

    file: Path
    name: str
    values: npt.NDArray[np.generic]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of labels."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """int64 or float64."""
        return self.values.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one label."""
        return self.values.itemsize

    def rows(self) -> list[npt.NDArray[np.generic]]:
        """The labels, in order."""
        return [np.asarray(value) for value in self.values]


AnyMember: TypeAlias = StoredArray | ImageMember | TextMember
Arrays: TypeAlias = dict[str, AnyMember]  # by the name of the input, or `LABELS`


def place_of(source: DataSource) -> Path:
    """The path of data, for messages."""
    path = source if isinstance(source, Path) else source.path
    return Path(source.name) if path is None and isinstance(source, Data) else path or Path()


def files_of(source: DataSource) -> list[Path]:
    """The files of the data in order of name, without those of labels. Raises `DataError` if there are none."""
    path = place_of(source)
    is_image = isinstance(source, Data) and source.images is not None
    if isinstance(source, Data) and source.loader:
        installed = sorted({point.name for point in importlib.metadata.entry_points(group="qdqspec.data")})
        raise DataError(
            f"no data loader is called '{source.loader}'{did_you_mean(source.loader, installed)}",
            cure="return it from fixture qdq_data, which only pytest reads, or register it in entry-point group "
            "qdqspec.data",
        )
    if path.is_dir():
        return _of_folder(path, is_image=is_image)
    if not path.exists() and _WILD & set(str(path)):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute
        wanted = [file for file in found if file.is_file() and (not is_image or _is_image(file))]
        if not wanted:
            raise DataError("no file matches this pattern", where=path, cure=_ADVICE)
        return wanted
    if not path.exists():
        raise DataError("there is no such data file", where=path, cure=_ADVICE)
    return [path]


def all_files(source: DataSource) -> list[Path]:
    """The files of the data, those of labels included, on which a cache key depends."""
    path = place_of(source)
    own = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else files_of(source)
    apart = [source.labels] if isinstance(source, Data) and source.labels is not None else []
    return [*own, *apart]


def read_arrays(source: DataSource, names: Collection[str]) -> list[Arrays]:
    """The arrays of the data under the names of the model's inputs, a dictionary for each file or group of files.

    ``names`` are the inputs that need data. Only headers are read.
    """
    files = files_of(source)
    mapped = dict(source.names) if isinstance(source, Data) else {}
    if unknown := sorted(set(mapped) - {*names, LABELS}):
        raise DataError(
            f"`names` maps an array to '{unknown[0]}', which is not an input that needs data",
            where=place_of(source),
            cure=f"inputs: {', '.join(names)}",
        )
    if isinstance(source, Data) and source.images is not None:
        found = [_image(file, names, source) for file in files]
    elif any(_is_image(file) for file in files):
        image = next(file for file in files if _is_image(file))
        raise DataError("it is an image, and no transform is given", where=image, cure=_ADVICE)
    else:
        found = _arrays(files, names, mapped)
    found = [_renamed(arrays, mapped) for arrays in found]
    if isinstance(source, Data) and source.labels is not None:
        found[0] = {**found[0], LABELS: _labels(source.labels)}
        found[1:] = [{name: one for name, one in arrays.items() if name != LABELS} for arrays in found[1:]]
    return found


def _of_folder(path: Path, *, is_image: bool) -> list[Path]:
    """The files of a folder: images, else its .npz files, or its .npy files if it has no .npz."""
    files = sorted(file for file in path.iterdir() if file.is_file())
    for suffixes in (SUFFIXES,) if is_image else ({".npz"}, {".npy"}):
        if wanted := [file for file in files if file.suffix.lower() in suffixes]:
            return wanted
    if not is_image and any(_is_image(file) for file in files):
        raise DataError("this folder holds images, and no transform is given", where=path, cure=_ADVICE)
    if form := _glob_below(path, is_image=is_image):
        raise DataError("its files are in folders of it", where=path, cure=f"name them with a glob: {form}")
    what = f"this folder holds no {'image' if is_image else '.npz or .npy file'}"
    raise DataError(what, where=path, cure="put the samples there")


def _glob_below(path: Path, *, is_image: bool) -> str | None:
    """A form of data with the files in folders of a folder; ``None`` if there are none."""
    suffixes = {file.suffix.lower() for file in path.rglob("*") if file.is_file()}
    if not is_image and (found := [suffix for suffix in (".npz", ".npy") if suffix in suffixes]):
        return f"{path}/**/*{found[0]}"
    return f"{{images: '{path}/**/*', size: 224}}" if suffixes & SUFFIXES else None


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _arrays(files: Sequence[Path], names: Collection[str], mapped: Mapping[str, str]) -> list[Arrays]:
    """The arrays of .npz files, one dictionary each, and of .npy files."""
    single = [file for file in files if file.suffix == ".npy"]
    found: list[Arrays] = [dict(read_members(file)) for file in files if file.suffix != ".npy"]
    if not single:
        return found
    known = {*names, *mapped.values(), LABELS}
    labels = [file for file in single if file.stem == LABELS]
    if len(names) == 1 and not all(file.stem in known for file in single):
        (name,) = names
        parts: list[Arrays] = [{mapped.get(name, name): read_npy(f, name)} for f in single if f not in labels]
        for file in labels:
            parts[0][LABELS] = read_npy(file, LABELS)
        return [*found, *parts]
    return [*found, {file.stem: read_npy(file, file.stem) for file in single}]


def _renamed(arrays: Arrays, mapped: Mapping[str, str]) -> Arrays:
    """The arrays under the names of the inputs that they are for."""
    taken = set(mapped.values())
    missing = sorted(taken - set(arrays))
    if missing:
        file = next(iter(arrays.values())).file
        raise DataError(
            f"`names` refers to array '{missing[0]}', which is not there",
            where=file,
            cure=f"its arrays: {', '.join(arrays)}",
        )
    others = {name: member for name, member in arrays.items() if name not in taken}
    return {**others, **{name: arrays[array] for name, array in mapped.items()}}


def _image(file: Path, names: Collection[str], source: Data) -> Arrays:
    assert source.images is not None
    if len(names) != 1:
        raise DataError(
            f"images are data for one input, and the model has {len(names)}: {', '.join(names)}",
            where=place_of(source),
            cure="fix the others with inputs.values, or give .npz files or a Python loader",
        )
    (name,) = names
    return {name: ImageMember(file=file, name=name, rules=source.images)}


def _labels(file: Path) -> AnyMember:
    """Labels from a file of their own: .npy, .npz with ``labels`` or one array, or text."""
    if file.suffix == ".npy":
        return read_npy(file, LABELS)
    if file.suffix == ".npz":
        arrays = read_members(file)
        if LABELS not in arrays and len(arrays) > 1:
            raise DataError(
                f"there is no array '{LABELS}'", where=file, cure=f"its arrays: {', '.join(arrays)}"
            )
        return arrays.get(LABELS) or next(iter(arrays.values()))
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        values = np.array([float(line) for line in lines])
    except OSError as error:
        raise DataError(f"the labels cannot be read: {error.strerror}", where=file) from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise DataError(
            f"the labels are not one number a line ({error})", where=file, cure="write one number a line"
        ) from None
    whole = values.astype(np.int64) if np.isfinite(values).all() else values
    return TextMember(file=file, name=LABELS, values=whole if (whole == values).all() else values)


def as_samples(member: AnyMember, shape: tuple[int, ...]) -> AnyMember:
    """An array of an .npy file with the shape of one sample, as that sample."""
    single = isinstance(member, StoredArray) and member.is_npy and member.shape == shape[1:] != ()
    return member.as_sample() if single and isinstance(member, StoredArray) else member


def without_loader(source: DataSource, path: Path) -> DataSource:
    """The data of a loader after it was written to a folder."""
    return path if isinstance(source, Path) else replace(source, loader="", path=path)
