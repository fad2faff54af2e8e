"""Rules for pairs that prevent TensorRT from fusing several operators into one kernel.

Each rule names its source; recorded times are from public logs, none was measured by this project.
"""

from __future__ import annotations

from collections.abc import Iterator

from qdqspec.backends.tensorrt.lint.rule import FUSIONS, GUIDE, ISSUE, MODEL_OPTIMIZER, rule
from qdqspec.backends.tensorrt.ops import ABSORBED
from qdqspec.graph.model import Node
from qdqspec.lint.rules import Hit
from qdqspec.lint.view import LAYOUT, View

_CONVOLUTIONS = ("Conv", "ConvTranspose")
# Operators that a convolution's kernel computes too, and x * sigmoid(x), which is two operators.
_ACTIVATIONS = frozenset(
    {"BatchNormalization", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Swish"}
)
_SAME_PRECISION = frozenset({"AveragePool", "Gelu", "MaxPool"})


@rule(
    "TRT031",
    "slow",
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
            yield Hit(node.name, f"adds the result of '{convs[0]}' quantized")


@rule(
    "TRT032",
    "slow",
    "A residual Add of quantized convolutions gets its skip side in float",
    cure="put a pair on the skip side of the Add, so that the fused kernel can give integers",
    source=f"{GUIDE}; {ISSUE}s 1144 and 1992",
)
def float_skip(view: View) -> Iterator[Hit]:
    """An Add of two activations, one directly after a quantized Conv, none dequantized, with a quantized result."""
    for node in _residual_adds(view):
        if any(view.dequantizer(tensor) for tensor in node.inputs):
            continue
        quantized = [
            source is not None and view.weight_dequantizer(source) is not None
            for source in (view.convolution_behind(tensor) for tensor in node.inputs)
        ]
        last = view.fused(node, ABSORBED)[-1]
        if any(quantized) and view.quantizers(last.outputs[0]):
            yield Hit(node.name, "adds two float tensors and is quantized behind")


@rule(
    "TRT054",
    "slow",
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
                yield Hit(node.name, f"adds the result of '{conv.name}' quantized and '{other}' in float")


def _residual_adds(view: View) -> Iterator[Node]:
    for node in view.of("Add"):
        if not any(view.is_constant(tensor) for tensor in node.inputs):
            yield node


@rule(
    "TRT033",
    "slow",
    "A pair between Pad and Conv keeps the two from one kernel",
    cure="move the pair before the Pad",
    source=f"{ISSUE} 2592 (28 to 21 ms)",
)
def pair_behind_pad(view: View) -> Iterator[Hit]:
    """A quantized Pad whose dequantized result is read by a convolution."""
    for node in view.of("Pad"):
        behind = [dq for q in view.quantizers(node.outputs[0]) for dq in view.readers(q.outputs[0])]
        convs = [r.name for dq in behind for r in view.readers(dq.outputs[0]) if r.op_type == "Conv"]
        if convs:
            yield Hit(node.name, f"is quantized before '{convs[0]}'")


@rule(
    "TRT036",
    "slow",
    "A quantized convolution leads to a LayerNormalization in float",
    cure="put a pair on the data input of the LayerNormalization, so that the convolution gives integers",
    source=f"{MODEL_OPTIMIZER} pull request 1117 (ConvNeXt)",
)
def conv_to_layernorm(view: View) -> Iterator[Hit]:
    """A quantized Conv and a LayerNormalization with only layout operators between them, along data inputs."""
    for node in view.of("LayerNormalization"):
        maker = view.maker(node.inputs[0], LAYOUT)
        if maker is not None and maker.op_type == "Conv" and view.weight_dequantizer(maker) is not None:
            yield Hit(node.name, f"reads float from '{maker.name}'")


@rule(
    "TRT046",
    "slow",
    "A pair between a convolution and the activation or normalization that its kernel computes",
    cure="move the pair behind them",
    source=f"{GUIDE}: Conv, BatchNormalization, Relu and Q are one kernel, and so are Conv, Sigmoid and Mul",
)
def pair_before_activation(view: View) -> Iterator[Hit]:
    """A convolution whose only consumer is a Q followed by activation functions; a pair inside x * sigmoid(x)."""
    for node in view.of(*_CONVOLUTIONS):
        last = view.fused(node, {"BatchNormalization"})[-1]
        behind = _behind_pair(view, last.outputs[0]) if view.only_quantized(last.outputs[0]) else []
        if behind and all(reader.op_type in _ACTIVATIONS or _is_gate(view, reader) for reader in behind):
            yield Hit(node.name, f"is quantized before '{behind[0].name}'")
            continue
        for gate in view.readers(last.outputs[0]):
            inside = _behind_pair(view, gate.outputs[0]) if gate.op_type == "Sigmoid" else []
            if any(r.op_type == "Mul" and last.outputs[0] in r.inputs for r in inside):
                yield Hit(gate.name, f"is quantized before '{inside[0].name}'")


def _behind_pair(view: View, tensor: str) -> list[Node]:
    """The consumers of a tensor, through its pairs."""
    made = [dq for q in view.quantizers(tensor) for dq in view.readers(q.outputs[0])]
    return [reader for dq in made for reader in view.readers(dq.outputs[0])]


def _is_gate(view: View, node: Node) -> bool:
    """Whether a Mul multiplies a tensor by its own Sigmoid."""
    if node.op_type != "Mul":
        return False
    makers = [view.model.producer.get(tensor) for tensor in node.inputs]
    return any(m is not None and m.op_type == "Sigmoid" and m.inputs[0] in node.inputs for m in makers)


@rule(
    "TRT049",
    "slow",
    "A quantized convolution and the GELU or pooling behind it differ in precision: two kernels",
    cure="put a pair behind the GELU or pooling too, or leave the convolution in float",
    source=f"{FUSIONS}: Conv with GELU, and Conv with pooling, need the same precision in and out",
)
def precision_behind_convolution(view: View) -> Iterator[Hit]:
    """A Conv with a quantized weight whose only consumer is such an operator, with no Q before or after it."""
    for node in view.of(*_CONVOLUTIONS):
        if view.weight_dequantizer(node) is None:
            continue
        last = view.fused(node, ABSORBED)[-1]
        readers = view.readers(last.outputs[0])
        if len(readers) == 1 and readers[0].op_type in _SAME_PRECISION:
            end = view.fused(readers[0], ABSORBED)[-1]
            if not view.quantizers(end.outputs[0]):
                yield Hit(node.name, f"leads to '{readers[0].name}', which gives float")


@rule(
    "TRT050",
    "note",
    "Of a depthwise convolution and the pointwise one behind it only one is quantized",
    cure="quantize both, so that they may become one kernel, or neither",
    source=f"{FUSIONS}: depthwise separable convolutions fuse where both are int8",
)
def half_separable(view: View) -> Iterator[Hit]:
    """A depthwise Conv, the operators that fuse with it, a pair or none, and a Conv with kernel 1 and no groups."""
    for node in view.operators:
        last = view.fused(node, ABSORBED)[-1] if _is_depthwise(view, node) else None
        if last is None:
            continue
        readers = [*view.readers(last.outputs[0]), *_behind_pair(view, last.outputs[0])]
        for reader in readers:
            if reader.op_type == "Conv" and _is_pointwise(view, reader):
                quantized = [view.weight_dequantizer(conv) is not None for conv in (node, reader)]
                if any(quantized) and not all(quantized):
                    yield Hit(node.name, f"leads to '{reader.name}'")


def _is_depthwise(view: View, node: Node) -> bool:
    group, channels = node.attributes.get("group", 1), view.channels(node)
    return node.op_type == "Conv" and group != 1 and channels is not None and channels[0] == 1


def _is_pointwise(view: View, node: Node) -> bool:
    dims = view.weight_dims(node)
    return node.attributes.get("group", 1) == 1 and bool(dims) and set(dims[2:]) == {1}


@rule(
    "TRT051",
    "note",
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
            yield Hit(node.name, f"adds {list(one)} and {list(other)}")


@rule(
    "TRT052",
    "note",
    "A quantized depthwise convolution does not fuse with the Sigmoid behind it",
    cure="measure it in float too: exclude it in patterns.nodes",
    source=f"{ISSUE} 3205: depthwise kernels take no general pointwise operators in",
)
def depthwise_gate(view: View) -> Iterator[Hit]:
    """A depthwise Conv with quantized weight, maybe normalized, whose result a Sigmoid, HardSwish or Swish reads."""
    for node in view.operators:
        if not _is_depthwise(view, node) or view.weight_dequantizer(node) is None:
            continue
        last = view.fused(node, {"BatchNormalization"})[-1]
        gates = [r for r in view.readers(last.outputs[0]) if r.op_type in ("HardSwish", "Sigmoid", "Swish")]
        if gates:
            yield Hit(node.name, f"leads to '{gates[0].name}'")
