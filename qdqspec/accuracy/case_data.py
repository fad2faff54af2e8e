"""The data of a case for one model: types and shapes of the inputs, and the samples that the model is run on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np
import onnx

from qdqspec._core.arrays import Array, Feed, Shape, allows, shape_text
from qdqspec._core.registry import did_you_mean
from qdqspec.accuracy.data import Dataset, InputSpec, open_data, shapes_in
from qdqspec.accuracy.sources import read_arrays
from qdqspec.errors import DataError, ModelError, SpecError
from qdqspec.graph import Model, Node
from qdqspec.types import DataSource, Inputs, InputShape, ShapeProfile

_LARGEST = 1 << 31  # bytes of an input, which is created and sent whole
_SAME_VALUES = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
_NO_NUMBERS = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
_NO_TENSORS = {
    "sequence_type": "is a sequence",
    "optional_type": "is optional",
    "map_type": "is a map",
    "sparse_tensor_type": "is a sparse tensor",
}


@dataclass(eq=False)
class CaseData:
    """The data of a case for one model: types and shapes of the inputs, and the samples that the model is run on.

    ``seed`` determines random samples. ``notes`` collects notes for the user. Attributes are computed on first access.
    Types and shapes raise `ModelError` for a dynamic dimension without a size, for shapes that contradict the model and
    for inputs that are no tensors of numbers, and `SpecError` for declared names that are not inputs; samples also
    raise `DataError`.
    """

    model: Model
    inputs: Inputs
    seed: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note unless it is already present."""
        if text not in self.notes:
            self.notes.append(text)

    # ---- types and shapes -------------------------------------------------------------------------

    def shaped(self) -> CaseData:
        """With shapes of the data for inputs whose shapes neither the model fixes nor the case declares.

        Where the shapes of samples differ, the range is that of all samples, and the shape that is timed is that of the
        file with samples of median size, of calibration data if there is some. Raises `DataError` if the data has no
        array for an input, or one that cannot be the input.
        """
        model, inputs, declared = self.model, self.inputs, self.inputs.profiles[0].shapes
        sources = [source for source in (inputs.calibration, inputs.evaluation) if source is not None]
        own = {
            name: model.shape(name) or () for name in model.inputs if name not in {*declared, *inputs.values}
        }
        open_inputs = {name: shape for name, shape in own.items() if not all(shape)}
        if not sources or not open_inputs:
            return self
        needed = [name for name in model.inputs if name not in inputs.values]
        try:
            files = [
                [shapes_in(each, open_inputs) for each in read_arrays(source, needed)] for source in sources
            ]
        except DataError:
            if any(not all(shape[1:]) or shape == (None,) for shape in open_inputs.values()):
                raise
            return self  # the error is raised when the data is opened
        usual = sorted(files[0], key=lambda shapes: sum(map(prod, shapes.values())))[len(files[0]) // 2]
        fixed = {}
        for name, dims in open_inputs.items():
            if found := [shapes[name] for shapes in chain.from_iterable(files) if name in shapes]:
                opt = usual.get(name, (1, *found[0][1:]))  # calibration data is stacked
                sizes = [*zip(opt, *found, strict=True)]
                fixed[name] = InputShape(min=tuple(map(min, sizes)), opt=opt, max=tuple(map(max, sizes)))
                if inputs.batch is None and len(opt) > 1 and opt[0] > 1 and (dims or (1,))[0] is None:
                    self.note(
                        f"input '{name}' is timed at {list(opt)}, a batch of the data; declare inputs.shapes for "
                        "another one"
                    )
        profiles = (replace(profile, shapes={**fixed, **profile.shapes}) for profile in inputs.profiles)
        return replace(self, inputs=replace(inputs, profiles=tuple(profiles)))

    def require_names(self) -> None:
        """Raise `SpecError` if a shape is declared for an input that the model does not have."""
        require_inputs(self.model, self.inputs.profiles[0].shapes)

    def spans(self, profile: int = 0) -> dict[str, InputShape]:
        """The range of shapes of each input, for one profile of the case, given by its index in the spec.

        Declared shapes come first, then the model's own static dimensions. A dimension with a name (``batch``) has the
        size that a declared shape gives it. ``inputs.batch`` replaces each dynamic leading dimension, which is else 1
        for an input of rank two or more.
        """
        model, declared, batch = self.model, self.inputs.profiles[profile].shapes, self.inputs.batch
        require_inputs(model, declared)
        own = {name: _dims_of(model, name, declared.get(name)) for name in model.inputs}
        first = {name: dims[0] for name, dims in own.items() if dims}
        if batch is not None and all(isinstance(dim, int) and dim != batch for dim in first.values()):
            fixed = ", ".join(f"'{name}' at {dim}" for name, dim in first.items())
            raise ModelError(
                f"batch {batch} is asked for, but the model fixes the first dimension of {fixed or 'no input'}",
                where=model.where,
                cure="export the model with a dynamic batch, or take `batch` out of the matrix",
            )
        axes = {name: [*zip(span.min, span.opt, span.max, strict=True)] for name, span in declared.items()}
        named = [pair for name, known in axes.items() for pair in zip(own[name], known, strict=False)]
        named += [(dims[0], (1, 1, 1)) for dims in own.values() if len(dims) > 1]
        sizes = {dim: size for dim, size in reversed(named) if isinstance(dim, str)}  # the first one counts
        found: dict[str, InputShape] = {}
        unknown: dict[str, list[int | None]] = {}
        for name, dims in own.items():
            each: list[tuple[int, ...]] = [
                (dim,) * 3 if isinstance(dim, int) else sizes.get(dim or "", ()) for dim in dims
            ]
            each = [*axes[name]] if name in axes else each
            if dims and each and not isinstance(dims[0], int) and (batch or (len(dims) > 1 and not each[0])):
                each[0] = (batch or 1,) * 3
            if () in each:
                unknown[name] = [size[1] if size else None for size in each]
                continue
            low, shape, high = zip(*each, strict=True) if each else ((), (), ())
            _require_fit(model, name, dims, shape)
            found[name] = InputShape(min=low, opt=shape, max=high)
        if unknown:
            raise _unknown_sizes(model, unknown)
        return found

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each input in the first profile."""
        return {name: span.opt for name, span in self.spans().items()}

    @cached_property
    def profiles(self) -> tuple[ShapeProfile, ...]:
        """The profiles including the batch of the case, for backends that must know shapes before they build.

        Dynamic inputs that are not declared have the shapes of `spans`.
        """
        found = []
        for number, profile in enumerate(self.inputs.profiles):
            spans = dict(profile.shapes)
            with suppress(ModelError, SpecError):  # reported where the shapes are needed
                for name, span in self.spans(number).items():
                    if name in spans or None in (self.model.shape(name) or ()):
                        spans[name] = span
            found.append(replace(profile, shapes=spans))
        return tuple(found)

    @cached_property
    def specs(self) -> dict[str, InputSpec]:
        """The type and shapes of each input."""
        model, found = self.model, {}
        for name, shape in self.shapes.items():
            rows = [
                model.constants[node.inputs[0]].dims[node.number("axis", 0)]
                for node in _lookups(model, name)
                if node.inputs[0] in model.constants and not node.scope  # a body may not run
            ]
            found[name] = InputSpec(
                dtype=_dtype(model, name),
                shape=shape,
                rows=min(rows, default=None),
                ranges=tuple(
                    declared.shapes.get(name, each.shapes[name])
                    for declared, each in zip(self.inputs.profiles, self.profiles, strict=True)
                    if name in each.shapes
                ),
                own=model.shape(name),
            )
        return found

    # ---- samples ----------------------------------------------------------------------------------

    @cached_property
    def calibration(self) -> Dataset | None:
        """The calibration data; ``None`` if the case has none."""
        source = self.inputs.calibration
        if source is None:
            return None
        data = self.open(source, labelled=False)
        for doubt in data.doubts():
            self.note(f"calibration data {source.name}: {doubt}")
        return data

    @cached_property
    def evaluation(self) -> Dataset | None:
        """The evaluation data; ``None`` if the case has none."""
        source = self.inputs.evaluation
        return None if source is None else self.open(source)

    def open(self, source: DataSource, *, labelled: bool = True) -> Dataset:
        """Data for these inputs; labels are not read unless ``labelled``."""
        data = open_data(source, self.specs, fixed=self.inputs.values, labelled=labelled)
        for note in data.notes:
            self.note(f"{source.name}: {note}")
        return data

    def feeds(self, *, random_samples: int = 8) -> Iterator[Feed]:
        """Calibration inputs: the user's data, else random inputs from the seed, with a note.

        More ``random_samples`` cover more values, and take longer.
        """
        if self.calibration is not None:
            return iter(self.calibration)
        ranges, evaluation = self.inputs.scales, self.inputs.evaluation
        vague = [word for word, given in (("scales", ranges), ("parity", evaluation)) if given is None]
        if vague:
            prove = "proves" if vague == ["parity"] else "prove"
            self.note(f"no calibration data: random inputs are used, so {' and '.join(vague)} {prove} little")
        return self.random(random_samples)

    def random(self, count: int) -> Iterator[dict[str, Array]]:
        """``count`` feeds of plausible values: floats from the standard normal, integers small and not negative.

        Integers that index rows of a table (Gather) span the table, and those that a DequantizeLinear reads span their
        type, up to 16 bits; others are 0 or 1.
        """
        bounds = {name: _bounds_of(self.model, name, spec) for name, spec in self.specs.items()}
        for number in range(count):
            random, feed = np.random.default_rng((self.seed, number)), dict[str, Array]()
            for name, spec in self.specs.items():
                if np.issubdtype(spec.dtype, np.integer) or spec.dtype == np.bool_:
                    feed[name] = random.integers(*bounds[name], spec.shape).astype(spec.dtype)
                else:
                    feed[name] = random.standard_normal(spec.shape).astype(spec.dtype)
            yield feed

    def for_calibration(self) -> tuple[Dataset | list[Feed], str]:
        """Calibration inputs, and their kind: calibration or random."""
        if self.calibration is None:
            return list(self.feeds()), "random"
        return self.calibration, "calibration"

    def for_comparison(self) -> tuple[Dataset | list[Feed], str]:
        """The best data for comparing outputs, and its kind: evaluation, calibration or random."""
        return self.for_calibration() if self.evaluation is None else (self.evaluation, "evaluation")

    @cached_property
    def sample(self) -> dict[str, Array]:
        """One calibration input, in the shapes of the first profile if one has these."""
        return self.first_fitting(self.feeds)

    def first_fitting(self, feeds: Callable[[], Iterable[Feed]]) -> dict[str, Array]:
        """The first of the feeds in the shapes of the first profile; the first of all if none has these."""
        shapes = {name: shape for name, shape in self.shapes.items() if name not in self.inputs.values}
        fits = (feed for feed in feeds() if all(feed[name].shape == shape for name, shape in shapes.items()))
        found = next(fits, None)
        return dict(next(iter(feeds())) if found is None else found)

    def by_profile(self) -> list[tuple[dict[str, Array], float]]:
        """`sample` in the shapes of each profile, and the share of the profile in the objective."""
        profiles = self.inputs.profiles
        total = math.fsum(profile.weight for profile in profiles)
        spans, sample = [self.spans(number) for number in range(len(profiles))], self.sample
        return [
            ({name: _resized(sample[name], span.opt) for name, span in own.items()}, profile.weight / total)
            for profile, own in zip(profiles, spans, strict=True)
        ]


def require_inputs(model: Model, names: Iterable[str], key: str = "`inputs.shapes` (--shapes)") -> None:
    """Raise `SpecError` if a key of a spec names an input that the model does not have."""
    if unknown := [name for name in names if name not in model.inputs]:
        near = did_you_mean(unknown[0], model.inputs)
        raise SpecError(
            f"{key} names '{unknown[0]}', which is no input of the model{near}",
            where=model.where,
            cure=f"its inputs: {', '.join(model.inputs)}",
        )


def _resized(value: Array, shape: Shape) -> Array:
    """The same values in another shape of the same rank: repeated along each axis, and cut. So they stay valid."""
    if not value.size:
        return np.zeros(shape, value.dtype)
    for axis, size in enumerate(shape):
        value = np.take(value, np.arange(size) % value.shape[axis], axis=axis)
    return value


def _dims_of(model: Model, name: str, declared: InputShape | None) -> tuple[int | str | None, ...]:
    """The dimensions of an input of the model; unknown ones as many as are declared, if its rank is unknown."""
    _dtype(model, name)
    if model.shape(name) is not None:
        return model.named_dims(name)
    if declared is not None:
        return (None,) * len(declared.opt)
    cure = f"declare it in the spec: inputs: {{shapes: {{{name}: <a full shape>}}}}"
    raise ModelError(f"input '{name}' has no known rank", where=model.where, cure=cure)


def _require_fit(model: Model, name: str, dims: Sequence[int | str | None], shape: Shape) -> None:
    takes = tuple(dim if isinstance(dim, int) else None for dim in dims)
    if not allows(takes, shape):
        raise ModelError(
            f"input '{name}' is declared with shape {list(shape)}, but the model has {shape_text(takes)}",
            where=model.where,
            cure="declare in `inputs.shapes` (--shapes) a shape that the model accepts",
        )
    size = prod(shape) * _dtype(model, name).itemsize
    if size > _LARGEST:
        raise ModelError(
            f"input '{name}' of shape {list(shape)} takes {size:,} bytes, more than {_LARGEST:,}",
            where=model.where,
            cure="declare a smaller shape, or export the model with one",
        )


def _unknown_sizes(model: Model, open_inputs: Mapping[str, Sequence[int | None]]) -> ModelError:
    name, *others = open_inputs
    also = f" (also {', '.join(repr(other) for other in others)})" if others else ""
    sizes = {name: ["?" if dim is None else str(dim) for dim in dims] for name, dims in open_inputs.items()}
    spec = ", ".join(f"{name}: [{', '.join(dims)}]" for name, dims in sizes.items())
    words = ",".join(f"{name}:{'x'.join(dims)}" for name, dims in sizes.items())
    them, that = ("them", "those shapes") if others else ("it", "that shape")
    return ModelError(
        f"dimension {open_inputs[name].index(None)} of input '{name}' is dynamic and no shape is declared for it{also}",
        where=model.where,
        cure=f"declare {them}, inputs: {{shapes: {{{spec}}}}} in a spec or --shapes {words}, or give calibration data "
        f"of {that}",
    )


def _dtype(model: Model, name: str) -> np.dtype[np.generic]:
    """The type of an input. Raises `ModelError` if it cannot be fed from arrays."""
    elem_type = model.elem_type(name)
    kinds = (value.type for value in model.proto.graph.input if value.name == name)
    kind = next((kind.WhichOneof("value") for kind in kinds), None)
    if kind == "tensor_type" and elem_type is not None and elem_type not in _NO_NUMBERS:
        return onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    what = "holds strings" if elem_type == onnx.TensorProto.STRING else _NO_TENSORS.get(kind or "")
    raise ModelError(
        f"input '{name}' {what or 'has no element type'}, and only tensors of numbers can be fed",
        where=model.where,
        cure="cut the part that reads it off the model",
    )


def _lookups(model: Model, name: str) -> Iterator[Node]:
    """The Gather nodes that an input gives indices to."""
    tensors, seen = [name], {name}
    while tensors:
        for consumer in model.consumers.get(tensors.pop(), ()):
            node = model.by_name[consumer.node]
            if node.op_type == "Gather" and consumer.input == 1:
                yield node
            elif node.op_type in _SAME_VALUES and consumer.input == 0 and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                tensors.append(node.outputs[0])


def _bounds_of(model: Model, name: str, spec: InputSpec) -> tuple[int, int]:
    """The least integer for an input, and the first one above the bounds."""
    readers = {model.by_name[end.node].op_type for end in model.consumers.get(name, ())}
    if readers == {"DequantizeLinear"} and np.issubdtype(spec.dtype, np.integer):
        limits, widest = np.iinfo(str(spec.dtype)), np.iinfo(np.int16)
        return max(limits.min, widest.min), min(limits.max, widest.max) + 1
    tables = ((model.shape(node.inputs[0]), node.number("axis", 0)) for node in _lookups(model, name))
    # 1 is the only safe limit if the size of a table is not known
    return 0, min(((shape[axis] if shape else None) or 1 for shape, axis in tables), default=2)
