"""Files and shape arguments exchanged with trtexec: input values, output values, shapes as text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from qdqspec.arrays import Array
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.types import ShapeProfile

# Accepted by TensorRT 10 and 11 and the same in both; in 11 they are the defaults.
MEASURING = ("--useCudaGraph", "--useSpinWait", "--noDataTransfers", "--separateProfileRun")

_BARE_NUMBER = re.compile(r"(?<![\w\"])(-?)(nan|inf)(?:inity)?(?![\w\"])", re.IGNORECASE)


def inputs_of(model: Model) -> dict[str, onnx.ValueInfoProto]:
    """The inputs that must be fed, by name."""
    return {value.name: value for value in model.proto.graph.input if value.name not in model.initializers}


def check_feeds(model: Model, feeds: Mapping[str, Array]) -> None:
    """Raise `BackendError` if an input has no value, or one of another type."""
    inputs = inputs_of(model)
    if missing := sorted(inputs.keys() - feeds.keys()):
        raise BackendError(f"no value is given for input {', '.join(missing)}", where=model.where)
    for name, value in inputs.items():
        wanted = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if feeds[name].dtype != wanted:
            raise BackendError(
                f"input '{name}' takes {wanted}, and {feeds[name].dtype} is given", where=model.where
            )


def write_inputs(model: Model, feeds: Mapping[str, Array], folder: Path) -> str:
    """Write each input's bytes to a file and return the value of ``--loadInputs``."""
    words = []
    for index, name in enumerate(inputs_of(model)):
        path = folder / f"input-{index}.bin"
        path.write_bytes(np.ascontiguousarray(feeds[name]).tobytes())
        words.append(f"{quoted(name)}:{path}")
    return ",".join(words)


def dynamic_inputs(model: Model) -> tuple[str, ...]:
    """Inputs with a dimension that is not a number."""
    return tuple(
        name
        for name, value in inputs_of(model).items()
        if any(not dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    )


def shape_words(model: Model, profiles: Sequence[ShapeProfile]) -> list[str]:
    """``--minShapes``, ``--optShapes``, ``--maxShapes`` for the dynamic inputs, of each profile after its number.

    trtexec reads the three options that follow ``--profile``. Raises `BackendError` for a dynamic input without a
    shape: trtexec would use 1 for missing sizes.
    """
    dynamic = dynamic_inputs(model)
    if not dynamic:
        return []
    words = []
    for number, profile in enumerate(profiles or (ShapeProfile(),)):
        _require_shapes(dynamic, profile, model)
        words += [f"--profile={number}"] if len(profiles) > 1 else []
        words += [
            f"--{which}Shapes={joined({name: getattr(profile.shapes[name], which) for name in dynamic})}"
            for which in ("min", "opt", "max")
        ]
    return words


def _require_shapes(dynamic: Iterable[str], profile: ShapeProfile, model: Model) -> None:
    if missing := [name for name in dynamic if name not in profile.shapes]:
        raise BackendError(
            f"input {', '.join(missing)} has dynamic dimensions and no shape is given",
            where=model.where,
            cure="give it one in inputs.shapes of the spec",
        )


def fed_shapes(model: Model, feeds: Mapping[str, Array]) -> list[str]:
    """``--shapes`` for the fed inputs; empty for a model without dynamic inputs."""
    dynamic = dynamic_inputs(model)
    return [f"--shapes={joined({name: feeds[name].shape for name in dynamic})}"] if dynamic else []


def joined(shapes: Mapping[str, Iterable[int]]) -> str:
    """``x:1x3x224x224,mask:1x128``; a scalar has an empty shape."""
    return ",".join(f"{quoted(name)}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def quoted(name: str) -> str:
    """A tensor's name for trtexec's command line: in quotes if it contains a separator."""
    return f"'{name}'" if set(name) & set(":,") else name


def read_outputs(text: str, model: Model) -> dict[str, Array]:
    """Output arrays from ``--exportOutput``, with the six significant digits that trtexec writes.

    Raises `BackendError` if an output is missing or its values do not match its dimensions.
    """
    try:
        # C++ prints these words, without quotes, for values that are not numbers.
        found = json.loads(_BARE_NUMBER.sub(lambda m: m[1] + _WORDS[m[2].lower()], text), strict=False)
        entries = {entry["name"]: entry for entry in found}
        return {value.name: _output(value, entries[value.name]) for value in model.proto.graph.output}
    except KeyError as error:
        raise _unreadable(model, f"there is no {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _unreadable(model, str(error)) from None


_WORDS = {"nan": "NaN", "inf": "Infinity"}


def _output(value: onnx.ValueInfoProto, entry: Mapping[str, object]) -> Array:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    shape = tuple(int(size) for size in str(entry["dimensions"]).split("x") if size)
    values = np.asarray(entry["values"], dtype=np.float64 if dtype.kind in "fV" else None)
    if values.size != math.prod(shape):
        raise ValueError(f"output '{value.name}' has {values.size} values for dimensions {shape}")
    return values.astype(dtype).reshape(shape)


def _unreadable(model: Model, why: str) -> BackendError:
    return BackendError(f"the outputs that trtexec wrote cannot be read: {why:.200}", where=model.where)
