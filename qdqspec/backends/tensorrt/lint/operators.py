"""Rules for operators that TensorRT cannot run or has no fast kernel for: by parser, compiler, size, GPU or release.

Sources of importers: the parser's table of operators at 10.1, 10.15 and 11.1, and its changelog; not measured. What the
compiler refuses was measured with TensorRT for RTX, whose parser is of the same code and whose compiler is one of the
two of TensorRT; no source of NVIDIA states any of it for TensorRT. Source of sizes: the operators that Model-Optimizer
excludes, "as kernels are missing or slower"; not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator
from math import prod

import numpy as np
import onnx.defs
from onnx import TensorProto

from qdqspec.backends.tensorrt import ops
from qdqspec.backends.tensorrt.lint.numbers import INTEGER_KERNELS
from qdqspec.backends.tensorrt.lint.rule import (
    MEASURED,
    MODEL_OPTIMIZER,
    NOT_KNOWN,
    TABLES,
    compiled,
    note,
    refused,
    slow,
)
from qdqspec.backends.tensorrt.ops import CARRIERS
from qdqspec.graph import Node
from qdqspec.graph.ops import QDQ_OPS, data_inputs, is_default
from qdqspec.graph.trt import DOMAIN
from qdqspec.qdq.lint import Find, Hit, View, type_name

# "N" in the tables of all three versions, or in none of them. Integer operators are reported by TRT011.
NEVER = frozenset(
    {
        "AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
        "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "CumProd", "DFT", "Det",
        "ImageDecoder", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
        "Optional", "OptionalGetElement", "OptionalHasElement", "RegexFullMatch", "SequenceAt", "SequenceConstruct",
        "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
        "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "SwiGLU",
        "TfIdfVectorizer", "Unique",
    }
)  # fmt: skip
_CURE = "replace it before the export, cut the model there, or load a plugin of that name"
_INTEGER_DOMAIN = "com.microsoft"  # its QLinear operators are reported by TRT011, its Q and DQ by TRT012


def _of_types(*op_types: str) -> Find:
    def find(view: View) -> Iterator[Hit]:
        """ONNX's operators of certain types."""
        return ((node, f"is a {node.op_type}") for node in view.of(*op_types))

    return find


refused(
    "TRT025",
    "The parser has no importer for this operator",
    cure=_CURE,
    source=f"sources of NVIDIA: {TABLES}; of BitCast, CumProd and SwiGLU measured with TensorRT for RTX "
    "1.7.1.116, whose parser is of the same code",
)(_of_types(*NEVER))
refused(
    "TRT026",
    "The parser has no importer for Attention yet",
    cure="export the MatMul, Softmax and MatMul that it consists of, or use TensorRT 10.14",
    source=TABLES,
    until="10.14",
)(_of_types("Attention"))
refused(
    "TRT027",
    "The parser has no importer for this operator of language models yet",
    cure="export the operators that it consists of, or use TensorRT 10.15",
    source=TABLES,
    until="10.15",
)(_of_types("RMSNormalization", "RotaryEmbedding", "TensorScatter"))
refused(
    "TRT028",
    "The parser has no importer for Swish yet",
    cure="export Sigmoid and Mul, or use TensorRT 11.1",
    source=f"{TABLES}: not in the table of 10.15, in that of 11.1",
    until="11.1",
    unknown=("10.16", "11.1"),
)(_of_types("Swish"))


@refused(
    "TRT029",
    "An operator of another domain without an importer and without a local function",
    cure="export ONNX's own operators, or load a plugin of that name (--qdq-plugin)",
    source="onnx-tensorrt 10.1, ModelImporter.cpp: an operator without importer and local function must be a plugin",
    unknown=("10.2", ""),
)
def foreign_operators(view: View) -> Iterator[Hit]:
    """Operators such as FusedMatMul of com.microsoft, except TensorRT's domains and those of TRT011 and TRT012."""
    return _foreign(view, has_importer=False)


@note(
    "TRT053",
    "An operator of another domain is taken for ONNX's of the same name",
    cure="make sure that both compute the same from the same inputs and attributes, or export ONNX's",
    source="onnx-tensorrt 10.1, ModelImporter.cpp: importers are found by the operator's type, whatever its domain",
    unknown=("10.2", ""),
)
def read_as_onnx(view: View) -> Iterator[Hit]:
    """Operators of other domains that are read as ONNX's, such as Gelu of com.microsoft."""
    return _foreign(view, has_importer=True)


def _foreign(view: View, *, has_importer: bool) -> Iterator[Hit]:
    for node in view.model.nodes:
        # markers of inlined bodies are not in the file
        if node.is_marker or is_default(node) or node.domain.startswith("trt") or node.op_type in QDQ_OPS:
            continue
        if node.domain == _INTEGER_DOMAIN and node.op_type.startswith(("QLinear", "QGemm", "MatMulNBits")):
            continue
        if (onnx.defs.has(node.op_type) and node.op_type not in NEVER) == has_importer:
            yield node, f"is {node.domain}.{node.op_type}"


# ---- what the compiler refuses ------------------------------------------------------------------------

_EIGHT_BITS: dict[int, str] = {TensorProto.INT8: "int8", TensorProto.FLOAT8E4M3FN: "fp8"}
# Of one input, and with any attributes: of CARRIERS, these are carriers only with certain constants or inputs.
_CARRIERS = CARRIERS - {"Concat", "Div", "Mul", "Pad"}
_RECURRENT = ("GRU", "LSTM", "RNN")


@compiled(
    "TRT061",
    "A constant without dimensions is stored as an integer or an 8-bit float",
    cure="give it shape [1], or leave it in float before a QuantizeLinear, as qdqspec does",
    words='"Quantized constant (k) is only allowed before DQ or PLUGIN_V2 or kPLUGIN_V3 node", in '
    "qdqGraphOptimizer.cpp",
)
def stored_scalars(view: View) -> Iterator[Hit]:
    """A DQ of a stored constant of rank 0."""
    for node, _ in view.dequantizers:
        stored = view.model.constants.get(node.inputs[0])
        if stored is not None and not stored.dims:
            yield node, f"dequantizes '{node.inputs[0]}', which has no dimensions"


_STORED = frozenset({TensorProto.INT8, TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1})


@compiled(
    "TRT071",
    "A constant that is stored as an integer or an 8-bit float is read by another operator than a DequantizeLinear",
    cure="move the DequantizeLinear next to the constant, before the operator",
    words='"Quantized constant (w) is only allowed before DQ or PLUGIN_V2 or kPLUGIN_V3 node", before '
    "Cast, Gather, Identity, Pad, Reshape, Transpose and Where; of uint8 it builds",
)
def stored_before_others(view: View) -> Iterator[Hit]:
    """An operator of ONNX that reads a stored constant, as a Gather of a quantized embedding; not as a zero point."""
    found = {
        name: tensor.data_type for name, tensor in view.model.constants.items() if tensor.data_type in _STORED
    }
    for node in view.operators:
        for tensor in node.inputs if node.op_type not in INTEGER_KERNELS else ():
            if tensor in found:
                yield node, f"reads {type_name(found[tensor])} constant '{tensor}'"
    for node, _ in view.dequantizers:  # behind nodes that the view has computed
        if (tensor := node.inputs[0]) in found and tensor in view.computed:
            yield node, f"reads '{tensor}', which other nodes make from a constant"


@compiled(
    "TRT074",
    "A Concat joins a constant that is stored as an integer or an 8-bit float with a quantized tensor",
    cure="if the build fails, leave the constant in float before a QuantizeLinear, as qdqspec does",
    words='"CHECK(is_tensor()) failed" in operand.h for some orders of the nodes, int8 and fp8',
    severity="note",
)
def joined_constants(view: View) -> Iterator[Hit]:
    """A Concat of dequantized tensors only, one a stored constant and another an activation."""
    for node in view.of("Concat"):
        sources = [dq.inputs[0] for tensor in node.inputs if (dq := view.dequantizer(tensor)) is not None]
        stored = {source in view.model.constants for source in sources}
        if len(sources) == len(node.inputs) and stored == {True, False}:
            yield node, f"joins '{next(source for source in sources if source in view.model.constants)}'"


@compiled(
    "TRT062",
    "One operand is int8, the other fp8",
    cure="quantize both operands to one of the two",
    words='"Input and filter have to be the same type" for Gemm and MatMul, "CHECK(dtype == W.type())" '
    "for Conv",
)
def operands_of_two_formats(view: View) -> Iterator[Hit]:
    """A Conv, Gemm or MatMul of an int8 and an fp8 operand, also behind operators that move values."""
    for node in view.of("Conv", "Gemm", "MatMul"):
        formats = [set(_eight_bits(view, node, index).values()) for index in data_inputs(node)]
        if {"int8"} in formats and {"fp8"} in formats:
            yield node, f"reads {' and '.join(sorted(fmt for found in formats for fmt in found))}"


@compiled(
    "TRT063",
    "A tensor changes from int8 to fp8, or back, between equal scales",
    cure="quantize it to one of the two, or give the second pair its own scale",
    words='"Mismatched type for tensor q, f8 vs. expected type:i8"; other scales build',
)
def formats_in_a_row(view: View) -> Iterator[Hit]:
    """A Q of one format that reads a DQ of the other with the same scales, directly or past carriers."""
    for node, numbers in view.plain_pairs:
        fmt = _EIGHT_BITS.get(numbers.elem_type or 0)
        if node.op_type != "QuantizeLinear" or fmt is None or numbers.scale is None:
            continue
        for dequantizer, other in _eight_bits(view, node, 0).items():
            scale = view.numbers(view.model.by_name[dequantizer]).scale
            if other != fmt and scale is not None and np.array_equal(scale, numbers.scale):
                yield node, f"quantizes to {fmt} what '{dequantizer}' gives from {other}"


@compiled(
    "TRT064",
    "The data of a product with a weight of 4 bits is in 8 bits",
    cure="remove the pair: the kernel of such a product takes floats",
    words='"Input and filter have to be the same type" in fp8 and int8; int8 data of two dimensions builds',
)
def eight_bits_by_four(view: View) -> Iterator[Hit]:
    """A Gemm or MatMul with an int4 weight and an 8-bit pair before its data, directly or past carriers."""
    for node, weight in view.quantized_weights("Gemm", "MatMul"):
        if view.numbers(weight).elem_type != TensorProto.INT4:
            continue
        is_flat = len(view.model.shape(node.inputs[0]) or ()) == 2
        for dequantizer, fmt in _eight_bits(view, node, 0).items():
            if fmt == "fp8" or not is_flat:
                yield node, f"reads {fmt} from '{dequantizer}'"


def _eight_bits(view: View, node: Node, index: int) -> dict[str, str]:
    """The format of each DQ of 8 bits whose values an input of a node holds, by its name."""
    known = ((dq.name, view.numbers(dq)) for dq in view.dequantizers_before(node, index, _CARRIERS))
    formats = ((name, _EIGHT_BITS.get(n.elem_type or 0)) for name, n in known if not n.block)
    return {name: fmt for name, fmt in formats if fmt is not None}


@compiled(
    "TRT065",
    "An Attention of float32, or of one query, has no kernel",
    cure="convert the model to float16, or export the MatMul, Softmax and MatMul that it consists of",
    words='"Attention operation was not supported by a dedicated kernel"; in float16 it builds from '
    "two queries and 12 numbers per head on",
)
def attention_without_kernel(view: View) -> Iterator[Hit]:
    """ONNX's Attention of float32, or of queries of one step, as in a decoder with a cache."""
    for node in view.of("Attention"):
        if view.model.elem_type(node.inputs[0]) == TensorProto.FLOAT:
            yield node, "reads float32"
        elif (view.model.shape(node.inputs[0]) or (0, 0))[-2] == 1:
            yield node, "reads one query"


@compiled(
    "TRT070",
    "Queries and keys of an Attention are one tensor: the compiler crashes",
    cure="export the MatMul, Softmax and MatMul that it consists of; copies by Identity do not help",
    words="SIGSEGV of Attention(x, x, x) and Attention(x, x, k); Attention(x, k, k) builds",
)
def attention_of_one_tensor(view: View) -> Iterator[Hit]:
    """ONNX's Attention whose queries and keys are one tensor, or copies of one."""
    for node in view.of("Attention"):
        queries, keys = (_before_copies(view, tensor) for tensor in node.inputs[:2])
        if queries == keys:
            yield node, f"reads '{queries}' as queries and keys"


def _before_copies(view: View, tensor: str) -> str:
    """The tensor before operators that copy it."""
    node = view.model.producer.get(tensor)
    return tensor if node is None or node.op_type != "Identity" else _before_copies(view, node.inputs[0])


@compiled(
    "TRT066",
    "A GRU, LSTM or RNN in a branch of If, whose results of all steps are not read",
    cure="take the last step from its first output, Y, in place of Y_h; or move the operator out of the If",
    words='"Assertion tScope.getType() != ScopeType::kUNDEFINED" in graphScope.cpp; with its first '
    "output read, it builds",
)
def unread_steps(view: View) -> Iterator[Hit]:
    """A recurrent operator in a branch of If with no reader of its first output."""
    for node in view.of(*_RECURRENT):
        if "_branch" in node.scope and not view.model.ends(node.outputs[0]):
            yield node, f"is a {node.op_type}, of which only the last step is read"


@compiled(
    "TRT067",
    "A product of float32 on compute capability 7.5",
    cure="convert the model to float16",
    words='"Cannot compile operation for Turing (SM75): FP32 GEMM is not supported"; TensorRT has '
    "kernels of its own",
    severity="note",
    in_rtx="refused",
)
def float32_products(view: View) -> Iterator[Hit]:
    """Gemm, MatMul and recurrent operators that give float32, quantized or not; convolutions build."""
    for node in view.of("Gemm", "MatMul", *_RECURRENT) if view.capability == (7, 5) else ():
        if view.model.elem_type(node.outputs[0]) == TensorProto.FLOAT:
            yield node, f"is a {node.op_type} of float32"


# ---- what the parser refuses of operators that it has --------------------------------------------------

# Operators; an attribute, or the index of a constant input; the values that are taken.
_VALUES: tuple[tuple[str, str | int, Container[object]], ...] = (
    ("Attention", "softcap", {0.0}),
    ("Attention", "softmax_precision", ()),
    ("AveragePool LpPool MaxPool", "dilations", {1}),
    ("BatchNormalization", "training_mode", {0}),
    ("Dropout", 2, {False}),  # its training mode
    ("LRN", "size", range(1, 16, 2)),
    ("LSTM", "input_forget", {0}),
    ("LpPool", "p", {1, 2}),
    ("Resize", "antialias", {0}),
    ("Resize", "coordinate_transformation_mode",
     {"align_corners", "asymmetric", "half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn"}),
    ("Resize", "keep_aspect_ratio_policy", {"stretch"}),
    ("ScatterND", "reduction", {"none"}),
    ("TensorScatter", "mode", {"linear"}),
    ("TopK", "k", range(3841)),
    ("TopK", 1, range(3841)),
)  # fmt: skip
_NO_INTEGERS = "Einsum Gemm MatMul PRelu ReduceL2 Resize TensorScatter Upsample"
# The types that TensorRT has, each with the operators that refuse it as their first input or output.
_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "",
    TensorProto.DOUBLE: "",
    TensorProto.FLOAT16: "Celu Range",
    TensorProto.BFLOAT16: "Celu GRU HardSwish LpNormalization LpPool Mish",
    TensorProto.INT64: _NO_INTEGERS,
    TensorProto.INT32: f"{_NO_INTEGERS} Relu",
    TensorProto.BOOL: "DepthToSpace ReduceMax ReduceMin Resize SpaceToDepth Upsample",
    TensorProto.INT8: "Einsum Mod Pad",
    **dict.fromkeys(_STORED - {TensorProto.INT8}, "Cast CastLike"),
}
_OF_UINT8 = INTEGER_KERNELS | {"Cast", "CastLike", "Equal", "Identity", "Shape", "Size"}
_FIRST_OUTPUT_ONLY = ("Attention", "LayerNormalization", "MaxPool")
_OF_MATRICES = ("Hardmax", "LogSoftmax", "Softmax")
FORMS = (
    '"Found unsupported input type", "does not support dilations", "Antialiasing is not supported", "ScatterND with '
    'reduction is not supported", "K exceeds the maximum value allowed (3840)" and others'
)


@refused(
    "TRT073",
    "The parser has the operator, but not for this type, attribute, rank or output",
    cure="cast to a type that the operator takes, export it with other attributes, or replace it",
    source=f"{MEASURED}: {FORMS}; the table of operators of onnx-tensorrt 10.1 states most of them",
    unknown=NOT_KNOWN,
)
def refused_forms(view: View) -> Iterator[Hit]:
    """The first reason of each operator that the tables above exclude."""
    for node in view.operators:
        if why := next(_misfits(view, node), ""):
            yield node, why


def _misfits(view: View, node: Node) -> Iterator[str]:
    """The reasons why an operator is refused."""
    main = (node.input_at(0), *node.outputs[:1])
    for tensor in (*main, *node.inputs[1:]):
        kind = view.model.elem_type(tensor)
        if kind == TensorProto.UINT8:
            is_refused = node.op_type not in _OF_UINT8
        else:
            refusing = _TYPES.get(kind, node.op_type) if kind else ""
            is_refused = node.op_type in refusing.split() and (tensor in main or kind not in _TYPES)
        if is_refused:
            yield f"is a {node.op_type} of {type_name(kind)}"
    for op_types, key, taken in _VALUES:
        if node.op_type in op_types.split():
            for value in _given(view, node, key):
                if value not in taken:
                    yield f"has {value} as {key if isinstance(key, str) else node.input_at(key)}"
    if node.op_type in _FIRST_OUTPUT_ONLY and any(node.outputs[1:]):
        yield "has more than one output"
    if node.op_type in _OF_MATRICES and len(view.model.shape(node.inputs[0]) or (0, 0)) < 2:
        yield "reads a tensor of one dimension"


def _given(view: View, node: Node, key: str | int) -> list[object]:
    """The values of an attribute or a constant input, as far as they are given."""
    if isinstance(key, int):
        tensor = node.input_at(key)
        return view.model.array(tensor).ravel().tolist() if tensor in view.model.constants else []
    value = node.attributes.get(key, [])
    return value if isinstance(value, list) else [value.decode() if isinstance(value, bytes) else value]


# ---- sizes, GPUs and releases ----------------------------------------------------------------------

_SOURCE = f"{MODEL_OPTIMIZER}, graph_utils"


@slow(
    "TRT040",
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
    for node in view.of("Conv"):
        dequantizer, dims = view.weight_dequantizer(node), view.weight_dims(node)
        if dequantizer is None or len(dims) < 3:
            continue
        (made, read, *kernel), group = dims, node.number("group", 1)
        fp8 = view.numbers(dequantizer).elem_type == TensorProto.FLOAT8E4M3FN
        first = view.before_pair(node.inputs[0]) in view.model.inputs
        if ops.too_few_channels(dims, group=group, fp8=fp8, first=first):
            groups = f" in each of {group} groups" if group > 1 else ""
            sides = "x".join(map(str, kernel))
            yield node, f"has {read} channels in{groups} and {made} out, and a kernel of {sides}"
    for node in view.of("Gemm", "MatMul"):
        result, weight = view.model.shape(node.outputs[0]), view.model.shape(node.inputs[1])
        if not all(view.dequantizer(tensor) for tensor in node.inputs[:2]):
            continue
        if result is not None and ops.is_one_line(result):
            yield node, f"gives {'one row' if result[-2] == 1 else 'one column'} a product"
        elif weight is not None and ops.too_small_to_multiply(weight):
            yield node, f"multiplies by {weight[-2]} x {weight[-1]}"


@slow(
    "TRT055",
    "A transposed convolution is quantized to fp8",
    cure="leave it in float16, or quantize it to int8",
    source=f'{MODEL_OPTIMIZER}, fp8.py: "The quantizable op types for FP8 are limited to Conv, Gemm, Matmul, and '
    'Residual-Add"; whether a version of TensorRT has kernels is not known',
    unknown=NOT_KNOWN,
)
def fp8_transposed(view: View) -> Iterator[Hit]:
    """A ConvTranspose with an fp8 weight."""
    for node, dequantizer in view.quantized_weights("ConvTranspose"):
        if view.numbers(dequantizer).elem_type == TensorProto.FLOAT8E4M3FN:
            yield node, "has a weight of fp8"


@slow(
    "TRT041",
    "An fp8 convolution has a kernel that is too large",
    cure="leave it in float16: exclude it in patterns.nodes",
    source=f"{_SOURCE}: fp8 convolutions of kernel volume 32 and above",
)
def large_fp8_kernels(view: View) -> Iterator[Hit]:
    """A convolution with an fp8 weight and a large kernel, by the product of the kernel's sides."""
    return fp8_kernels(view, ops.LARGEST_FP8_KERNEL)


def fp8_kernels(view: View, largest: int) -> Iterator[Hit]:
    """Convolutions with an fp8 weight whose kernel has more elements."""
    for node, dequantizer in view.quantized_weights("Conv"):
        elements = prod(view.weight_dims(node)[2:])
        if view.numbers(dequantizer).elem_type == TensorProto.FLOAT8E4M3FN and elements > largest:
            yield node, f"has a kernel of {elements} elements"


_MATRIX = "NVIDIA TensorRT support matrix, hardware and precision"
_NEWEST = (99, 0)
_NAMES: dict[int, str] = {
    TensorProto.FLOAT8E4M3FN: "fp8",
    TensorProto.INT8: "int8",
    TensorProto.INT4: "int4",
    TensorProto.FLOAT4E2M1: "nvfp4",
}

# DQ of NVIDIA's own domain, written before ONNX had these types.
_OWN_PAIRS = {"TRT_INT4DequantizeLinear": "int4"}


@refused(
    "TRT020",
    "The GPU does not compute in this format",
    cure="choose a format that the GPU computes in",
    source=f"{_MATRIX}; TensorRT's own warning of FP4 on Hopper",
)
def not_on_this_gpu(view: View) -> Iterator[Hit]:
    """Formats in the model that are not listed for the given compute capability."""
    gpu = view.capability or (0, 0)
    return formats_but(view, [name for name in ops.FORMATS if not ops.why_not(name, gpu, _NEWEST)])


def formats_but(view: View, known: Collection[str]) -> Iterator[Hit]:
    """The formats of the model that are not among the known ones of the GPU, if there is a compute capability."""
    if view.capability is None:
        return
    gpu, computes = ops.dotted(view.capability), ", ".join(known) or "float"
    for fmt, count in pair_formats(view).items():
        if fmt not in known:
            yield None, f"{count} pairs are {fmt}; compute capability {gpu} computes in {computes}"


@note(
    "TRT021",
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


@note(
    "TRT022",
    "Some int8 kernels do not exist on GPUs this old",
    cure='where a build says "could not find any implementation", take that layer\'s pairs out',
    source='"Working with Quantized Types", Q/DQ layer-placement recommendations',
)
def old_gpu(view: View) -> Iterator[Hit]:
    """int8 on compute capability 7.5 or below."""
    if view.capability is not None and view.capability <= (7, 5) and "int8" in pair_formats(view):
        yield None, f"int8 on compute capability {ops.dotted(view.capability)}"


@note(
    "TRT056",
    "fp8 and int8 are in one network: kernels take one of the two, and each border is a conversion",
    cure="measure it beside int8 alone and fp8 alone",
    source="no document was found that states how TensorRT runs it; Model-Optimizer quantizes to one of the two",
    unknown=NOT_KNOWN,
)
def fp8_beside_int8(view: View) -> Iterator[Hit]:
    """Pairs of both formats anywhere in the model."""
    found = pair_formats(view)
    if "int8" in found and "fp8" in found:
        yield None, f"{found['int8']} pairs are int8, {found['fp8']} fp8"


def pair_formats(view: View) -> dict[str, int]:
    """The number of pairs of each format, by the name of its kind in this module; of a Q without a DQ too."""
    found = ((_NAMES.get(numbers.elem_type or 0), numbers.block) for _, numbers in view.heads)
    names = ("mxfp8" if block and name == "fp8" else name for name, block in found)
    own = (_OWN_PAIRS.get(node.op_type) for node in view.model.nodes if node.domain == DOMAIN)
    return Counter(name for name in (*names, *own) if name is not None)
