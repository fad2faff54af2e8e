"""Rules for pairs that cost time in TensorRT because they do not fuse.

In TensorRT a Q or DQ that does not fuse is a kernel of its own. Pairs that prevent the fusion of two other
operators are in module `fusion`. Each rule names its source; recorded times are from public logs, none was
measured by this project.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from qdqspec.backends.tensorrt.lint.rule import GUIDE, ISSUE, MODEL_OPTIMIZER, rule
from qdqspec.backends.tensorrt.ops import ABSORBED, POOLING, WEIGHTED
from qdqspec.graph.model import Node
from qdqspec.graph.ops import NEVER, copies_values, data_inputs, is_float, is_nearest
from qdqspec.lint.rules import Hit
from qdqspec.lint.view import LAYOUT, View

# They always run in float; TRT044 reports them.
_FLOAT_ONLY = frozenset({"Gelu", "LayerNormalization", "Softmax"})
# Pooling runs in integers with an integer input alone; a product of activations counts as weighted.
_NEEDS_NO_RESULT = _FLOAT_ONLY | {*POOLING, *WEIGHTED, "GlobalMaxPool"}


@rule(
    "TRT030",
    "slow",
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
            yield Hit(node.name, f"reads '{node.inputs[missing]}' in float")


@rule(
    "TRT034",
    "slow",
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
    """MaxPool, Concat, nearest Resize or a copying operator between a DQ and a Q of different scales."""
    for node in view.operators:
        before = view.dequantizer(node.inputs[0]) if node.inputs and _moves(node) else None
        if before is None:
            continue
        after = [q for output in node.outputs for q in view.quantizers(output)]
        other = next((q for q in after if not view.numbers(before).same_scale(view.numbers(q))), None)
        if other is not None:
            yield Hit(node.name, f"stands between '{before.name}' and '{other.name}'")


def _moves(node: Node) -> bool:
    return copies_values(node) or is_nearest(node) or node.op_type in ("Concat", "MaxPool")


@rule(
    "TRT037",
    "slow",
    "An operator with quantized inputs gives float: its pairs are kernels of their own",
    cure="quantize its output too, or leave it in float",
    source=f"{GUIDE}: non-weighted layers with int8 input need int8 output",
)
def float_result(view: View) -> Iterator[Hit]:
    """An unweighted operator with dequantized activations only, one used by it alone, and no quantized result.

    A residual Add with only the skip side dequantized counts, if the other side comes from a quantized Conv.
    """
    for node in view.operators:
        if (
            view.is_weighted(node)
            or node.op_type in _NEEDS_NO_RESULT
            or _moves(node)
            or node.op_type in NEVER
        ):
            continue
        data = [node.inputs[index] for index in data_inputs(node) if not view.is_constant(node.inputs[index])]
        own = any(view.dequantizer(tensor) and len(view.readers(tensor)) == 1 for tensor in data)
        last = view.fused(node, ABSORBED)[-1].outputs[0]
        quantized = all(view.dequantizer(tensor) or _is_fused_sum(view, node, tensor) for tensor in data)
        if own and quantized and is_float(view.model, last) and not view.quantizers(last):
            yield Hit(node.name, f"is a {node.op_type}, not quantized behind")


def _is_fused_sum(view: View, node: Node, tensor: str) -> bool:
    """Whether an Add reads this tensor directly from a quantized convolution, whose kernel computes the sum."""
    source = view.convolution_behind(tensor) if node.op_type == "Add" else None
    return source is not None and view.weight_dequantizer(source) is not None


@rule(
    "TRT038",
    "slow",
    "One tensor is quantized several times with different scales",
    cure="give it one pair, or equal scales",
    source='"Working with Quantized Types": only Q of equal scales are merged',
)
def several_scales(view: View) -> Iterator[Hit]:
    """Several Q of one tensor with different scales or zero points."""
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
            yield Hit(node.name, f"leads to '{products[0]}'")


@rule(
    "TRT042",
    "slow",
    "What is not quantized runs in float32: TensorRT takes the model's types as they are",
    cure="convert the model to float16 before it is quantized, and compare with a float16 model",
    source=f"NVIDIA, migration from 10.x to 11.x; {MODEL_OPTIMIZER} issues 80 and 167 (131 ms for 66)",
)
def float32_between(view: View) -> Iterator[Hit]:
    """A model with pairs whose DQ output float32. Reported once."""
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
    """A Softmax whose two MatMuls have some, but not all, of their four inputs quantized."""
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
    """LayerNormalization, Softmax or Gelu after a DQ with no other consumer, not of a convolution (TRT036)."""
    for node in view.operators:
        dequantizer = view.dequantizer(node.inputs[0]) if node.op_type in _FLOAT_ONLY else None
        if dequantizer is None or len(view.readers(dequantizer.outputs[0])) > 1:
            continue
        quantizer = view.model.producer.get(dequantizer.inputs[0])
        maker = view.maker(quantizer.inputs[0], LAYOUT) if quantizer is not None else None
        if maker is None or maker.op_type != "Conv":
            yield Hit(node.name, f"is a {node.op_type}")


@rule(
    "TRT045",
    "note",
    "Weights have one scale a tensor",
    cure="quantize weights per channel: it costs no time and loses less",
    source=GUIDE,
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


@rule(
    "TRT047",
    "slow",
    "A pair stands right behind another one of a different scale: a kernel that does nothing else",
    cure="leave one of the two out",
    source=f"{GUIDE}: conversions are done as the graph says",
)
def pairs_in_a_row(view: View) -> Iterator[Hit]:
    """A Q that reads a DQ with another scale or zero point; a second pair with equal ones is merged."""
    for node in view.pairs:
        before = view.dequantizer(node.inputs[0]) if node.op_type == "QuantizeLinear" else None
        if before is not None and not view.numbers(before).same_scale(view.numbers(node)):
            yield Hit(node.name, f"quantizes anew what '{before.name}' makes")


@rule(
    "TRT048",
    "slow",
    "A GlobalAveragePool behind quantized convolutions reads float",
    cure="put a pair on its input",
    source="recorded: 0.546 to 0.500 ms on ResNet-18, and one conversion less",
)
def float_pool(view: View) -> Iterator[Hit]:
    """A pool that reads a quantized Conv through residual Adds and fused operators, without a pair before it."""
    for node in view.operators:
        if node.op_type == "GlobalAveragePool":
            maker = view.maker(node.inputs[0], ABSORBED | {"Add"})
            if maker is not None and maker.op_type == "Conv" and view.weight_dequantizer(maker) is not None:
                yield Hit(node.name, f"reads float from '{maker.name}'")
