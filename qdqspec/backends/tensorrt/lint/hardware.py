"""Rules that depend on the GPU and the TensorRT release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint.rule import rule
from qdqspec.backends.tensorrt.ops import FORMATS, formats_for
from qdqspec.lint.rules import Hit

if TYPE_CHECKING:
    from qdqspec.lint.view import QdqNumbers, View

_MATRIX = "NVIDIA TensorRT support matrix, hardware and precision"
_NEWEST = (99, 0)
_NAMES: dict[int, str] = {
    TensorProto.INT8: "int8",
    TensorProto.INT4: "int4",
    TensorProto.FLOAT4E2M1: "nvfp4",
}


@rule(
    "TRT020",
    "slow",
    "The GPU does not compute in this format",
    cure="choose a format that the GPU computes in",
    source=f"{_MATRIX}; TensorRT's own warning of FP4 on Hopper",
)
def not_on_this_gpu(view: View) -> Iterator[Hit]:
    """Formats in the model that are not listed for the given compute capability."""
    if view.capability is None:
        return
    known = formats_for(view.capability, _NEWEST)
    for fmt, count in _formats(view).items():
        if fmt not in known:
            gpu = ".".join(map(str, view.capability))
            yield Hit(
                "",
                f"{count} pairs are {fmt}; compute capability {gpu} computes in {', '.join(known) or 'float'}",
            )


@rule(
    "TRT021",
    "note",
    "The format needs a newer GPU or release than others do",
    cure="make sure of the GPU and the release, or name the GPU with --compute-capability",
    source=f"{_MATRIX}; MXFP8 since TensorRT 10.12",
)
def needs_a_newer_gpu(view: View) -> Iterator[Hit]:
    """Formats other than int8, if no compute capability is given."""
    if view.capability is not None:
        return
    for fmt, count in _formats(view).items():
        if fmt != "int8":
            (gpu, release) = (".".join(map(str, pair)) for pair in FORMATS[fmt])
            yield Hit(
                "", f"{count} pairs are {fmt}: compute capability {gpu} or above, TensorRT {release} or above"
            )


@rule(
    "TRT022",
    "note",
    "Some int8 kernels do not exist on GPUs this old",
    cure='where a build says "could not find any implementation", take that layer\'s pairs out',
    source='"Working with Quantized Types", Q/DQ layer-placement recommendations',
)
def old_gpu(view: View) -> Iterator[Hit]:
    """int8 on compute capability 7.5 or below."""
    if view.capability is not None and view.capability <= (7, 5) and "int8" in _formats(view):
        yield Hit("", "int8 on compute capability " + ".".join(map(str, view.capability)))


@rule(
    "TRT056",
    "note",
    "fp8 and int8 stand in one network: kernels take one of the two, and each border is a conversion",
    cure="measure it beside int8 alone and fp8 alone",
    source="no document was found that says what TensorRT makes of it; Model-Optimizer quantizes to one of the two",
    unknown=("10.9", ""),
)
def fp8_beside_int8(view: View) -> Iterator[Hit]:
    """Pairs of both formats anywhere in the model."""
    found = _formats(view)
    if "int8" in found and "fp8" in found:
        yield Hit("", f"{found['int8']} pairs are int8, {found['fp8']} fp8")


def _formats(view: View) -> dict[str, int]:
    """The number of DQ of each format, by the name of its kind in this module."""
    found: dict[str, int] = {}
    for node in view.dequantizers:
        name = _format(view.numbers(node))
        if name is not None:
            found[name] = found.get(name, 0) + 1
    return found


def _format(numbers: QdqNumbers) -> str | None:
    if numbers.elem_type == TensorProto.FLOAT8E4M3FN:
        return "mxfp8" if numbers.block else "fp8"
    return _NAMES.get(numbers.elem_type or 0)
