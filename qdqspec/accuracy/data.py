"""Sample inputs from files, one feed in memory at a time, or random ones if there are none."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, repeat
from math import prod
from pathlib import Path

import numpy as np

from qdqspec._core.arrays import Array, Feed, Shape
from qdqspec._core.registry import did_you_mean
from qdqspec._core.units import count_text
from qdqspec.accuracy.shapes import InputSpec, lookups, with_named_dimensions
from qdqspec.accuracy.sources import LABELS, Arrays, Member, as_samples, place_of, read_arrays
from qdqspec.errors import DataError
from qdqspec.graph import Model, allows, is_faithful, shape_text
from qdqspec.types import DataSource, Inputs, InputShape

_MOST_LABELS = 1 << 31  # bytes; labels are held in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples of one file, or of several in order of name.

    ``len`` counts feeds, ``samples`` the samples, and ``batch`` is the number of samples in a feed; the last
    feed is filled up with the first samples. ``labels`` are the samples' labels, in order; of feeds that are whole
    batches as many as ``rows`` has for each. ``ignored`` are arrays for no input.
    """

    path: Path
    samples: int
    batch: int
    labels: Array | None
    notes: tuple[str, ...]
    rows: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    _columns: tuple[_Column, ...]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[Feed]:
        names = [column.name for column in self._columns]
        for feeds in zip(*(column.feeds() for column in self._columns), strict=True):
            yield dict(zip(names, feeds, strict=True))

    def without_fill(self, number: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs or outputs of a feed, by its number, without the samples that only fill up the last one.

        Arrays that are not divided by samples are kept whole.
        """
        left = self.samples - number * self.batch
        return {
            name: array[:left] if left < self.batch and array.ndim and len(array) == self.batch else array
            for name, array in arrays.items()
        }

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
        return self.require_labels()[: sum(self.rows[:feeds]) if self.rows else feeds * self.batch]

    def doubts(self) -> Iterator[str]:
        """Reasons why ranges from this data may not be those of real inputs."""
        if self.samples == 1:
            yield "it is a single sample, and ranges taken from one sample clip others"
        for column in self._columns:
            if not np.issubdtype(column.spec.dtype, np.floating) or not column.spec.shape:
                continue
            rows = chain.from_iterable(member.rows() for member in column.members)
            first = next(rows)
            if all(row.size and (row == first.flat[0]).all() for row in chain([first], rows)):
                value = f"{float(first.flat[0]):g}"
                yield f"every value of '{column.name}' is {value}, so that no range can be taken from it"


def shaped_by_data(model: Model, inputs: Inputs) -> Inputs:
    """The inputs of a case, with shapes from its data where the model does not fix them and none is declared.

    Where the shapes of samples differ, the range is that of all samples, and the shape that is timed is that of the
    file with samples of median size, of calibration data if there is some. Inputs that share named dimensions with
    these follow them. Raises `DataError` if the data has no array for an input, or one that cannot be the input.
    """
    source = inputs.calibration or inputs.evaluation
    declared = inputs.profiles[0].shapes
    free = [name for name in model.inputs if name not in declared and name not in inputs.values]
    own = {name: shape for name in free if (shape := model.shape(name))}
    open_inputs = {name: shape for name, shape in own.items() if not all(shape)}
    if source is None or not open_inputs:
        return with_named_dimensions(model, inputs)
    needed = [name for name in model.inputs if name not in inputs.values]
    is_needed = any(not all(shape[1:]) or shape == (None,) for shape in open_inputs.values())
    reported_later = () if is_needed else (DataError,)  # when the data is opened
    with suppress(*reported_later):
        files = [_shapes_in(members, open_inputs) for members in read_arrays(source, needed)]
        usual = sorted(files, key=lambda shapes: sum(map(prod, shapes.values())))[len(files) // 2]
        if inputs.calibration and inputs.evaluation:
            with suppress(DataError):
                files += [
                    _shapes_in(members, open_inputs) for members in read_arrays(inputs.evaluation, needed)
                ]
        fixed = {}
        for name in dict.fromkeys(chain.from_iterable(files)):
            found = [shapes[name] for shapes in files if name in shapes]
            opt = usual.get(name, (1, *found[0][1:]))  # calibration data is stacked
            sizes = [*zip(opt, *found, strict=True)]
            fixed[name] = InputShape(min=tuple(map(min, sizes)), opt=opt, max=tuple(map(max, sizes)))
        profiles = (replace(profile, shapes={**fixed, **profile.shapes}) for profile in inputs.profiles)
        inputs = replace(inputs, profiles=tuple(profiles))
    return with_named_dimensions(model, inputs)


def _shapes_in(members: Arrays, inputs: Mapping[str, tuple[int | None, ...]]) -> dict[str, Shape]:
    """The shapes that inputs have by arrays of data, where they depend on it.

    Samples that are stacked do not determine the leading dimension. Raises `DataError` for a shape that the model does
    not take.
    """
    _check_names(members, inputs)
    found = {}
    for name, own in inputs.items():
        sample = as_samples(members[name], len(own)).shape[1:]
        takes = tuple(None if dim is not None and dim < 0 else dim for dim in own)
        is_whole = len(sample) == len(own)
        if not is_whole and len(own) > 1 and all(own[1:]):
            continue
        found[name] = (takes[0] or sample[0], *sample[1:]) if is_whole else (1, *sample)
        if not allows((None, *takes[1:]), found[name]):
            raise _wrong_shape(name, takes, members[name])
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
    files = read_arrays(source, inputs)
    for members in files:
        _check_names(members, inputs)
    files = _in_samples(files, inputs)
    columns = tuple(
        _column(name, spec, [members[name] for members in files]) for name, spec in inputs.items()
    )
    if not columns:
        raise DataError("the model has no inputs, so it needs no data", where=path)
    if empty := [column.name for column in columns if not column.rows]:
        raise DataError(f"array '{empty[0]}' has no samples", where=path, cure="give it at least one")
    stacked = {column.rows for column in columns if column.stacked}
    if len(set(map(len, columns))) > 1 or len(stacked) > 1:
        listed = ", ".join(f"'{column.name}' {column.rows}" for column in columns)
        what = f"arrays have unequal numbers of samples: {listed}"
        raise DataError(what, where=path, cure="give every array one entry a sample")
    largest = max(columns, key=lambda column: column.group)  # others may be whole inputs, one for each batch
    rows, batch = largest.rows, largest.group
    known = {*inputs, LABELS, *fixed}
    ignored = tuple(dict.fromkeys(name for members in files for name in members if name not in known))
    notes = []
    if rest := rows % batch:
        notes.append(
            f"{count_text(rows, 'sample')} do not fill batches of {batch}: the last one is filled up with "
            f"{count_text(batch - rest, 'repeated sample')}"
        )
    for column in columns:
        if np.issubdtype(column.spec.dtype, np.floating):
            notes += [
                f"array '{column.name}' is {dtype} and is given to the model as {column.spec.dtype}, unscaled"
                for dtype in sorted({str(m.dtype) for m in column.members if m.dtype.kind in "iu"})
            ]
    if labelled and len(files) > 1 and sum(LABELS in members for members in files) == 1:
        names = [next(members[name] for name in inputs).file.name for members in files]
        if later := [two for one, two in pairwise(names) if _by_number(one) > _by_number(two)]:
            first = names[names.index(later[0]) - 1]
            notes.append(
                f"files are read in order of name, {later[0]} after {first}: labels must be in this order"
            )
    for name in ignored:
        near = did_you_mean(name, sorted(known))
        notes.append(f"array '{name}' is no input of the model and is not used{near}")
    labels, per_feed = _labels(path, files, inputs, rows) if labelled else (None, ())
    return Dataset(
        path=path,
        samples=rows,
        batch=batch,
        labels=labels,
        rows=per_feed,
        notes=tuple(notes),
        ignored=ignored,
        _columns=columns,
    )


def without_fill(data: Iterable[Feed], number: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Inputs or outputs of a feed of ``data``, without samples that only fill up the last one."""
    return data.without_fill(number, arrays) if isinstance(data, Dataset) else {**arrays}


def _by_number(name: str) -> list[tuple[int, str]]:
    """The parts of a name, of which numbers are in their own order: 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def feed_of_shapes(feeds: Callable[[], Iterable[Feed]], shapes: Mapping[str, Shape]) -> dict[str, Array]:
    """The first of the feeds that has these shapes; the first of all if none has them."""
    fits = (feed for feed in feeds() if all(feed[name].shape == shape for name, shape in shapes.items()))
    found = next(fits, None)
    return dict(next(iter(feeds())) if found is None else found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """The samples of one input over all files. ``group`` samples make a feed."""

    name: str
    spec: InputSpec
    members: tuple[Member, ...]
    stacked: bool

    @property
    def group(self) -> int:
        return self.spec.shape[0] if self.stacked else 1

    @property
    def rows(self) -> int:
        return sum(member.shape[0] for member in self.members)

    def __len__(self) -> int:
        """The number of feeds."""
        return -(-self.rows // self.group)

    def feeds(self) -> Iterator[Array]:
        """The feeds; if the samples do not fill the last one, they repeat from the first."""
        every = (self._rows(member) for member in chain.from_iterable(repeat(self.members)))
        rows = islice(chain.from_iterable(every), len(self) * self.group)
        while group := tuple(islice(rows, self.group)):
            yield np.stack(group) if self.stacked else group[0]

    def _rows(self, member: Member) -> Iterator[Array]:
        for index, row in enumerate(member.rows()):
            with np.errstate(over="ignore"):
                cast = row.astype(self.spec.dtype)
            if not is_faithful(row, cast):
                raise DataError(
                    f"array '{self.name}' holds NaN or a value outside {self.spec.dtype} in sample {index}",
                    where=member.file,
                    cure="take the sample out, or look at how it was made",
                )
            size, indices = self.spec.rows, cast if self.spec.rows is None else cast.astype(np.int64)
            if size is not None and (wrong := indices[(indices < -size) | (indices >= size)]).size:
                raise DataError(
                    f"array '{self.name}' has {wrong.flat[0]} in sample {index}, and the model looks its values up in "
                    f"a table of {size} rows",
                    where=member.file,
                    cure="make the data with the tokenizer, or the numbering, of this model",
                )
            yield cast


def _check_names(members: Arrays, inputs: Collection[str]) -> None:
    file = next(iter(members.values())).file
    if missing := [name for name in inputs if name not in members]:
        raise DataError(
            f"there is no array for the model's input '{missing[0]}'{did_you_mean(missing[0], [*members])}",
            where=file,
            cure=f"its arrays: {', '.join(members)}; save one under the name of each input, or map them: "
            f"{{arrays: {file.name}, names: {{{missing[0]}: {next(iter(members))}}}}}",
        )


def _column(name: str, spec: InputSpec, members: list[Member]) -> _Column:
    members = [as_samples(member, len(spec.shape)) for member in members]
    for member in members:
        if not np.can_cast(member.dtype, spec.dtype, "same_kind"):
            raise DataError(
                f"array '{name}' is {member.dtype}, and the model takes {spec.dtype}",
                where=member.file,
                cure=f"save it as {spec.dtype}",
            )
        if not spec.takes(member.shape[1:]):
            raise _wrong_shape(name, spec.shape, member, spec)
    stacked = {spec.is_stacked(member.shape[1:]) for member in members}
    if len(stacked) > 1:
        raise _wrong_shape(name, spec.shape, members[-1])
    other = next((member for member in members if member.shape[1:] != members[0].shape[1:]), None)
    if stacked == {True} and other is not None and spec.shape[0] > 1:
        raise DataError(
            f"samples of array '{name}' have shapes {list(members[0].shape[1:])} and {list(other.shape[1:])}, and a "
            f"batch of {spec.shape[0]} is one array",
            where=other.file,
            cure="use a batch of 1, or give whole batches in one shape each",
        )
    return _Column(name=name, spec=spec, members=tuple(members), stacked=stacked.pop())


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

    def are_taken(axes: int) -> bool:
        """Whether the case takes all arrays without so many first axes, and no batch of it has rows of two feeds."""
        return all(
            bool(batch := _batch_of(members, inputs))
            and all(spec.takes(members[name].shape[axes:]) for name, spec in inputs.items())
            and all(spec.own and spec.own[0] and prod(batch) % spec.own[0] == 0 for spec in inputs.values())
            for members in files
        )

    if are_taken(1) or not are_taken(2):
        return files
    return [
        {
            name: _joined(member) if member.shape[:2] == _batch_of(members, inputs) else member
            for name, member in members.items()
        }
        for members in files
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
    path: Path, files: list[Arrays], inputs: Mapping[str, InputSpec], rows: int
) -> tuple[Array | None, tuple[int, ...]]:
    """The labels, one per sample, and for feeds that are whole batches with one per row, the rows of each feed.

    Labels of several shapes are an array of arrays.
    """
    members = [members[LABELS] for members in files if LABELS in members and LABELS not in inputs]
    if not members:
        return None, ()
    batches = [_batch_of(members, inputs) for members in files]
    per_feed = tuple(chain.from_iterable([size] * number for number, size in filter(None, batches)))
    by_row = [
        _joined(m) if len(members) == len(files) and m.shape[:2] == batch else m
        for m, batch in zip(members, batches, strict=False)
    ]
    if all(batches) and sum(m.shape[0] for m in by_row) == sum(per_feed):
        members, rows = by_row, sum(per_feed)
    else:
        per_feed = ()
    count, size = sum(m.shape[0] for m in members), sum(prod(m.shape) * m.dtype.itemsize for m in members)
    if count != rows:
        what, where = (
            f"there are {count} {LABELS} for {rows} samples",
            path if members[1:] else members[0].file,
        )
        raise DataError(what, where=where, cure="give every sample one")
    if size > _MOST_LABELS:
        what = f"{LABELS} take {size:,} bytes, more than {_MOST_LABELS:,}"
        raise DataError(what, where=path, cure="use fewer samples")
    rows_of_all = list(chain.from_iterable(member.rows() for member in members))
    if len({member.shape[1:] for member in members}) == 1:
        return np.array(rows_of_all), per_feed
    labels = np.empty(len(rows_of_all), dtype=object)  # as of tokens of sentences of several lengths
    rank = max(row.ndim for row in rows_of_all)
    for number, row in enumerate(rows_of_all):
        labels[number] = row.reshape((1,) * rank) if row.size == 1 else row
    return labels, per_feed


def random_feeds(
    model: Model, specs: Mapping[str, InputSpec], seed: int, count: int
) -> Iterator[dict[str, Array]]:
    """``count`` feeds of plausible values: floats from the standard normal, integers small and not negative.

    Integers that index rows of a table (Gather) span the table, and those that a DequantizeLinear reads span their
    type, up to 16 bits; others are 0 or 1.
    """
    bounds: dict[str, tuple[int, int]] = {}  # of integers
    for name, spec in specs.items():
        readers = {model.by_name[end.node].op_type for end in model.consumers.get(name, ())}
        if readers == {"DequantizeLinear"} and np.issubdtype(spec.dtype, np.integer):
            limits, widest = np.iinfo(str(spec.dtype)), np.iinfo(np.int16)
            bounds[name] = max(limits.min, widest.min), min(limits.max, widest.max) + 1
            continue
        sizes = []
        for node in lookups(model, name):
            shape = model.shape(node.inputs[0])
            size = None if shape is None else shape[node.number("axis", 0)]
            sizes.append(size or 1)  # 1 is the only safe limit if it is not known
        bounds[name] = 0, min(sizes, default=2)
    for number in range(count):
        random, feed = np.random.default_rng((seed, number)), dict[str, Array]()
        for name, spec in specs.items():
            if np.issubdtype(spec.dtype, np.integer) or spec.dtype == np.bool_:
                feed[name] = random.integers(*bounds[name], spec.shape).astype(spec.dtype)
            else:
                feed[name] = random.standard_normal(spec.shape).astype(spec.dtype)
        yield feed
