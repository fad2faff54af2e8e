"""Rules for operators too small or too large for TensorRT's kernels, and for those of a GPU or release.

Source of sizes: the operators that Model-Optimizer excludes, "as kernels are missing or slower". None was measured by
this project.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from onnx import TensorProto

from qdqspec.backends.tensorrt import ops
from qdqspec.backends.tensorrt.lint.rule import MODEL_OPTIMIZER, rule
from qdqspec.graph.model import Node
from qdqspec.graph.trt import DOMAIN
from qdqspec.qdq.lint.rules import Hit
from qdqspec.qdq.lint.view import View

_SOURCE = f"{MODEL_OPTIMIZER}, graph_utils"


@rule(
    "TRT040",
    "slow",
    "A quantized operator is too small for the integer kernels",
    cure="leave it in float: exclude it in patterns.nodes",
    source=f"{_SOURCE}: kernels are missing or slower there",
)
def too_small(view: View) -> Iterator[Hit]:
    """Products with one row or column, or fewer than 16 elements; convolutions with few channels.

    An int8 convolution may have fewer than 16 channels if one side is a multiple of 8, and one side is 16 or it is
    the first convolution; a grouped one if its outputs are a multiple of 8 and its kernel at least 3 wide. An fp8 one
    needs more than 16.
    """
    for node in view.of("Conv", "Gemm", "MatMul"):
        if why := (_small_convolution if node.op_type == "Conv" else _small_product)(view, node):
            yield node, why


def _small_convolution(view: View, node: Node) -> str:
    dequantizer, dims = view.weight_dequantizer(node), view.weight_dims(node)
    if dequantizer is None or len(dims) < 3:
        return ""
    made, read, *kernel = dims
    group = node.number("group", 1)
    fp8 = view.numbers(dequantizer).elem_type == TensorProto.FLOAT8E4M3FN
    first = view.before_pair(node.inputs[0]) in view.model.inputs
    if not ops.too_few_channels(dims, group=group, fp8=fp8, first=first):
        return ""
    groups = f" in each of {group} groups" if group > 1 else ""
    return f"has {read} channels in{groups} and {made} out, and a kernel of {'x'.join(map(str, kernel))}"


def _small_product(view: View, node: Node) -> str:
    if not all(view.dequantizer(tensor) for tensor in node.inputs[:2]):
        return ""
    result, weight = view.model.shape(node.outputs[0]), view.model.shape(node.inputs[1])
    if result is not None and ops.is_one_line(result):
        return f"gives {'one row' if result[-2] == 1 else 'one column'} a product"
    if weight is not None and ops.too_small_to_multiply(weight):
        return f"multiplies by {weight[-2]} x {weight[-1]}"
    return ""


@rule(
    "TRT055",
    "slow",
    "A transposed convolution is quantized to fp8",
    cure="leave it in float16, or quantize it to int8",
    source=f'{MODEL_OPTIMIZER}, fp8.py: "The quantizable op types for FP8 are limited to Conv, Gemm, Matmul, and '
    'Residual-Add"; whether a version of TensorRT has kernels is not known',
    unknown=("10.9", ""),
)
def fp8_transposed(view: View) -> Iterator[Hit]:
    """A ConvTranspose with an fp8 weight."""
    for node, dequantizer in view.quantized_weights("ConvTranspose"):
        if view.numbers(dequantizer).elem_type == TensorProto.FLOAT8E4M3FN:
            yield node, "has a weight of fp8"


@rule(
    "TRT041",
    "slow",
    "An fp8 convolution has a kernel that is too large",
    cure="leave it in float16: exclude it in patterns.nodes",
    source=f"{_SOURCE}: fp8 convolutions of kernel volume 32 and above",
)
def large_fp8_kernels(view: View) -> Iterator[Hit]:
    """A convolution with an fp8 weight and a large kernel, by the product of the kernel's sides."""
    return fp8_kernels(view, ops.too_large_for_fp8)


def fp8_kernels(view: View, too_large: Callable[[Sequence[int]], bool]) -> Iterator[Hit]:
    """Convolutions with an fp8 weight of a shape for which the kernel is too large."""
    for node, dequantizer in view.quantized_weights("Conv"):
        dims = view.weight_dims(node)
        if view.numbers(dequantizer).elem_type == TensorProto.FLOAT8E4M3FN and too_large(dims):
            yield node, f"has a kernel of {ops.kernel_elements(dims)} elements"


_MATRIX = "NVIDIA TensorRT support matrix, hardware and precision"
_NEWEST = (99, 0)
_NAMES: dict[int, str] = {
    TensorProto.FLOAT8E4M3FN: "fp8",
    TensorProto.INT8: "int8",
    TensorProto.INT4: "int4",
    TensorProto.FLOAT4E2M1: "nvfp4",
}

# DQ of NVIDIA's own domain, written before ONNX had these types.
_OWN_PAIRS = {"TRT_FP8DequantizeLinear": "fp8", "TRT_INT4DequantizeLinear": "int4"}


@rule(
    "TRT020",
    "refused",
    "The GPU does not compute in this format",
    cure="choose a format that the GPU computes in",
    source=f"{_MATRIX}; TensorRT's own warning of FP4 on Hopper",
)
def not_on_this_gpu(view: View) -> Iterator[Hit]:
    """Formats in the model that are not listed for the given compute capability."""
    return formats_but(view, () if view.capability is None else ops.formats_for(view.capability, _NEWEST))


def formats_but(view: View, known: Collection[str]) -> Iterator[Hit]:
    """The formats of the model that are not among the known ones of the GPU, if there is a compute capability."""
    if view.capability is None:
        return
    gpu, computes = ops.dotted(view.capability), ", ".join(known) or "float"
    for fmt, count in pair_formats(view).items():
        if fmt not in known:
            yield None, f"{count} pairs are {fmt}; compute capability {gpu} computes in {computes}"


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
    for fmt, count in pair_formats(view).items():
        if fmt != "int8":
            gpu, release = (f"{ops.dotted(pair)} or above" for pair in ops.FORMATS[fmt])
            yield None, f"{count} pairs are {fmt}: compute capability {gpu}, TensorRT {release}"


@rule(
    "TRT022",
    "note",
    "Some int8 kernels do not exist on GPUs this old",
    cure='where a build says "could not find any implementation", take that layer\'s pairs out',
    source='"Working with Quantized Types", Q/DQ layer-placement recommendations',
)
def old_gpu(view: View) -> Iterator[Hit]:
    """int8 on compute capability 7.5 or below."""
    if view.capability is not None and view.capability <= (7, 5) and "int8" in pair_formats(view):
        yield None, f"int8 on compute capability {ops.dotted(view.capability)}"


@rule(
    "TRT056",
    "note",
    "fp8 and int8 are in one network: kernels take one of the two, and each border is a conversion",
    cure="measure it beside int8 alone and fp8 alone",
    source="no document was found that states how TensorRT runs it; Model-Optimizer quantizes to one of the two",
    unknown=("10.9", ""),
)
def fp8_beside_int8(view: View) -> Iterator[Hit]:
    """Pairs of both formats anywhere in the model."""
    found = pair_formats(view)
    if "int8" in found and "fp8" in found:
        yield None, f"{found['int8']} pairs are int8, {found['fp8']} fp8"


def pair_formats(view: View) -> dict[str, int]:
    """The number of DQ of each format, by the name of its kind in this module."""
    names = [_NAMES.get(numbers.elem_type or 0) for _, numbers in view.dequantizers]
    blocked = (numbers.block for _, numbers in view.dequantizers)
    names = ["mxfp8" if block and name == "fp8" else name for name, block in zip(names, blocked, strict=True)]
    own = (_OWN_PAIRS.get(node.op_type) for node in view.model.nodes if node.domain == DOMAIN)
    return Counter(name for name in (*names, *own) if name is not None)
