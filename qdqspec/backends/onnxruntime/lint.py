"""Lint rules for ONNX Runtime's CPU provider, ids ``ORT001`` and so on; importing the module registers them.

First numbers that it rejects, or computes wrongly or slowly, then pairs that cost time because they do not become
integer kernels. All rules were measured with ONNX Runtime 1.31.1, those on numbers with 1.32.0 too, on x86-64, and are
verified against the installed version in ``tests/unit/lint/test_onnxruntime.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from onnx import TensorProto
from packaging.version import Version

from qdqspec.backends.onnxruntime.ops import ABSORBED, BLOCK_SIZES, BLOCKED_AXES, LABELS, MOVED_PAST, MOVING
from qdqspec.graph import Node
from qdqspec.graph.ops import is_constant_node
from qdqspec.qdq import with_pairs
from qdqspec.qdq.lint import (
    LAYOUT,
    Hit,
    View,
    formats_newer_than_opset,
    interpolates,
    severities,
    type_name,
    unequal_scales,
)

TARGETS = ("onnxruntime-cpu",)
_MEASURED = "measured, ONNX Runtime 1.31.1 and 1.32.0"
_MEASURED_BEFORE = "measured, ONNX Runtime 1.31.1"
_LEAVES_MISFITS = "1.32"  # from this version on, pairs that integer kernels do not support are not fused
_SCALAR_ONLY = frozenset({"Add", "AveragePool", "Mul"})
_LARGEST_OF_SEVEN_BITS = 64
_INTEGER_PRODUCTS = frozenset({"QGemm", "QLinearConv", "QLinearMatMul"})  # data and weight are inputs 0 and 3
_NO_KERNEL = frozenset({TensorProto.FLOAT4E2M1, TensorProto.INT2, TensorProto.UINT2})
_BLOCKED = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8})
_FP8 = frozenset(
    {TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ}
)

refused, slow, note = severities(*TARGETS)


@refused(
    "ORT001",
    "The scale of a bias is not input scale times weight scale: results are silently wrong",
    cure="quantize the bias with the product of the two scales, or leave it in float",
    source=f"{_MEASURED}: Gemm takes the integers of the bias as they are",
)
def bias_scales(view: View) -> Iterator[Hit]:
    """An int32 bias of a Gemm whose scales differ from the product of the other two by more than rounding."""
    return _odd_biases(view, "Gemm", 1e-3)


def _odd_biases(view: View, op_type: str, tolerance: float) -> Iterator[Hit]:
    for node in view.of(op_type):
        if len(node.inputs) < 3:
            continue
        data, weight, bias = (_pair_of(view, tensor) for tensor in node.inputs)
        if data is None or weight is None or bias is None:
            continue
        one, other, found = (view.numbers(dq).scale for dq in (data, weight, bias))
        if one is None or other is None or found is None or view.numbers(bias).elem_type != TensorProto.INT32:
            continue
        if 0 in (one.size, other.size, found.size):
            continue  # nothing to compare
        if len({one.size, other.size, found.size} - {1}) > 1:
            yield node, f"has {found.size} scales of a bias for {one.size} and {other.size} of the others"
            continue
        wanted = one.reshape(-1) * other.reshape(-1)
        if not np.allclose(found.reshape(-1), wanted, rtol=tolerance, atol=0):
            least, odd = wanted.max(), "a scale where the product is 0"
            yield node, f"has a bias with {f'{found.max() / least:.3g} times that scale' if least else odd}"


@refused(
    "ORT002",
    "A MatMul has per-channel weights that are not flat with the channels last: it fails when it runs",
    cure="quantize this weight with one scale, or reshape it to two dimensions",
    source=_MEASURED,
)
def matmul_channels(view: View) -> Iterator[Hit]:
    """Several scales, without blocks, on a weight of another rank than 2 or along another axis than the last.

    From 1.32 on, a MatMul whose result is quantized runs in float instead (ORT014).
    """
    leaves = not view.versions or view.versions[0] >= Version(_LEAVES_MISFITS)
    return _odd_channels(view, lambda node: not (leaves and view.only_quantized(node.outputs[0])))


def _odd_channels(view: View, applies: Callable[[Node], bool]) -> Iterator[Hit]:
    for node, dequantizer in view.quantized_weights("MatMul"):
        numbers, rank = view.numbers(dequantizer), len(view.weight_dims(node))
        odd = numbers.channel_scales and (rank != 2 or numbers.axis % rank != 1)
        if odd and view.dequantizer(node.inputs[0]) is not None and applies(node):
            yield node, f"has a weight of {rank} dimensions with scales along axis {numbers.axis}"


@refused(
    "ORT004",
    "A scale or zero point has one dimension where the integer kernel takes a scalar",
    cure="give it shape []; qdqspec writes scalars",
    until=_LEAVES_MISFITS,
    source=f'{_MEASURED_BEFORE}: "Scale and Zero-point must be a scalar"',
)
def scalars(view: View) -> Iterator[Hit]:
    """A pair of shape [1] around an Add, Mul or AveragePool that becomes one of ONNX Runtime's integer kernels."""
    for node in view.of(*_SCALAR_ONLY):
        if not view.only_quantized(node.outputs[0]):
            continue
        made = [view.dequantizer(tensor) for tensor in node.inputs]
        around = [*(dq for dq in made if dq is not None), *view.quantizers(node.outputs[0])]
        scales = ((pair.name, view.numbers(pair).scale) for pair in around)
        flat = [name for name, scale in scales if scale is not None and scale.shape == (1,)]
        if all(made) and flat:
            yield node, f"reads or feeds '{flat[0]}'"


@refused(
    "ORT005",
    "There is no kernel for this format",
    cure="choose int8 or uint8, or int4 and uint4 for weights alone",
    source=f'{_MEASURED}: "Could not find an implementation for DequantizeLinear"',
)
def no_kernel(view: View) -> Iterator[Hit]:
    """2-bit and 4-bit floats, scales that are powers of two (E8M0), and bfloat16 around a pair."""
    for node, numbers in view.plain_pairs:
        scale = view.model.elem_type(node.inputs[1])
        if numbers.elem_type in _NO_KERNEL:
            yield node, f"holds {type_name(numbers.elem_type)}"
        elif scale in (TensorProto.FLOAT8E8M0, TensorProto.BFLOAT16):
            yield node, f"has a scale of {type_name(scale)}"


@refused(
    "ORT006",
    "8-bit floats around an operator that has an integer kernel: the optimized graph is invalid",
    cure="choose int8 or uint8",
    until=_LEAVES_MISFITS,
    source=f"{_MEASURED_BEFORE}: ONNX Runtime inserts its integer kernel without checking the type",
)
def eight_bit_floats(view: View) -> Iterator[Hit]:
    """An operator with an integer kernel that reads only such tensors, and whose result is quantized if required."""
    for node in view.operators:
        made = list(view.inputs(node).values())
        floats = [dq for dq in made if dq is not None and view.numbers(dq).elem_type in _FP8]
        offered = LABELS.get(node.op_type, ())
        if not floats or len(floats) < len(made) or any(view.numbers(dq).block for dq in floats):
            continue
        alone = "in-only" in offered or node.op_type in MOVED_PAST - {"Slice"}
        if alone or (offered and view.quantizers(node.outputs[0])):
            yield node, f"is a {node.op_type}"


@slow(
    "ORT014",
    "A pair does not fit the integer kernel of its operator, which runs in float",
    since=_LEAVES_MISFITS,
    cure="choose int8 or uint8, scalars of shape [] around Add, Mul and AveragePool, and for the weight of a MatMul "
    "one scale or two dimensions with the channels last",
    source="measured, ONNX Runtime 1.32.0; versions before it refuse such models (ORT002, ORT004, ORT006)",
)
def misfits(view: View) -> Iterator[Hit]:
    """Pairs that earlier versions fuse into an integer kernel that does not support them."""
    yield from scalars(view)
    yield from eight_bit_floats(view)
    yield from _odd_channels(view, lambda node: view.only_quantized(node.outputs[0]))


@refused(
    "ORT007",
    "An operator of TensorRT's own domain: no such operator is registered",
    cure="export with opset 19 (fp8) or 21 (int4), where ONNX's own QuantizeLinear and DequantizeLinear take them; "
    "nvfp4 and mxfp8 are for TensorRT",
    source=f'{_MEASURED}: "trt:TRT_FP8QuantizeLinear(-1) is not a registered function/op"',
)
def operators_of_tensorrt(view: View) -> Iterator[Hit]:
    """TRT_FP8QuantizeLinear, TRT_INT4DequantizeLinear and similar, unless the model defines them itself."""
    defined = {(function.domain, function.name) for function in view.model.proto.functions}
    for node in view.model.nodes:
        if node.domain == "trt" and (node.domain, node.op_type) not in defined:
            yield node, f"is a {node.op_type}"


refused(
    "ORT008",
    "The model's opset is older than the number format",
    cure="raise the opset: fp8 came with 19, 16 and 4 bits with 21",
    source=f"{_MEASURED}: \"Type 'tensor(float8e4m3fn)' of input parameter ... is invalid\"",
)(formats_newer_than_opset)


@slow(
    "ORT010",
    "Activations are signed: on x86-64 convolutions of tensors with several readers stay in float then",
    cure="quantize activations to uint8, with any zero point",
    source=f"{_MEASURED}: ResNet-18 float 26.6 ms, uint8 10.1, int8 26.1; it rewrites int8 to uint8 in part, and types "
    "that differ do not fuse",
)
def signed_activations(view: View) -> Iterator[Hit]:
    """Each activation that is quantized to int8."""
    for node, numbers in view.pairs:
        quantizes = node.op_type == "QuantizeLinear" and node.inputs[0] not in view.model.constants
        if quantizes and numbers.elem_type == TensorProto.INT8:
            yield node, f"quantizes '{node.inputs[0]}'"


@slow(
    "ORT011",
    "16-bit pairs do not fuse",
    cure="choose 8 bits",
    source=f"{_MEASURED}; github.com/microsoft/onnxruntime issue 17015",
)
def sixteen_bits(view: View) -> Iterator[Hit]:
    """int16 and uint16."""
    for node, numbers in view.dequantizers:
        if numbers.elem_type in (TensorProto.INT16, TensorProto.UINT16):
            yield node, f"holds {type_name(numbers.elem_type)}"


@slow(
    "ORT012",
    "A weight in blocks is dequantized in every run",
    cure="let blocks of 16, 32, 64, 128 or 256 run along the first axis of a MatMul's weight, of int4, uint4 or int8",
    source=f"{_MEASURED}: only then it becomes a MatMulNBits; int8 with 1.32.0",
)
def unfused_blocks(view: View) -> Iterator[Hit]:
    """A weight in blocks, except 4-bit and int8 ones of a MatMul or of a Gemm that is not transposed."""
    for dequantizer, numbers in view.dequantizers:
        if not numbers.block or view.stored_weight(dequantizer) is None:
            continue
        known = numbers.block in BLOCK_SIZES and numbers.elem_type in _BLOCKED
        if not known or not all(
            numbers.axis in BLOCKED_AXES.get(node.op_type, ()) and not node.attributes.get("transB", 0)
            for node in view.readers(dequantizer.outputs[0])
        ):
            held = f"{numbers.block} {type_name(numbers.elem_type)}"
            yield dequantizer, f"holds blocks of {held} along axis {numbers.axis}"


@note(
    "ORT013",
    "On processors without VNNI the products of uint8 and int8 may saturate",
    cure="use 7 bits for weights there (reduce range); `qdqspec tune` on such a processor uses more where no sum of "
    "two products overflows on calibration data, which lint does not see; `qdqspec doctor` states which path a "
    "processor has",
    source="ONNX Runtime, quantization documentation: U8S8 on AVX2 and AVX512",
)
def saturation(view: View) -> Iterator[Hit]:
    """int8 weights above 7 bits with unsigned data, also behind operators that change the layout. Reported once."""
    model = with_pairs(view.model)
    pairs = view if model is view.model else View(model, view.target, view.capability)
    wide = sum(
        np.abs(model.array(weight).astype(np.int16)).max(initial=0) > _LARGEST_OF_SEVEN_BITS
        for weight in _weights_of_unsigned_data(pairs)
        if model.constants[weight].data_type == TensorProto.INT8
    )
    if wide:
        yield None, f"{wide} operators multiply uint8 data by int8 weights of 8 bits"


def _weights_of_unsigned_data(view: View) -> Iterator[str]:
    """The stored integers that each operator multiplies by uint8 data, behind DQ or as its own input."""
    for node in view.of("Conv", "ConvTranspose", "Gemm", "MatMul"):
        data, weight = (view.dequantizer(tensor, LAYOUT) for tensor in node.inputs[:2])
        if data is None or weight is None:
            continue
        if view.numbers(data).elem_type == TensorProto.UINT8:
            yield from _stored(view, weight.inputs[0])
    for node in view.model.nodes:
        if node.op_type in _INTEGER_PRODUCTS:
            zero_point = view.model.constants.get(node.input_at(2))
            known = view.model.elem_type(node.inputs[0]) if zero_point is None else zero_point.data_type
            if known == TensorProto.UINT8:
                yield from _stored(view, node.inputs[3])


def _stored(view: View, tensor: str) -> Iterator[str]:
    """The constant that a tensor is, also behind operators that change the layout; nothing if it is computed."""
    while tensor not in view.model.constants:
        maker = view.model.producer.get(tensor)
        if maker is None or maker.op_type not in LAYOUT:
            return
        tensor = maker.inputs[0]
    yield tensor


@slow(
    "ORT015",
    "A product in integers is not fused with its conversion to float",
    cure="let one Cast and one Mul follow each MatMulInteger, with a product of scales that no other one reads",
    source="measured, ONNX Runtime 1.32.0: MatMulInteger, Cast and Mul stay three kernels",
)
def unfused_products(view: View) -> Iterator[Hit]:
    """A MatMulInteger that is followed by other nodes than Cast and Mul, or shares its product of scales."""
    ends: dict[frozenset[str], list[Node]] = {}
    for node in view.of("MatMulInteger"):
        cast = _sole_reader(view, node, "Cast")
        scaled = None if cast is None else _sole_reader(view, cast, "Mul")
        if cast is None or scaled is None:
            yield node, "is not followed by a Cast and a Mul alone"
            continue
        scales = next((name for name in scaled.inputs if name != cast.outputs[0]), "")
        maker = view.model.producer.get(scales)
        ends.setdefault(frozenset((scales,) if maker is None else maker.inputs), []).append(node)
    for nodes in ends.values():
        if len(nodes) > 1:
            names = ", ".join(f"'{node.name}'" for node in nodes[1:3])
            yield nodes[0], f"shares its product of scales with {len(nodes) - 1} more: {names}"


@slow(
    "ORT016",
    "A convolution in integers is not fused with its conversion to float, its bias and its activation",
    cure="quantize with ranges found before: qdqspec strip, then tune the float model",
    source="measured, ONNX Runtime 1.32.0: ConvInteger, Cast, Mul, Add and Relu stay separate kernels",
)
def integer_convolutions(view: View) -> Iterator[Hit]:
    """Each ConvInteger, as `quantize_dynamic` writes them."""
    for node in view.of("ConvInteger"):
        yield node, "gives the integers of its sums"


@note(
    "ORT017",
    "A float weight is between pairs: ONNX Runtime quantizes it itself, with one scale for all channels",
    cure="quantize it with a scale for each channel, or leave the data or the result in float",
    source="measured, ONNX Runtime 1.32.0; github.com/microsoft/onnxruntime pull requests 22969 and 24537",
)
def float_weights(view: View) -> Iterator[Hit]:
    """A constant float32 weight of an operator that reads a dequantized tensor, and whose only reader is a Q."""
    held = view.model.constants
    for node in view.of("Conv", "ConvTranspose", "Gemm"):
        weight, bias = node.inputs[1], node.input_at(2)
        dequantizer = view.dequantizer(node.inputs[0])
        if dequantizer is None or weight not in held or held[weight].data_type != TensorProto.FLOAT:
            continue
        scale = view.numbers(dequantizer).scale
        is_scalar = scale is None or scale.size == 1
        result = view.fused(node, ("Clip", "Relu"))[-1].outputs[0]
        if is_scalar and (not bias or bias in held) and view.only_quantized(result):
            yield node, f"reads '{weight}' in float"


def _sole_reader(view: View, node: Node, op_type: str) -> Node | None:
    """The one node that reads the output, where it is of that type and the output is not one of the graph."""
    ends = view.model.ends(node.outputs[0])
    reader = None if len(ends) != 1 or ends[0].is_output else view.model.by_name[ends[0].node]
    return reader if reader is not None and reader.op_type == op_type else None


# ---- pairs that do not become integer kernels ---------------------------------------------------

_MAX_POOL_SINCE = 12
_TURNED = frozenset({"Identity", "Transpose"})  # the DQ of a constant before them is moved behind them
_RESHAPING = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_LINEAR = frozenset({"Conv", "Gemm", "MatMul"})


@slow(
    "ORT020",
    "A convolution reads quantized data and gives float: it runs in float, and dequantizes its weight in every run",
    cure="quantize the next operator too, or leave it in float",
    source=f"{_MEASURED_BEFORE}: Conv has a kernel for integers in and out only",
)
def float_convolutions(view: View) -> Iterator[Hit]:
    """A Conv with both inputs dequantized, whose result has a float reader."""
    for node in view.of("Conv"):
        made = view.inputs(node)
        if len(made) == 2 and all(made.values()) and (why := _float_reader(view, node)):
            yield node, why


@slow(
    "ORT021",
    "An operator reads quantized tensors and gives float: it runs in float",
    cure="quantize the next operator too, or leave it in float",
    source=f"{_MEASURED_BEFORE}: only MatMul and Gemm have a kernel for integers in and float out",
)
def float_results(view: View) -> Iterator[Hit]:
    """Any other operator with an integer kernel, whose inputs were quantized for it alone and whose result is float."""
    for node in view.operators:
        offered = LABELS.get(node.op_type, ())
        if node.op_type == "Conv" or "in-only" in offered or not offered or not _reads_integers(view, node):
            continue
        made = view.inputs(node).values()
        own = any(len(view.readers(dq.outputs[0])) == 1 for dq in made if dq is not None)
        # A DQ before an operator that moves values is moved behind it at no cost.
        free = node.op_type in MOVING and not view.quantizers(node.outputs[0])
        if own and not free and (why := _float_reader(view, node)):
            yield node, why


@slow(
    "ORT022",
    "An operator without an integer kernel is between pairs: each of them runs",
    cure="leave it in float, together with its neighbours where they are small",
    source=f"{_MEASURED_BEFORE}: ConvTranspose, Pad, ReduceMean, LayerNormalization, Sub, Div, Tanh, Gelu and others",
)
def no_integer_kernel(view: View) -> Iterator[Hit]:
    """An operator without an integer kernel between a dequantized activation and a quantized result."""
    for node in view.operators:
        fits = node.op_type in LABELS and not interpolates(node)
        made = [dq for dq in view.inputs(node).values() if dq is not None and view.stored_weight(dq) is None]
        if fits or node.op_type in ABSORBED or not made:
            continue
        if any(view.quantizers(output) for output in node.outputs):
            yield node, f"is a {node.op_type}"


@slow(
    "ORT023",
    "A weight is dequantized in every run",
    cure="keep the weight in float where its operator runs in float",
    source=f"{_MEASURED_BEFORE}: a DequantizeLinear of a constant is not folded; with 1.32.0 an 8-bit weight of two "
    "dimensions becomes a MatMulNBits",
)
def unfused_weights(view: View) -> Iterator[Hit]:
    """A stored weight without an integer kernel: of an unsupported operator, or with float data."""
    for dequantizer, numbers in view.dequantizers:
        if view.stored_weight(dequantizer) is None or numbers.block or numbers.elem_type == TensorProto.INT32:
            continue
        for tensor, node in _final_readers(view, dequantizer.outputs[0]):
            is_multiplied = node.op_type in _LINEAR and tensor in node.inputs[:2]
            why = ""
            if _is_block_product(view, dequantizer, node, tensor):
                continue
            if node.op_type not in LABELS:
                why = f"is a {node.op_type}"
            elif is_multiplied:
                data = node.inputs[0] if tensor == node.inputs[1] else node.inputs[1]
                if _pair_of(view, data) is None and data not in view.model.constants:
                    why = f"reads '{data}' in float"
            elif node.op_type in _RESHAPING and not view.quantizers(node.outputs[0]):
                readers, result = view.readers(node.outputs[0]), node.outputs[0]
                if any(each.op_type in _LINEAR and result in each.inputs[1:2] for each in readers):
                    why = f"is a {node.op_type} between the weight and its operator"
            if why:
                yield dequantizer, f"'{node.name}' {why}"
                break


@slow(
    "ORT018",
    "The scale of a convolution's bias is not input scale times weight scale: it runs in float",
    cure="give each convolution its own bias, with the product of its two scales, or leave the bias in float",
    source="measured, ONNX Runtime 1.32.0: not fused from a difference of 2 % on; "
    "github.com/microsoft/onnxruntime-qnn issue 739",
    since=_LEAVES_MISFITS,
)
def convolution_bias_scales(view: View) -> Iterator[Hit]:
    """An int32 bias of a Conv, often shared by several, whose scales differ from the product of the other two."""
    return _odd_biases(view, "Conv", 0.015)


@slow(
    "ORT031",
    "The bias of a quantized operator has a form that no integer kernel takes: the operator runs in float",
    cure="leave the bias in float as a constant, or store it as int32 directly behind a DequantizeLinear, with input "
    "scale times weight scale",
    source="measured, ONNX Runtime 1.32.0: an int8 bias, and a bias behind a Reshape",
    since=_LEAVES_MISFITS,
)
def unfit_biases(view: View) -> Iterator[Hit]:
    """A Conv with a quantized result, or a Gemm, whose bias is no float constant and no int32 behind a DQ."""
    for node in view.of("Conv", "Gemm"):
        tensor = node.input_at(2)
        if not tensor or any(_pair_of(view, source) is None for source in node.inputs[:2]):
            continue
        if node.op_type == "Conv" and not view.quantizers(node.outputs[0]):
            continue  # it runs in float in any case
        dequantizer, maker = _pair_of(view, tensor), view.maker(tensor, {"Identity"})
        if dequantizer is None and maker is not None and not is_constant_node(maker):
            yield node, f"has a bias that is the result of {maker.op_type} '{maker.name}'"
        elif dequantizer is not None and view.numbers(dequantizer).elem_type != TensorProto.INT32:
            yield node, f"has a bias in {type_name(view.numbers(dequantizer).elem_type)}"


@slow(
    "ORT024",
    "A Gemm that gives float has a float bias: its weight is dequantized in every run",
    cure="store the bias as int32 behind a DequantizeLinear, with input scale times weight scale",
    source=f"{_MEASURED_BEFORE}; a MatMul with an Add of a constant becomes such a Gemm",
)
def float_biases(view: View) -> Iterator[Hit]:
    """A quantized Gemm with a float bias, or MatMul whose only reader adds a flat float constant; a float result."""
    for node in view.of("Gemm", "MatMul"):
        owner = node
        if node.op_type == "MatMul":  # with an Add that is its only reader it becomes a Gemm
            readers = view.readers(node.outputs[0])
            if len(readers) != 1 or view.is_seen(node.outputs[0]) or readers[0].op_type != "Add":
                continue
            owner = readers[0]
        if not _reads_integers(view, node):
            continue
        held = view.model.constants
        constants = [t for t in owner.inputs if t in held and len(held[t].dims) == 1]
        if constants and _float_reader(view, owner):
            yield node, f"adds '{constants[0]}'"


@slow(
    "ORT025",
    "An operator reads quantized and float tensors: it runs in float",
    cure="quantize the other operand too, constants as well",
    source=f"{_MEASURED_BEFORE}: float constants of Add and Mul stop the fusion",
)
def mixed_operands(view: View) -> Iterator[Hit]:
    """Add, Mul, Concat or Where with a quantized result and some data inputs in float."""
    for node in view.of("Add", "Concat", "Mul", "Where"):
        made = view.inputs(node)
        floats = [index for index, dq in made.items() if dq is None]
        if floats and len(floats) < len(made) and view.quantizers(node.outputs[0]):
            tensor = node.inputs[floats[0]]
            kind = "constant" if tensor in view.model.constants else "tensor"
            yield node, f"reads float {kind} '{tensor}'"


@slow(
    "ORT026",
    "The scales on both sides of an operator that moves values differ: it runs in float",
    cure="give both sides the same scale and zero point",
    source=_MEASURED_BEFORE,
)
def moved_scales(view: View) -> Iterator[Hit]:
    """MaxPool, Transpose and similar between a DQ and a Q with different numbers."""
    return unequal_scales(view, lambda node: node.op_type in MOVING and not interpolates(node))


@slow(
    "ORT028",
    "A quantized MaxPool of an opset below 12 runs in float",
    cure="export with opset 12 or above, or leave it in float",
    source=_MEASURED_BEFORE,
)
def old_max_pool(view: View) -> Iterator[Hit]:
    """A MaxPool between pairs in a model of an older opset, whose MaxPool does not support 8-bit integers."""
    for node in view.of("MaxPool") if view.model.opset < _MAX_POOL_SINCE else ():
        if view.dequantizer(node.inputs[0]) and view.quantizers(node.outputs[0]):
            yield node, f"is of opset {view.model.opset}"


@slow(
    "ORT027",
    "A Relu stays between its pairs: the zero point behind it is not the lowest value",
    cure="quantize to uint8 with zero point 0, so that quantizing does the cutting off",
    source=_MEASURED_BEFORE,
)
def staying_relu(view: View) -> Iterator[Hit]:
    """A Relu that reads a dequantized tensor and is followed by a Q with a zero point above the lowest value."""
    for node in view.of("Relu"):
        behind = view.quantizers(node.outputs[0])
        if behind and view.dequantizer(node.inputs[0]) and not _folds_into_quantizer(view, node, behind[0]):
            yield node, f"is before '{behind[0].name}'"


@slow(
    "ORT029",
    "A pair of float16 tensors: no integer kernel takes it, and each Q and DQ runs between casts to float32",
    cure="remove the pairs with `qdqspec strip`, and tune the float16 model: pairs are inserted into a copy in float32",
    source="measured, ONNX Runtime 1.32.0, opset 19 and 21; only Concat fuses, into an invalid graph",
)
def float16_pairs(view: View) -> Iterator[Hit]:
    """Each pair whose scale is float16."""
    for node, _ in view.heads:
        if view.model.elem_type(node.input_at(1)) == TensorProto.FLOAT16:
            yield node, "has a float16 scale"


@note(
    "ORT030",
    "The model computes in float16: no integer kernel takes pairs of float16 tensors",
    cure="tune it with qdqspec, which inserts pairs into a copy in float32, or convert it to float32",
    source="measured, ONNX Runtime 1.32.0: on x86-64 all is computed in float32, with casts",
)
def computes_in_half(view: View) -> Iterator[Hit]:
    """Operators that read or make float16 tensors. Reported once."""
    if view.model.float16_nodes:
        yield None, "operators read or make float16 tensors"


def _float_reader(view: View, node: Node) -> str:
    """The float reader of the result of an operator and of the nodes fused into it; empty if there is none."""
    chain = view.fused(node, ABSORBED | _passed(view))
    result = chain[-1].outputs[0]
    readers, quantizers = view.readers(result), view.quantizers(result)
    stays = [each for each in chain if quantizers and not _folds_into_quantizer(view, each, quantizers[0])]
    if stays:
        return f"'{stays[0].name}' stays: the zero point behind it is not the lowest value"
    if result in view.model.outputs:
        return f"'{result}' is an output of the model"
    if result in view.model.captured:
        return f"a body of If, Loop or Scan reads '{result}'"
    other = next((reader for reader in readers if reader not in quantizers), None)
    beside = "also " if quantizers else ""
    return "" if other is None else f"{other.op_type} '{other.name}' {beside}reads it in float"


def _folds_into_quantizer(view: View, node: Node, quantizer: Node) -> bool:
    """Whether an operator, if it is a Relu, is folded into the Q after it. A Clip's bounds are not judged."""
    numbers = view.numbers(quantizer)
    limits, zero_point = numbers.limits, numbers.zero_point
    if node.op_type != "Relu" or zero_point is None or limits is None:
        return True
    return not np.any(zero_point != limits[0])


def _reads_integers(view: View, node: Node) -> bool:
    made = view.inputs(node)
    return bool(made) and all(dq is not None for dq in made.values())


def _passed(view: View) -> frozenset[str]:
    """The operators that copy values and that a Q or DQ is moved past."""
    return MOVED_PAST if view.model.opset >= _MAX_POOL_SINCE else MOVED_PAST - {"MaxPool"}


def _pair_of(view: View, tensor: str) -> Node | None:
    """The DQ whose integers an integer kernel reads: it is moved behind operators that copy values.

    That of a constant is moved behind a Transpose, and behind no other of them.
    """
    found = view.dequantizer(tensor, _passed(view) | {"Identity"})
    if found is None:
        return None
    is_weight = view.stored_weight(found) is not None
    return None if is_weight and view.maker(tensor, _TURNED) is not found else found


def _final_readers(view: View, tensor: str) -> Iterator[tuple[str, Node]]:
    """The readers of a constant, through a Transpose too, each with the tensor that it reads."""
    for node in view.readers(tensor):
        if node.op_type in _TURNED and not view.quantizers(node.outputs[0]):
            yield from _final_readers(view, node.outputs[0])
        else:
            yield tensor, node


def _is_block_product(view: View, dequantizer: Node, node: Node, tensor: str) -> bool:
    """Whether a product of float data and an 8-bit weight becomes a MatMulNBits, which reads integers."""
    if node.op_type not in ("Gemm", "MatMul") or tensor != node.input_at(1):
        return False
    numbers, weight, bias = view.numbers(dequantizer), dequantizer.outputs[0], node.input_at(2)
    rank = len(view.model.shape(weight) or ())
    is_turned = any(reader.op_type == "Transpose" for reader in view.readers(weight))
    has_plain_bias = not bias or (bias in view.model.constants and len(view.model.constants[bias].dims) == 1)
    return (
        numbers.elem_type in (TensorProto.INT8, TensorProto.UINT8)
        and rank == 2
        and numbers.scale is not None
        and (numbers.scale.size == 1 or (numbers.axis in (-1, 1) and not is_turned))
        and len(view.readers(weight)) == 1
        and not view.is_seen(weight)
        and has_plain_bias
        and not (node.attributes.get("transA", 0) or node.attributes.get("transB", 0))
        and node.attributes.get("alpha", 1) == node.attributes.get("beta", 1) == 1
    )
