"""Optimization profiles from the shapes of a spec.

TensorRT selects kernels for a profile's optimum shapes. A dynamic dimension without a given shape is an error:
trtexec uses 1 for it, which measures a different shape than intended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.arrays import Shape
from qdqspec.errors import BackendError
from qdqspec.types import InputShape, ShapeProfile

if TYPE_CHECKING:
    import tensorrt as trt


def add_profiles(
    builder: trt.Builder,
    network: trt.INetworkDefinition,
    config: trt.IBuilderConfig,
    profiles: Sequence[ShapeProfile],
    model: Path,
) -> int:
    """Add one optimization profile for each of the spec's, in its order; return their number.

    A network without dynamic inputs needs none. Raises `BackendError` with every input that has a dynamic
    dimension and no shape, or a shape that does not match.
    """
    dynamic = _dynamic_inputs(network, model)
    if not dynamic:
        return 0
    wanted = profiles or (ShapeProfile(),)
    for profile in wanted:
        _check(dynamic, profile.shapes, model)
        added = builder.create_optimization_profile()
        for name in dynamic:
            shape = profile.shapes[name]
            added.set_shape(name, shape.min, shape.opt, shape.max)
        if config.add_optimization_profile(added) < 0:
            raise BackendError("TensorRT refused the shapes of the inputs", where=model, cure=_cure(dynamic))
    return len(wanted)


def _dynamic_inputs(network: trt.INetworkDefinition, model: Path) -> dict[str, Shape]:
    """Inputs with unknown dimensions, which TensorRT represents as -1."""
    found: dict[str, Shape] = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = tuple(tensor.shape)
        if tensor.is_shape_tensor:
            raise BackendError(
                f"the values of input '{tensor.name}' decide shapes inside the model, which no spec can say",
                where=model,
                cure="make it a constant of the model",
            )
        if -1 in shape:
            found[tensor.name] = shape
    return found


def _check(dynamic: Mapping[str, Shape], given: Mapping[str, InputShape], model: Path) -> None:
    if missing := {name: shape for name, shape in dynamic.items() if name not in given}:
        names = ", ".join(f"'{name}' {_text(shape)}" for name, shape in missing.items())
        raise BackendError(
            f"input {names} has dynamic dimensions and no shape is given", where=model, cure=_cure(missing)
        )
    for name, own in dynamic.items():
        for shape in (given[name].min, given[name].opt, given[name].max):
            if not fits(shape, own, own):
                raise BackendError(
                    f"input '{name}' is declared with shape {list(shape)}, but the model has {_text(own)}",
                    where=model,
                    cure="give inputs.shapes what the model takes",
                )


def choose_profile(
    engine: trt.ICudaEngine, shapes: Mapping[str, Shape], model: Path, *, only: int | None = None
) -> int:
    """The first optimization profile that accepts these shapes; with ``only``, that one, if there are several.

    Raises `BackendError` if none accepts them.
    """
    ranges: dict[str, list[str]] = {}
    count = engine.num_optimization_profiles
    for index in range(count) if only is None or count == 1 else (only,):
        refused = {
            name: span for name, shape in shapes.items() if (span := _refused(engine, name, index, shape))
        }
        if not refused:
            return index
        for name, span in refused.items():
            ranges.setdefault(name, []).append(span)
    name, spans = next(iter(ranges.items()))
    raise BackendError(
        f"input '{name}' has shape {list(shapes[name])}, and the engine takes {' or '.join(spans)}",
        where=model,
        cure="feed a shape that inputs.shapes declares",
    )


def _refused(engine: trt.ICudaEngine, name: str, index: int, shape: Shape) -> str:
    """The shapes a profile accepts, if it rejects this one; else empty. Profiles are for dynamic inputs."""
    own = tuple(engine.get_tensor_shape(name))
    if -1 not in own:
        return "" if shape == own else str(list(own))
    low, _, high = (tuple(dims) for dims in engine.get_tensor_profile_shape(name, index))
    return "" if fits(shape, low, high) else f"{list(low)} to {list(high)}"


def fits(shape: Shape, low: Shape, high: Shape) -> bool:
    """Whether a shape is between two others, where -1 means no bound."""
    return len(shape) == len(low) and all(
        (least < 0 or least <= size) and (most < 0 or size <= most)
        for size, least, most in zip(shape, low, high, strict=True)
    )


def _cure(shapes: Mapping[str, Shape]) -> str:
    text = ", ".join(f"{name}: {_text(shape)}" for name, shape in shapes.items())
    return f"declare them in the spec: inputs: {{shapes: {{{text}}}}}"


def _text(shape: Shape) -> str:
    return "[" + ", ".join("?" if size < 0 else str(size) for size in shape) + "]"
