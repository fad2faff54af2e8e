"""Sample inputs from files, one feed in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, repeat
from math import prod
from pathlib import Path

import numpy as np

from qdqspec._core.arrays import Array, Feed, Shape, allows, is_faithful, shape_text
from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import count_text
from qdqspec.accuracy.sources import LABELS, Arrays, Member, place_of, read_arrays
from qdqspec.errors import DataError
from qdqspec.types import DataSource, InputShape

_MOST_LABELS = 1 << 31  # bytes; labels are held in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The numpy dtype and the full shape, batch included, of one input of a case.

    ``ranges``: shapes that samples of data may have too; the case is timed at ``shape``. ``own`` are the dimensions of
    the model, ``None`` for dynamic ones. ``rows`` is the size of the smallest constant table that its values index.
    """

    dtype: np.dtype[np.generic]
    shape: Shape
    rows: int | None = None
    ranges: tuple[InputShape, ...] = ()
    own: tuple[int | None, ...] | None = None

    def is_stacked(self, sample: Shape) -> bool:
        """Whether a sample has the shape of the input without its first axis, so that samples make a batch."""
        return len(sample) == len(self.shape) - 1

    def takes(self, sample: Shape) -> bool:
        """Whether a sample, with or without the first axis, may be an input of this case."""
        first = 1 if self.is_stacked(sample) else 0
        return any(
            len(sample) == len(span.min) - first
            and all(
                low <= size <= high
                for low, size, high in zip(span.min[first:], sample, span.max[first:], strict=True)
            )
            for span in (InputShape.of(self.shape), *self.ranges)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples of one file, or of several in order of name.

    ``len`` counts feeds, and ``rows`` are the samples of each. Samples are stacked to feeds of ``batch`` samples, the
    last of which is filled up with the first samples; of whole batches ``batch`` is 1. ``labels`` are those of the
    samples, in order. ``ignored`` are arrays for no input.
    """

    path: Path
    batch: int
    rows: tuple[int, ...]
    labels: Array | None
    notes: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    _files: list[Arrays]
    _inputs: Mapping[str, InputSpec]
    _groups: Mapping[str, int]  # samples of an input in a feed, if they are stacked

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Feed]:
        endless = {name: chain.from_iterable(map(self._read, repeat(name))) for name in self._inputs}
        for _ in self.rows:
            yield {
                name: np.stack([*islice(rows, self._groups[name])]) if name in self._groups else next(rows)
                for name, rows in endless.items()
            }

    def _read(self, name: str) -> Iterator[Array]:
        """The samples of an input, as its type. Raises `DataError` for values that it cannot have."""
        spec = self._inputs[name]
        for members in self._files:
            for index, row in enumerate(members[name].rows()):
                with np.errstate(over="ignore"):
                    cast = row.astype(spec.dtype)
                if not is_faithful(row, cast):
                    raise DataError(
                        f"array '{name}' holds NaN or a value outside {spec.dtype} in sample {index}",
                        where=members[name].file,
                        cure="take the sample out, or look at how it was made",
                    )
                size, indices = spec.rows, cast if spec.rows is None else cast.astype(np.int64)
                if size is not None and (wrong := indices[(indices < -size) | (indices >= size)]).size:
                    raise DataError(
                        f"array '{name}' has {wrong.flat[0]} in sample {index}, and the model looks its values up in "
                        f"a table of {size} rows",
                        where=members[name].file,
                        cure="make the data with the tokenizer, or the numbering, of this model",
                    )
                yield cast

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(self.rows)

    def require_labels(self) -> Array:
        """The labels. Raises `DataError` if the file has none."""
        if self.labels is None:
            raise DataError(
                f"accuracy needs labels, and there is no array '{LABELS}'{did_you_mean(LABELS, [*self.ignored])}",
                where=self.path,
                cure=f"add {LABELS}=... to numpy.savez, one class number a sample, or name a file of them with "
                f"{{arrays: {self.path.name}, {LABELS}: FILE}}",
            )
        return self.labels

    def labels_of(self, feeds: int) -> Array:
        """The labels of the first feeds. Raises `DataError` if the file has none."""
        return self.require_labels()[: sum(self.rows[:feeds])]

    def doubts(self) -> Iterator[str]:
        """Reasons why ranges from this data may not be those of real inputs."""
        if self.samples == 1:
            yield "it is a single sample, and ranges taken from one sample clip others"
        for name, spec in self._inputs.items():
            if not np.issubdtype(spec.dtype, np.floating) or not spec.shape:
                continue
            rows = chain.from_iterable(members[name].rows() for members in self._files)
            first = next(rows)
            if all(row.size and (row == first.flat[0]).all() for row in chain([first], rows)):
                value = f"{float(first.flat[0]):g}"
                yield f"every value of '{name}' is {value}, so that no range can be taken from it"


def shapes_in(members: Arrays, inputs: Mapping[str, tuple[int | None, ...]]) -> dict[str, Shape]:
    """The shapes that inputs have by arrays of data, where they depend on it.

    Samples that are stacked do not determine the leading dimension. Raises `DataError` for a shape that the model does
    not take.
    """
    arrays, found = _require(members, {name: len(own) for name, own in inputs.items()}), {}
    for name, own in inputs.items():
        sample = arrays[name].shape[1:]
        takes = tuple(None if dim is not None and dim < 0 else dim for dim in own)
        is_whole = len(sample) == len(own)
        if not is_whole and len(own) > 1 and all(own[1:]):
            continue
        found[name] = (takes[0] or sample[0], *sample[1:]) if is_whole else (1, *sample)
        if not allows((None, *takes[1:]), found[name]):
            raise _wrong_shape(name, takes, arrays[name])
    return found


def open_data(
    source: DataSource, inputs: Mapping[str, InputSpec], *, fixed: Collection[str] = (), labelled: bool = True
) -> Dataset:
    """Open calibration or evaluation data for a model with these inputs.

    A file has one array per model input, its first axis the samples, and may have ``labels``. A sample has the shape of
    the whole input, or that without its first axis: then as many samples as the batch are stacked. Samples of different
    files may have different shapes where the inputs allow it. Arrays for inputs that are ``fixed``, and arrays for no
    input, are not read; nor are labels, unless ``labelled``. Values may be infinite, as in masks. Raises `DataError`
    for anything else; NaN, and values outside the type of the input, are detected while the samples are read.
    """
    path = place_of(source)
    ranks = {name: len(spec.shape) for name, spec in inputs.items()}
    files = [_require(members, ranks) for members in read_arrays(source, inputs)]
    if not inputs:
        raise DataError("the model has no inputs, so it needs no data", where=path)
    files = _in_samples(files, inputs)
    groups = {name: spec.shape[0] for name, spec in inputs.items() if _are_stacked(name, spec, files)}
    counts = {name: sum(members[name].shape[0] for members in files) for name in inputs}
    if empty := [name for name, count in counts.items() if not count]:
        raise DataError(f"array '{empty[0]}' has no samples", where=path, cure="give it at least one")
    feeds = {-(-count // groups.get(name, 1)) for name, count in counts.items()}
    if len(feeds) > 1 or len({counts[name] for name in groups}) > 1:
        listed = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        what = f"arrays have unequal numbers of samples: {listed}"
        raise DataError(what, where=path, cure="give every array one entry a sample")
    batch = max([1, *groups.values()])  # others may be whole inputs, one for each batch
    samples = next((counts[name] for name in groups), *feeds)
    rows = tuple(min(batch, samples - first) for first in range(0, samples, batch))
    known = {*inputs, LABELS, *fixed}
    ignored = tuple(dict.fromkeys(name for members in files for name in members if name not in known))
    notes = []
    if rows[-1] < batch:
        notes.append(
            f"{count_text(samples, 'sample')} do not fill batches of {batch}: the last one is filled up with "
            f"{count_text(batch - rows[-1], 'repeated sample')}"
        )
    for name, spec in inputs.items():
        dtypes = {members[name].dtype for members in files} if np.issubdtype(spec.dtype, np.floating) else ()
        notes += [
            f"array '{name}' is {dtype} and is given to the model as {spec.dtype}, unscaled"
            for dtype in sorted(map(str, (dtype for dtype in dtypes if dtype.kind in "iu")))
        ]
    if labelled and len(files) > 1 and sum(LABELS in members for members in files) == 1:
        names = [next(members[name] for name in inputs).file.name for members in files]
        notes += [
            f"files are read in order of name, {later} after {first}: labels must be in this order"
            for first, later in pairwise(names)
            if _by_number(first) > _by_number(later)
        ][:1]
    for name in ignored:
        near = did_you_mean(name, sorted(known))
        notes.append(f"array '{name}' is no input of the model and is not used{near}")
    labels, rows = _labels(path, files, inputs, rows) if labelled else (None, rows)
    return Dataset(
        path=path,
        batch=batch,
        rows=rows,
        labels=labels,
        notes=tuple(notes),
        ignored=ignored,
        _files=files,
        _inputs=inputs,
        _groups=groups,
    )


def without_fill(data: Iterable[Feed], number: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Inputs or outputs of a feed of ``data``, by its number, without samples that only fill up the last one.

    Arrays that are not divided by samples are kept whole.
    """
    rows, batch = (data.rows[number], data.batch) if isinstance(data, Dataset) else (1, 1)
    return {
        name: array[:rows] if rows < batch and array.ndim and len(array) == batch else array
        for name, array in arrays.items()
    }


def _by_number(name: str) -> list[tuple[int, str]]:
    """The parts of a name, of which numbers are in their own order: 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _require(members: Arrays, ranks: Mapping[str, int]) -> Arrays:
    """The arrays, those for inputs of these ranks divided by samples. Raises `DataError` if there is none for an input.

    An .npy file may have the axes of one sample.
    """
    file = next(iter(members.values())).file
    if missing := [name for name in ranks if name not in members]:
        cure = f"its arrays: {', '.join(members)}; save one under the name of each input"
        if others := [name for name in members if name != LABELS]:
            cure += f", or map them: {{arrays: {file.name}, names: {{{missing[0]}: {others[0]}}}}}"
        raise DataError(
            f"there is no array for the model's input '{missing[0]}'{did_you_mean(missing[0], others)}",
            where=file,
            cure=cure,
        )
    single = {name for name, rank in ranks.items() if len(members[name].shape) == rank - 1 > 0}
    return {
        name: replace(each, shape=(1, *each.shape)) if each.is_npy and name in single else each
        for name, each in members.items()
    }


def _are_stacked(name: str, spec: InputSpec, files: list[Arrays]) -> bool:
    """Whether samples of an input have no first axis. Raises `DataError` for arrays that cannot be the input."""
    members = [arrays[name] for arrays in files]
    for member in members:
        if not np.can_cast(member.dtype, spec.dtype, "same_kind"):
            raise DataError(
                f"array '{name}' is {member.dtype}, and the model takes {spec.dtype}",
                where=member.file,
                cure=f"save it as {spec.dtype}",
            )
        if not spec.takes(member.shape[1:]):
            raise _wrong_shape(name, spec.shape, member, spec)
    first, stacked = members[0].shape[1:], {spec.is_stacked(member.shape[1:]) for member in members}
    if len(stacked) > 1:
        raise _wrong_shape(name, spec.shape, members[-1])
    if stacked == {True} and not spec.shape[0]:
        raise DataError(
            f"samples of array '{name}' make batches, and a batch of the case has {list(spec.shape)}",
            where=members[0].file,
            cure=f"declare one of at least 1, as inputs: {{shapes: {{{name}: {[1, *spec.shape[1:]]}}}}} in a spec "
            "(--shapes), or export the model with one",
        )
    other = next((member for member in members if member.shape[1:] != first), None)
    if stacked == {True} and other is not None and spec.shape[0] > 1:
        raise DataError(
            f"samples of array '{name}' have shapes {list(first)} and {list(other.shape[1:])}, and a batch of "
            f"{spec.shape[0]} is one array",
            where=other.file,
            cure="use a batch of 1, or give whole batches in one shape each",
        )
    return stacked.pop()


def _wrong_shape(
    name: str, takes: Sequence[int | None], member: Member, spec: InputSpec | None = None
) -> DataError:
    if spec is not None:
        sample = member.shape[1:]
        whole = (*spec.shape[:1], *sample) if spec.is_stacked(sample) else sample
        if spec.own is not None and allows(spec.own, whole):  # the model takes it, but not this case
            spans = spec.ranges or (InputShape.of(spec.shape),)
            texts = [
                f"{list(span.min)} to {list(span.max)}" if span.min != span.max else str(list(span.min))
                for span in spans
            ]
            low = [min(sizes) for sizes in zip(whole, spec.shape, strict=True)]
            high = [max(sizes) for sizes in zip(whole, spec.shape, strict=True)]
            return DataError(
                f"array '{name}' has a sample of shape {list(whole)}, where the case has {' or '.join(texts)}",
                where=member.file,
                cure=f"declare a range that has all samples, as inputs: {{shapes: {{{name}: {{min: {low}, "
                f"opt: {list(spec.shape)}, max: {high}}}}}}} in a spec (--min-shapes, --opt-shapes and --max-shapes)",
            )
    one, several = (
        ", ".join("?" if dim is None else str(dim) for dim in ("N", *shape)) for shape in (takes[1:], takes)
    )
    return DataError(
        f"array '{name}' has shape {list(member.shape)}: samples of shape {list(member.shape[1:])}, "
        f"where the model takes {shape_text(takes)}",
        where=member.file,
        cure="change `size`, `layout` or `colors` of the images, or the shape of the input"
        if member.is_image
        else f"give N samples as [{one}], which are stacked, or N whole inputs as [{several}]; the same form in "
        "every file or batch (of a data loader: batch_size of the model or a multiple, drop_last=True)",
    )


def _in_samples(files: list[Arrays], inputs: Mapping[str, InputSpec]) -> list[Arrays]:
    """Batches that a data loader makes, where the model fixes a smaller one: divided into their samples."""
    fixed = [spec.own[0] if spec.own else None for spec in inputs.values()]
    batches = [_batch_of(members, inputs) for members in files]
    is_divided = all(
        batch and size and prod(batch) % size == 0 for batch in batches for size in fixed
    ) and all(spec.takes(members[name].shape[2:]) for members in files for name, spec in inputs.items())
    if not is_divided or {batch[1] for batch in batches} == {*fixed}:
        return files
    return [
        {name: _joined(each) if each.shape[:2] == batch else each for name, each in members.items()}
        for members, batch in zip(files, batches, strict=True)
    ]


def _batch_of(members: Arrays, inputs: Mapping[str, InputSpec]) -> Shape:
    """The number of feeds, and of rows in each, of arrays of whole inputs; empty for other arrays."""
    found = {
        members[name].shape[:2] if spec.shape and len(members[name].shape) == len(spec.shape) + 1 else ()
        for name, spec in inputs.items()
    }
    return found.pop() if len(found) == 1 else ()


def _joined(member: Member) -> Member:
    """The array with its first two axes as one."""
    return replace(member, shape=(prod(member.shape[:2]), *member.shape[2:]))


def _labels(
    path: Path, files: list[Arrays], inputs: Mapping[str, InputSpec], rows: tuple[int, ...]
) -> tuple[Array | None, tuple[int, ...]]:
    """The labels, and the samples of each feed: of whole batches its rows, if each row has a label.

    Labels of several shapes are an array of arrays.
    """
    members = [members[LABELS] for members in files if LABELS in members and LABELS not in inputs]
    if not members:
        return None, rows
    batches = [_batch_of(members, inputs) for members in files]
    per_feed = tuple(chain.from_iterable([size] * number for number, size in filter(None, batches)))
    by_row = [
        _joined(m) if len(members) == len(files) and m.shape[:2] == batch else m
        for m, batch in zip(members, batches, strict=False)
    ]
    if all(batches) and sum(m.shape[0] for m in by_row) == sum(per_feed):
        members, rows = by_row, per_feed
    count, size = sum(m.shape[0] for m in members), sum(prod(m.shape) * m.dtype.itemsize for m in members)
    if count != sum(rows):
        what = f"there are {count} {LABELS} for {sum(rows)} samples"
        raise DataError(what, where=path if members[1:] else members[0].file, cure="give every sample one")
    if size > _MOST_LABELS:
        what = f"{LABELS} take {size:,} bytes, more than {_MOST_LABELS:,}"
        raise DataError(what, where=path, cure="use fewer samples")
    rows_of_all = list(chain.from_iterable(member.rows() for member in members))
    if len({member.shape[1:] for member in members}) == 1:
        return np.array(rows_of_all), rows
    labels = np.empty(len(rows_of_all), dtype=object)  # as of tokens of sentences of several lengths
    rank = max(row.ndim for row in rows_of_all)
    for number, row in enumerate(rows_of_all):
        labels[number] = row.reshape((1,) * rank) if row.size == 1 else row
    return labels, rows
