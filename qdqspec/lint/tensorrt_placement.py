"""Where Q/DQ pairs cost time in TensorRT. May import floors 0 to 2, numpy, onnx and this room.

Pairs are taken literally there: a Q or DQ that no kernel takes in is a kernel of its own, and what it separates
does not fuse. Sources are named by rule; recorded times come from public logs, none was measured by us.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from qdqspec.backends._trt_ops import ABSORBED
from qdqspec.graph.model import Node
from qdqspec.graph.ops import copies_values, is_nearest
from qdqspec.lint.rules import Hit, rule
from qdqspec.lint.view import View

_GUIDE = 'NVIDIA, "Working with Quantized Types", Q/DQ layer-placement recommendations'
_ISSUE = "github.com/NVIDIA/TensorRT issue"
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# With integers in they need integers out; pooling takes integers in alone, and the others run in float in any case.
_PAIRWISE = frozenset({"Add", "Div", "Mul", "Sub", "Max", "Min"})
_FLOAT_ONLY = frozenset({"Gelu", "LayerNormalization", "Softmax"})
_LEAST_CHANNELS = 16
_LARGEST_FP8_KERNEL = 32
_LAYOUT = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


@rule(
    "TRT030",
    "slow",
    "Only some inputs of a weighted operator are quantized",
    cure="quantize data and weight of it, or neither",
    source=_GUIDE,
)
def half_quantized(view: View) -> Iterator[Hit]:
    """A DQ on one of the first two inputs and none on the other; weights alone in blocks are meant so."""
    for node in view.operators:
        if node.op_type not in _WEIGHTED:
            continue
        made = view.inputs(node)
        blocked = any(dq is not None and view.numbers(dq).block for dq in made.values())
        if len(made) == 2 and None in made.values() and any(made.values()) and not blocked:
            missing = next(index for index, dq in made.items() if dq is None)
            yield Hit(node.name, f"reads '{node.inputs[missing]}' in float")


@rule(
    "TRT031",
    "slow",
    "A pair between a convolution and its residual Add keeps the two from one kernel",
    cure="quantize the skip side of the Add only",
    source=f"{_GUIDE}; {_ISSUE}s 1992 and 3270; recorded 0.883 to 0.546 ms with the pair on the skip side",
)
def pair_on_the_weighted_side(view: View) -> Iterator[Hit]:
    """An Add with pairs on both sides, one of which nobody else reads and that comes straight from a Conv."""
    for node in _residual_adds(view):
        if not all(view.dequantizer(tensor) for tensor in node.inputs):
            continue
        alone = [tensor for tensor in node.inputs if len(view.readers(tensor)) == 1]
        convs = [conv.name for tensor in alone if (conv := _weighted_source(view, tensor)) is not None]
        if convs:
            yield Hit(node.name, f"adds the result of '{convs[0]}' quantized")


@rule(
    "TRT032",
    "slow",
    "A residual Add of quantized convolutions gets its skip side in float",
    cure="put a pair on the skip side of the Add, so that the fused kernel can give integers",
    source=f"{_GUIDE}; {_ISSUE}s 1144 and 1992",
)
def float_skip(view: View) -> Iterator[Hit]:
    """An Add of two activations, one straight from a quantized Conv, none dequantized, quantized behind."""
    for node in _residual_adds(view):
        if any(view.dequantizer(tensor) for tensor in node.inputs):
            continue
        quantized = [
            source is not None and view.weight_dequantizer(source) is not None
            for source in (_weighted_source(view, tensor) for tensor in node.inputs)
        ]
        last = view.fused(node, ABSORBED)[-1]
        if any(quantized) and view.quantizers(last.outputs[0]):
            yield Hit(node.name, "adds two float tensors and is quantized behind")


def _residual_adds(view: View) -> Iterator[Node]:
    for node in view.operators:
        if node.op_type == "Add" and not any(view.is_constant(tensor) for tensor in node.inputs):
            yield node


def _weighted_source(view: View, tensor: str) -> Node | None:
    """The Conv whose result, maybe normalized, a tensor is, through a pair or not; what others read too is none."""
    dequantizer = view.dequantizer(tensor)
    if dequantizer is not None:
        quantizer = view.model.producer.get(dequantizer.inputs[0])
        tensor = quantizer.inputs[0] if quantizer is not None else tensor
    node = view.model.producer.get(tensor)
    while node is not None and node.op_type in ("BatchNormalization", "Identity"):
        node = view.model.producer.get(node.inputs[0])
    return node if node is not None and node.op_type in ("Conv", "ConvTranspose") else None


@rule(
    "TRT033",
    "slow",
    "A pair between Pad and Conv keeps the two from one kernel",
    cure="move the pair before the Pad",
    source=f"{_ISSUE} 2592 (28 to 21 ms)",
)
def pair_behind_pad(view: View) -> Iterator[Hit]:
    """A quantized Pad whose dequantized result a convolution reads."""
    for node in view.operators:
        if node.op_type != "Pad":
            continue
        behind = [dq for q in view.quantizers(node.outputs[0]) for dq in view.readers(q.outputs[0])]
        convs = [r.name for dq in behind for r in view.readers(dq.outputs[0]) if r.op_type == "Conv"]
        if convs:
            yield Hit(node.name, f"is quantized before '{convs[0]}'")


@rule(
    "TRT034",
    "slow",
    "The inputs of a Concat do not share one scale",
    cure="calibrate them together; qdqspec ties such ranges",
    source=f"{_ISSUE} 3861: requantization kernels appear",
)
def concat_scales(view: View) -> Iterator[Hit]:
    """A Concat with several DQ of different numbers, or with some inputs dequantized and some not."""
    for node in view.operators:
        if node.op_type != "Concat":
            continue
        made = [view.dequantizer(tensor) for tensor in node.inputs]
        known = [dq for dq in made if dq is not None]
        if known and len(known) < len(made):
            yield Hit(node.name, f"reads {len(known)} of {len(made)} inputs quantized")
        elif known and not all(view.numbers(known[0]).same_scale(view.numbers(dq)) for dq in known):
            yield Hit(node.name, f"reads {len(known)} inputs of different scales")


@rule(
    "TRT035",
    "slow",
    "The scales on both sides of an operator that moves values differ",
    cure="give both sides the same scale: the pairs pass through it then",
    source='"Working with Quantized Types": only equal scales commute',
)
def moved_scales(view: View) -> Iterator[Hit]:
    """MaxPool, nearest Resize or a copying operator between a DQ and a Q of different numbers."""
    for node in view.operators:
        if not (copies_values(node) or is_nearest(node) or node.op_type == "MaxPool"):
            continue
        before = view.dequantizer(node.inputs[0])
        for after in view.quantizers(node.outputs[0]) if before is not None else ():
            if before is not None and not view.numbers(before).same_scale(view.numbers(after)):
                yield Hit(node.name, f"stands between '{before.name}' and '{after.name}'")
                break


@rule(
    "TRT036",
    "slow",
    "A quantized convolution leads to a LayerNormalization in float",
    cure="put a pair on the data input of the LayerNormalization, so that the convolution gives integers",
    source="github.com/NVIDIA/Model-Optimizer pull request 1117 (ConvNeXt)",
)
def conv_to_layernorm(view: View) -> Iterator[Hit]:
    """A quantized Conv and a LayerNormalization with nothing but layout operators between, along data inputs."""
    for node in view.operators:
        if node.op_type != "LayerNormalization":
            continue
        maker = view.model.producer.get(node.inputs[0])
        while maker is not None and maker.op_type in _LAYOUT:
            maker = view.model.producer.get(maker.inputs[0])
        if maker is not None and maker.op_type == "Conv" and view.weight_dequantizer(maker) is not None:
            yield Hit(node.name, f"reads float from '{maker.name}'")


@rule(
    "TRT037",
    "slow",
    "An operator with quantized inputs gives float: its pairs are kernels of their own",
    cure="quantize its output too, or leave it in float",
    source=f"{_GUIDE}: non-weighted layers with int8 input need int8 output",
)
def float_result(view: View) -> Iterator[Hit]:
    """An elementwise operator that reads only dequantized activations, one for it alone, and no quantized result."""
    for node in view.operators:
        data = [tensor for tensor in node.inputs if not view.is_constant(tensor)]
        made = bool(data) and all(view.dequantizer(tensor) for tensor in data)
        own = any(len(view.readers(tensor)) == 1 for tensor in data)
        last = view.fused(node, ABSORBED)[-1]
        if node.op_type in _PAIRWISE and made and own and not view.quantizers(last.outputs[0]):
            yield Hit(node.name, "is not quantized behind")


@rule(
    "TRT038",
    "slow",
    "One tensor is quantized several times with different scales",
    cure="give it one pair, or equal scales",
    source='"Working with Quantized Types": only Q of equal scales are merged',
)
def several_scales(view: View) -> Iterator[Hit]:
    """Several Q of one tensor whose numbers differ."""
    for tensor in dict.fromkeys(node.inputs[0] for node in view.pairs if node.op_type == "QuantizeLinear"):
        quantizers = view.quantizers(tensor)
        first = view.numbers(quantizers[0])
        if not all(first.same_scale(view.numbers(other)) for other in quantizers[1:]):
            yield Hit(quantizers[0].name, f"and {len(quantizers) - 1} more quantize '{tensor}'")


@rule(
    "TRT039",
    "slow",
    "A pair right before the Transpose that leads to a MatMul",
    cure="move the pair behind the Transpose, next to the MatMul",
    source=f"{_ISSUE} 1604: int8 always slower than float16 on such models",
)
def transpose_before_matmul(view: View) -> Iterator[Hit]:
    """A DQ, a Transpose and a MatMul in a row, of an activation."""
    for node in view.operators:
        dequantizer = view.dequantizer(node.inputs[0]) if node.op_type == "Transpose" else None
        if dequantizer is None or view.stored_weight(dequantizer) is not None:
            continue
        products = [reader.name for reader in view.readers(node.outputs[0]) if reader.op_type == "MatMul"]
        if products:
            yield Hit(node.name, f"leads to '{products[0]}'")


@rule(
    "TRT040",
    "slow",
    "A quantized operator is too small for the integer kernels",
    cure="leave it in float: exclude it in patterns.nodes",
    source="github.com/NVIDIA/Model-Optimizer, graph_utils: kernels are missing or slower there",
)
def too_small(view: View) -> Iterator[Hit]:
    """Fewer than 16 channels in or out; not of a convolution in groups, or an int8 one of 8 and 16 or more."""
    for node in view.operators:
        dequantizer = view.weight_dequantizer(node)
        channels = view.channels(node) if dequantizer is not None else None
        if dequantizer is None or channels is None or node.attributes.get("group", 1) != 1:
            continue
        eight = view.numbers(dequantizer).elem_type == TensorProto.INT8 and node.op_type == "Conv"
        multiples = eight and all(c % 8 == 0 for c in channels) and max(channels) >= _LEAST_CHANNELS
        if min(channels) < _LEAST_CHANNELS and not multiples:
            yield Hit(node.name, f"has {channels[0]} channels in and {channels[1]} out")


@rule(
    "TRT041",
    "slow",
    "An fp8 convolution has a kernel that is too large",
    cure="leave it in float16: exclude it in patterns.nodes",
    source="github.com/NVIDIA/Model-Optimizer, graph_utils: fp8 convolutions of kernel volume 32 and above",
)
def large_fp8_kernels(view: View) -> Iterator[Hit]:
    """The product of the kernel's sides."""
    for node in view.operators:
        dequantizer = view.weight_dequantizer(node) if node.op_type == "Conv" else None
        if dequantizer is None or view.numbers(dequantizer).elem_type != TensorProto.FLOAT8E4M3FN:
            continue
        volume = 1
        for side in view.model.constants[view.stored_weight(dequantizer) or ""].dims[2:]:
            volume *= side
        if volume >= _LARGEST_FP8_KERNEL:
            yield Hit(node.name, f"has a kernel of {volume} elements")


@rule(
    "TRT042",
    "slow",
    "What is not quantized runs in float32: TensorRT takes the model's types as they are",
    cure="convert the model to float16 before it is quantized, and compare with a float16 model",
    source="NVIDIA, migration from 10.x to 11.x; github.com/NVIDIA/Model-Optimizer issues 80 and 167 (131 ms for 66)",
)
def float32_between(view: View) -> Iterator[Hit]:
    """A model with pairs whose DQ give float32. Said once."""
    floats = [n for n in view.dequantizers if view.model.elem_type(n.outputs[0]) == TensorProto.FLOAT]
    if floats:
        yield Hit("", f"{len(floats)} of {len(view.dequantizers)} dequantized tensors are float32")


@rule(
    "TRT043",
    "note",
    "An attention is quantized in part: it may fall out of the fused kernel",
    cure="quantize Q, K, V and the Softmax behind, or none of them",
    source="inferred from the patterns that Model-Optimizer and Myelin's logs show; not confirmed by a document",
)
def partial_attention(view: View) -> Iterator[Hit]:
    """A Softmax whose two MatMuls do not have all four inputs quantized, but some."""
    for node in view.operators:
        after = list(view.readers(node.outputs[0])) if node.op_type == "Softmax" else []
        after = [r for reader in after for r in _through_pair(view, reader) if r.op_type == "MatMul"]
        before = _product_before(view, node.inputs[0]) if after else None
        if before is None:
            continue
        made = [view.dequantizer(tensor) for product in (before, after[0]) for tensor in product.inputs]
        if any(made) and not all(made):
            count = sum(dq is not None for dq in made)
            yield Hit(
                node.name, f"{count} of 4 inputs of '{before.name}' and '{after[0].name}' are quantized"
            )


def _through_pair(view: View, node: Node) -> tuple[Node, ...]:
    if node.op_type != "QuantizeLinear":
        return (node,)
    return tuple(r for dq in view.readers(node.outputs[0]) for r in view.readers(dq.outputs[0]))


def _product_before(view: View, tensor: str) -> Node | None:
    """The MatMul that a Softmax's input comes from, through scaling and masks."""
    node = view.model.producer.get(tensor)
    for _ in range(4):
        if node is None or node.op_type == "MatMul":
            return node
        if node.op_type not in ("Add", "Div", "Mul", "DequantizeLinear", "QuantizeLinear", "Where"):
            return None
        data = next((t for t in node.inputs if not view.is_constant(t) and t in view.model.producer), "")
        node = view.model.producer.get(data)
    return None


@rule(
    "TRT044",
    "note",
    "An operator that runs in float in any case reads a dequantized tensor",
    cure="nothing, where the pair before it serves others too; else leave it out",
    source="recorded engines: LayerNormalization, Softmax and GELU run inside float kernels",
)
def float_only(view: View) -> Iterator[Hit]:
    """LayerNormalization, Softmax or Gelu behind a DQ that no one else reads, and that is no convolution's (TRT036)."""
    for node in view.operators:
        dequantizer = view.dequantizer(node.inputs[0]) if node.op_type in _FLOAT_ONLY else None
        if dequantizer is None or len(view.readers(dequantizer.outputs[0])) > 1:
            continue
        quantizer = view.model.producer.get(dequantizer.inputs[0])
        maker = view.model.producer.get(quantizer.inputs[0]) if quantizer is not None else None
        while maker is not None and maker.op_type in _LAYOUT:
            maker = view.model.producer.get(maker.inputs[0])
        if maker is None or maker.op_type != "Conv":
            yield Hit(node.name, f"is a {node.op_type}")


@rule(
    "TRT045",
    "note",
    "Weights have one scale a tensor",
    cure="quantize weights per channel: it costs no time and loses less",
    source=_GUIDE,
)
def one_scale_a_weight(view: View) -> Iterator[Hit]:
    """A weight of several channels with a single scale, without blocks."""
    for node in view.operators:
        dequantizer = view.weight_dequantizer(node)
        if dequantizer is None:
            continue
        numbers, channels = view.numbers(dequantizer), view.channels(node)
        several = channels is not None and channels[1] > 1
        if several and numbers.scale is not None and numbers.scale.size == 1 and not numbers.block:
            yield Hit(node.name, f"has one scale for {channels[1] if channels else 0} channels")
