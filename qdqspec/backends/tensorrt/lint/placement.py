"""Rules for pairs that cost time in TensorRT: they do not fuse, or prevent the fusion of other operators.

In TensorRT a Q or DQ that does not fuse is a kernel of its own. Each rule names its source; recorded times are from
public logs, none was measured by this project.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint.rule import FUSIONS, GUIDE, ISSUE, MODEL_OPTIMIZER, note, slow
from qdqspec.backends.tensorrt.ops import ABSORBED, POOLING, WEIGHTED
from qdqspec.backends.tensorrt.placement import attentions
from qdqspec.graph import Node
from qdqspec.graph.ops import NEVER, copies_values, data_inputs, is_float, is_nearest
from qdqspec.qdq.lint import LAYOUT, Hit, View, unequal_scales

# They always run in float; TRT044 reports them.
_FLOAT_ONLY = frozenset({"Gelu", "LayerNormalization", "Softmax"})
# Pooling runs in integers with an integer input alone; a product of activations counts as weighted.
_NEEDS_NO_RESULT = _FLOAT_ONLY | {*POOLING, *WEIGHTED, "GlobalMaxPool"}


@slow(
    "TRT030",
    "Only some inputs of a weighted operator are quantized",
    cure="quantize data and weight of it, or neither",
    source=GUIDE,
)
def half_quantized(view: View) -> Iterator[Hit]:
    """A DQ on one of the first two inputs and none on the other; blocked weights alone are intended."""
    for node in view.of(*WEIGHTED):
        made = view.inputs(node)
        blocked = any(dq is not None and view.numbers(dq).block for dq in made.values())
        if len(made) == 2 and None in made.values() and any(made.values()) and not blocked:
            missing = next(index for index, dq in made.items() if dq is None)
            yield node, f"reads '{node.inputs[missing]}' in float"


@slow(
    "TRT034",
    "The inputs of a Concat do not share one scale",
    cure="calibrate them together; qdqspec ties such ranges",
    source=f"{ISSUE} 3861: requantization kernels appear",
)
def concat_scales(view: View) -> Iterator[Hit]:
    """A Concat with several DQ of different scales or zero points, or with only some inputs dequantized."""
    for node in view.of("Concat"):
        made = [view.dequantizer(tensor) for tensor in node.inputs]
        known = [dq for dq in made if dq is not None]
        if known and len(known) < len(made):
            yield node, f"reads {len(known)} of {len(made)} inputs quantized"
        elif known and not all(view.numbers(known[0]).same_scale(view.numbers(dq)) for dq in known):
            yield node, f"reads {len(known)} inputs of different scales"


@slow(
    "TRT035",
    "The scales on both sides of an operator that moves values differ",
    cure="give both sides the same scale: the pairs pass through it then",
    source='"Working with Quantized Types": only equal scales commute',
)
def moved_scales(view: View) -> Iterator[Hit]:
    """MaxPool, Concat, nearest Resize or a copying operator between a DQ and a Q of different scales."""
    return unequal_scales(view, _moves)


def _moves(node: Node) -> bool:
    return copies_values(node) or is_nearest(node) or node.op_type in ("Concat", "MaxPool")


@slow(
    "TRT037",
    "An operator with quantized inputs gives float: its pairs are kernels of their own",
    cure="quantize its output too, or leave it in float",
    source=f"{GUIDE}: non-weighted layers with int8 input need int8 output",
)
def float_result(view: View) -> Iterator[Hit]:
    """An unweighted operator with dequantized activations only, one used by it alone, and no quantized result.

    A residual Add with only the skip side dequantized counts, if the other side comes from a quantized Conv.
    """
    for node in view.operators:
        if node.op_type in _NEEDS_NO_RESULT | NEVER or view.is_weighted(node) or _moves(node):
            continue
        data = [node.inputs[index] for index in data_inputs(node) if not view.is_constant(node.inputs[index])]
        own = any(view.dequantizer(tensor) and len(view.readers(tensor)) == 1 for tensor in data)
        last = view.fused(node, ABSORBED)[-1].outputs[0]
        quantized = all(view.dequantizer(tensor) or _is_fused_sum(view, node, tensor) for tensor in data)
        if own and quantized and is_float(view.model, last) and not view.quantizers(last):
            yield node, f"is a {node.op_type}, not quantized behind"


def _is_fused_sum(view: View, node: Node, tensor: str) -> bool:
    """Whether an Add reads this tensor directly from a quantized convolution, whose kernel computes the sum."""
    source = view.convolution_behind(tensor) if node.op_type == "Add" else None
    return source is not None and view.weight_dequantizer(source) is not None


@slow(
    "TRT038",
    "One tensor is quantized several times with different scales",
    cure="give it one pair, or equal scales",
    source='"Working with Quantized Types": only Q of equal scales are merged',
)
def several_scales(view: View) -> Iterator[Hit]:
    """Several Q of one tensor with different scales or zero points."""
    for tensor in dict.fromkeys(node.inputs[0] for node, _ in view.pairs if node.op_type == "QuantizeLinear"):
        quantizers = view.quantizers(tensor)
        first = view.numbers(quantizers[0])
        if not all(first.same_scale(view.numbers(other)) for other in quantizers[1:]):
            yield quantizers[0], f"and {len(quantizers) - 1} more quantize '{tensor}'"


@slow(
    "TRT039",
    "A pair right before the Transpose that leads to a MatMul",
    cure="move the pair behind the Transpose, next to the MatMul",
    source=f"{ISSUE} 1604: int8 always slower than float16 on such models",
)
def transpose_before_matmul(view: View) -> Iterator[Hit]:
    """A DQ, a Transpose and a MatMul in sequence, of an activation."""
    for node in view.of("Transpose"):
        dequantizer = view.dequantizer(node.inputs[0])
        if dequantizer is None or view.stored_weight(dequantizer) is not None:
            continue
        products = [reader.name for reader in view.readers(node.outputs[0]) if reader.op_type == "MatMul"]
        if products:
            yield node, f"leads to '{products[0]}'"


@slow(
    "TRT042",
    "Operators that are not quantized run in float32: TensorRT uses the model's types unchanged",
    cure="convert the model to float16 before it is quantized, and compare with a float16 model",
    source=f"NVIDIA, migration from 10.x to 11.x; {MODEL_OPTIMIZER} issues 80 and 167 (131 ms for 66)",
)
def float32_between(view: View) -> Iterator[Hit]:
    """A model with pairs whose DQ output float32. Reported once."""
    floats = sum(view.model.elem_type(n.outputs[0]) == TensorProto.FLOAT for n, _ in view.dequantizers)
    if floats:
        yield None, f"{floats} of {len(view.dequantizers)} dequantized tensors are float32"


@note(
    "TRT043",
    "An attention is quantized in part: it may not become one fused kernel",
    cure="quantize Q, K, V and the Softmax behind, or none of them",
    source="inferred from the patterns that Model-Optimizer and Myelin's logs show; not confirmed by a document",
)
def partial_attention(view: View) -> Iterator[Hit]:
    """A Softmax whose two MatMuls have some, but not all, of their four inputs quantized."""
    return attentions_in_part(view, with_result=False)


def attentions_in_part(view: View, *, with_result: bool) -> Iterator[Hit]:
    """Attentions with some of their four inputs quantized, or with all and, if it is wanted, not the result."""
    for attention in attentions(view.model):
        before, after = attention.scores, attention.mixed
        made = [view.dequantizer(tensor) for product in (before, after) for tensor in product.inputs]
        count, result = sum(dq is not None for dq in made), view.fused(after, LAYOUT)[-1].outputs[0]
        if 0 < count < len(made):
            problem = f"{count} of 4 inputs of '{before.name}' and '{after.name}' are quantized"
            yield attention.softmax, problem
        elif count and with_result and not view.quantizers(result):
            yield attention.softmax, f"the result of '{after.name}' is not quantized"


@note(
    "TRT044",
    "An operator that runs in float in any case reads a dequantized tensor",
    cure="nothing, if other nodes read the pair before it too; else remove the pair",
    source="recorded engines: LayerNormalization, Softmax and GELU run inside float kernels",
)
def float_only(view: View) -> Iterator[Hit]:
    """LayerNormalization, Softmax or Gelu after a DQ with no other consumer, not of a convolution (TRT036)."""
    for node in view.of(*_FLOAT_ONLY):
        dequantizer = view.dequantizer(node.inputs[0])
        if dequantizer is None or len(view.readers(dequantizer.outputs[0])) > 1:
            continue
        quantizer = view.model.producer.get(dequantizer.inputs[0])
        maker = view.maker(quantizer.inputs[0], LAYOUT) if quantizer is not None else None
        if maker is None or maker.op_type != "Conv":
            yield node, f"is a {node.op_type}"


@note(
    "TRT045",
    "Weights have one scale a tensor",
    cure="quantize weights per channel: it costs no time and has a smaller error",
    source=GUIDE,
)
def one_scale_a_weight(view: View) -> Iterator[Hit]:
    """A weight of several channels with a single scale, without blocks."""
    for node, dequantizer in view.quantized_weights():
        numbers, (_, made) = view.numbers(dequantizer), view.channels(node) or (0, 0)
        if made > 1 and numbers.scale is not None and numbers.scale.size == 1 and not numbers.block:
            yield node, f"has one scale for {made} channels"


@slow(
    "TRT047",
    "A pair directly follows another one of a different scale: a kernel that does nothing else",
    cure="leave one of the two out",
    source=f"{GUIDE}: conversions are done as the graph says",
)
def pairs_in_a_row(view: View) -> Iterator[Hit]:
    """A Q that reads a DQ with another scale or zero point; a second pair with equal ones is merged."""
    for node, numbers in view.pairs:
        before = view.dequantizer(node.inputs[0]) if node.op_type == "QuantizeLinear" else None
        if before is not None and not view.numbers(before).same_scale(numbers):
            yield node, f"quantizes the output of '{before.name}' again"


@slow(
    "TRT048",
    "A GlobalAveragePool behind quantized convolutions reads float",
    cure="put a pair on its input",
    source="recorded: 0.546 to 0.500 ms on ResNet-18, and one conversion less",
)
def float_pool(view: View) -> Iterator[Hit]:
    """A pool that reads a quantized Conv through residual Adds and fused operators, without a pair before it."""
    return _float_from_convolution(view, "GlobalAveragePool", ABSORBED | {"Add"})


_CONVOLUTIONS = ("Conv", "ConvTranspose")
# Operators that a convolution's kernel computes too, and x * sigmoid(x), which is two operators.
_ACTIVATIONS = frozenset(
    {"BatchNormalization", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Swish"}
)
_SAME_PRECISION = frozenset({"AveragePool", "Gelu", "MaxPool"})


@slow(
    "TRT031",
    "A pair between a convolution and its residual Add keeps the two from one kernel",
    cure="quantize the skip side of the Add only",
    source=f"{GUIDE}; {ISSUE}s 1992 and 3270; recorded 0.883 to 0.546 ms with the pair on the skip side",
)
def pair_on_the_weighted_side(view: View) -> Iterator[Hit]:
    """An Add with pairs on both sides; the Add is the only consumer of one of them, which follows a Conv directly."""
    for node in _residual_adds(view):
        if not all(view.dequantizer(tensor) for tensor in node.inputs):
            continue
        alone = [tensor for tensor in node.inputs if len(view.readers(tensor)) == 1]
        convs = [conv.name for tensor in alone if (conv := view.convolution_behind(tensor)) is not None]
        if convs:
            yield node, f"adds the result of '{convs[0]}' quantized"


@slow(
    "TRT032",
    "A residual Add of quantized convolutions gets its skip side in float",
    cure="put a pair on the skip side of the Add, so that the fused kernel can give integers",
    source=f"{GUIDE}; {ISSUE}s 1144 and 1992",
)
def float_skip(view: View) -> Iterator[Hit]:
    """An Add of two activations, one directly after a quantized Conv, none dequantized, with a quantized result."""
    for node in _residual_adds(view):
        if any(view.dequantizer(tensor) for tensor in node.inputs):
            continue
        is_fused = any(_is_fused_sum(view, node, tensor) for tensor in node.inputs)
        if is_fused and view.quantizers(view.fused(node, ABSORBED)[-1].outputs[0]):
            yield node, "adds two float tensors and is quantized behind"


@slow(
    "TRT054",
    "Only the convolution's side of a residual Add is quantized",
    cure="move the pair to the skip side: between convolution and Add it keeps the two from one kernel",
    source=f"{GUIDE}; {ISSUE}s 1992 and 3270",
)
def pair_on_the_weighted_side_only(view: View) -> Iterator[Hit]:
    """An Add of a Conv's result through a pair with no other consumer, and of a float activation without a pair."""
    for node in _residual_adds(view):
        for mine, other in (node.inputs, node.inputs[::-1]):
            conv = view.convolution_behind(mine) if view.dequantizer(mine) else None
            if conv is None or len(view.readers(mine)) > 1:
                continue
            if view.dequantizer(other) is None and view.convolution_behind(other) is None:
                yield node, f"adds the result of '{conv.name}' quantized and '{other}' in float"


def _residual_adds(view: View) -> Iterator[Node]:
    for node in view.of("Add"):
        if not any(view.is_constant(tensor) for tensor in node.inputs):
            yield node


@slow(
    "TRT033",
    "A pair between Pad and Conv keeps the two from one kernel",
    cure="move the pair before the Pad",
    source=f"{ISSUE} 2592 (28 to 21 ms)",
)
def pair_behind_pad(view: View) -> Iterator[Hit]:
    """A quantized Pad whose dequantized result is read by a convolution."""
    for node in view.of("Pad"):
        convs = [r.name for r in _behind_pair(view, node.outputs[0]) if r.op_type == "Conv"]
        if convs:
            yield node, f"is quantized before '{convs[0]}'"


@slow(
    "TRT036",
    "A quantized convolution leads to a LayerNormalization in float",
    cure="put a pair on the data input of the LayerNormalization, so that the convolution gives integers",
    source=f"{MODEL_OPTIMIZER} pull request 1117 (ConvNeXt)",
)
def conv_to_layernorm(view: View) -> Iterator[Hit]:
    """A quantized Conv and a LayerNormalization with only layout operators between them, along data inputs."""
    return _float_from_convolution(view, "LayerNormalization", LAYOUT)


def _float_from_convolution(view: View, op_type: str, through: Collection[str]) -> Iterator[Hit]:
    for node in view.of(op_type):
        maker = view.maker(node.inputs[0], through)
        if maker is not None and maker.op_type == "Conv" and view.weight_dequantizer(maker) is not None:
            yield node, f"reads float from '{maker.name}'"


@slow(
    "TRT046",
    "A pair between a convolution and the activation or normalization that its kernel computes",
    cure="move the pair behind them",
    source=f"{GUIDE}: Conv, BatchNormalization, Relu and Q are one kernel, and so are Conv, Sigmoid and Mul",
)
def pair_before_activation(view: View) -> Iterator[Hit]:
    """A convolution whose only consumer is a Q followed by activation functions; a pair inside x * sigmoid(x)."""

    def is_gate(node: Node) -> bool:
        """Whether a Mul multiplies a tensor by its own Sigmoid."""
        makers = [view.model.producer.get(tensor) for tensor in node.inputs if node.op_type == "Mul"]
        return any(m is not None and m.op_type == "Sigmoid" and m.inputs[0] in node.inputs for m in makers)

    for node in view.of(*_CONVOLUTIONS):
        last = view.fused(node, {"BatchNormalization"})[-1]
        behind = _behind_pair(view, last.outputs[0]) if view.only_quantized(last.outputs[0]) else []
        if behind and all(reader.op_type in _ACTIVATIONS or is_gate(reader) for reader in behind):
            yield node, f"is quantized before '{behind[0].name}'"
            continue
        for gate in view.readers(last.outputs[0]):
            inside = _behind_pair(view, gate.outputs[0]) if gate.op_type == "Sigmoid" else []
            if any(r.op_type == "Mul" and last.outputs[0] in r.inputs for r in inside):
                yield gate, f"is quantized before '{inside[0].name}'"


def _behind_pair(view: View, tensor: str) -> list[Node]:
    """The consumers of a tensor, through its pairs."""
    made = [dq for q in view.quantizers(tensor) for dq in view.readers(q.outputs[0])]
    return [reader for dq in made for reader in view.readers(dq.outputs[0])]


@slow(
    "TRT049",
    "A quantized convolution and the GELU or pooling behind it differ in precision: two kernels",
    cure="put a pair behind the GELU or pooling too, or leave the convolution in float",
    source=f"{FUSIONS}: Conv with GELU, and Conv with pooling, need the same precision in and out",
)
def precision_behind_convolution(view: View) -> Iterator[Hit]:
    """A Conv with a quantized weight whose only consumer is such an operator, with no Q before or after it."""
    for node, _ in view.quantized_weights(*_CONVOLUTIONS):
        last = view.fused(node, ABSORBED)[-1]
        readers = view.readers(last.outputs[0])
        if len(readers) == 1 and readers[0].op_type in _SAME_PRECISION:
            end = view.fused(readers[0], ABSORBED)[-1]
            if not view.quantizers(end.outputs[0]):
                yield node, f"leads to '{readers[0].name}', which gives float"


@note(
    "TRT050",
    "Of a depthwise convolution and the pointwise one behind it only one is quantized",
    cure="quantize both, so that they may become one kernel, or neither",
    source=f"{FUSIONS}: depthwise separable convolutions fuse where both are int8",
)
def half_separable(view: View) -> Iterator[Hit]:
    """A depthwise Conv, the operators that fuse with it, a pair or none, and a Conv with kernel 1 and no groups."""
    for node in view.of("Conv"):
        if not _is_depthwise(view, node):
            continue
        last = view.fused(node, ABSORBED)[-1]
        readers = [*view.readers(last.outputs[0]), *_behind_pair(view, last.outputs[0])]
        for reader in readers:
            dims = view.weight_dims(reader) if reader.op_type == "Conv" else ()
            if dims and set(dims[2:]) == {1} and reader.attributes.get("group", 1) == 1:
                quantized = [view.weight_dequantizer(conv) is not None for conv in (node, reader)]
                if any(quantized) and not all(quantized):
                    yield node, f"leads to '{reader.name}'"


def _is_depthwise(view: View, node: Node) -> bool:
    group, channels = node.attributes.get("group", 1), view.channels(node)
    return group != 1 and channels is not None and channels[0] == 1


@note(
    "TRT051",
    "A residual Add broadcasts: it stays a kernel of its own",
    cure="nothing, where the model needs it; else add tensors of one shape, or leave the Add in float",
    source=f"{FUSIONS}: no broadcasting in a fused sum, save over the batch",
)
def broadcasting_sum(view: View) -> Iterator[Hit]:
    """An Add of a quantized Conv's result and an activation of another shape after the batch; shapes must be known."""
    for node in _residual_adds(view):
        source = next((c for t in node.inputs if (c := view.convolution_behind(t)) is not None), None)
        shapes = [view.model.shape(tensor) for tensor in node.inputs]
        if source is None or view.weight_dequantizer(source) is None or None in shapes:
            continue
        one, other = (shape or () for shape in shapes)
        if None not in (*one[1:], *other[1:]) and one[1:] != other[1:]:
            yield node, f"adds {list(one)} and {list(other)}"


@note(
    "TRT052",
    "A quantized depthwise convolution does not fuse with the Sigmoid behind it",
    cure="measure it in float too: exclude it in patterns.nodes",
    source=f"{ISSUE} 3205: depthwise kernels take no general pointwise operators in",
)
def depthwise_gate(view: View) -> Iterator[Hit]:
    """A depthwise Conv with quantized weight, maybe normalized, whose result a Sigmoid, HardSwish or Swish reads."""
    for node, _ in view.quantized_weights("Conv"):
        if not _is_depthwise(view, node):
            continue
        last = view.fused(node, {"BatchNormalization"})[-1]
        gates = [r for r in view.readers(last.outputs[0]) if r.op_type in ("HardSwish", "Sigmoid", "Swish")]
        if gates:
            yield node, f"leads to '{gates[0].name}'"
