"""Placement rules of TensorRT: constraints on pairs beyond single operators, one function per rule.

A rule takes the units of a model and returns them with pairs moved or removed; `qdqspec.backends.tensorrt.ops` lists
the rules in their order. All inputs of a weighted operator are quantized together by construction of units, and tensors
that are copied, pooled or joined share their scales by `qdqspec.qdq.ranges.tie_ranges`. Weight-only formats in
blocks are for products of few rows and are not affected; nor are NVFP4 and MXFP8, which the sources do not mention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from qdqspec.backends.tensorrt import ops
from qdqspec.graph import Model, Node
from qdqspec.graph.ops import QDQ_OPS, WEIGHT_INPUT, is_default, weight_input
from qdqspec.qdq import Edge, Form, Unit, Units
from qdqspec.types import Consumer

INT8, FP8 = "int8", "fp8"


def few_channel_conv(model: Model, units: Units) -> Units:
    """A convolution of fewer than 16 channels stays float, except int8 ones with a multiple of 8 on one side.

    An fp8 one stays float up to 16 channels.

    Source: github.com/NVIDIA/Model-Optimizer, graph_utils, `find_nodes_from_convs_to_exclude`: kernels are
    missing or slower.
    """

    def excluded(unit: Unit, fmt: str) -> bool:
        node, dims = model.by_name[unit.id], _weight_shape(model, unit)
        return len(dims) > 2 and ops.too_few_channels(
            dims, group=node.number("group", 1), fp8=fmt == FP8, first=node.inputs[0] in model.inputs
        )

    return _without_formats(units, excluded)


def large_fp8_kernel(model: Model, units: Units, largest: int = ops.LARGEST_FP8_KERNEL) -> Units:
    """A convolution whose kernel has 32 elements or more, as 7x7 has, is not computed in fp8.

    Source: github.com/NVIDIA/Model-Optimizer, graph_utils, `find_nodes_from_convs_to_exclude`: fp8 kernels of that size
    are missing or slower.
    """
    return _without_formats(
        units, lambda unit, fmt: fmt == FP8 and prod(_weight_shape(model, unit)[2:]) > largest
    )


def small_gemm(model: Model, units: Units) -> Units:
    """A product with one row or column, or whose second operand has fewer than 16, stays float.

    Unknown sizes count as large.

    Source: github.com/NVIDIA/Model-Optimizer, graph_utils, `find_nodes_from_matmul_to_exclude`: a product by
    a vector does not use tensor cores, and theirs need 16 rows and columns.
    """

    def excluded(unit: Unit, fmt: str) -> bool:  # noqa: ARG001 - alike in both formats
        node = model.by_name[unit.id]
        return unit.op_type in ("Gemm", "MatMul") and (
            ops.is_one_line(model.shape(node.outputs[0]))
            or ops.too_small_to_multiply(model.shape(node.inputs[1]))
        )

    return _without_formats(units, excluded)


def _without_formats(units: Units, excluded: Callable[[Unit, str], bool]) -> Units:
    """The units without those int8 and fp8 forms that a rule excludes."""

    def kept(unit: Unit) -> Unit:
        formats = {form.choice.format for form in unit.forms} & {INT8, FP8}
        removed = {fmt for fmt in formats if excluded(unit, fmt)}
        forms = tuple([form for form in unit.forms if form.choice.format not in removed])
        return replace(unit, forms=forms) if removed else unit

    return tuple(kept(unit) for unit in units)


def _weight_shape(model: Model, unit: Unit) -> tuple[int, ...]:
    """The shape of a convolution's constant weight; empty for other operators and weights."""
    node = model.by_name[unit.id]
    index = weight_input(model, node) if unit.op_type == "Conv" else None
    return () if index is None else tuple(model.constants[node.inputs[index]].dims)


# Operators allowed between a product and the Softmax: scaling, masks, layout. In fp8 the order matters too: a
# Mul or Div, then an Add. Source: Model-Optimizer, graph_utils, `find_mha_partitions` and
# `match_fp8_mha_pattern`.
_LAYOUT = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Transpose"}) | QDQ_OPS
_SCALES, _MASKS = frozenset({"Div", "Mul"}), frozenset({"Add"})
_LONGEST_IN_INT8 = 512  # positions
_HEADS_IN_FP8 = range(9, 257)


@dataclass(frozen=True, slots=True)
class Attention:
    """The product of queries and keys, the nodes up to the product with the values, and that product."""

    softmax: Node
    scores: Node
    between: tuple[Node, ...]
    mixed: Node
    plain: bool  # whether the nodes between match the fp8 kernel


def whole_attention(model: Model, units: Units) -> Units:
    """Both products of an attention are quantized together, with all four inputs, or not at all.

    The nodes between them stay float. In int8 up to 512 positions; in fp8 with 9 to 256 numbers per head, and
    only if at most a scale and then a mask precede the Softmax. Unknown sizes count as fitting.

    Source: github.com/NVIDIA/Model-Optimizer, graph_utils, `find_nodes_from_mha_to_exclude`,
    `match_fp8_mha_pattern`. That a part of the pattern is slower than none of it is inferred, not read.
    """
    by_id = {unit.id: unit for unit in units}
    for attention in attentions(model):
        scores, mixed = (by_id.get(node.name) for node in (attention.scores, attention.mixed))
        whole = None if scores is None or mixed is None else _joined(model, attention, scores, mixed)
        for node in (attention.scores, attention.mixed, *attention.between):
            by_id.pop(node.name, None)
        if whole is not None:
            by_id[whole.id] = whole
    return tuple(by_id[unit.id] for unit in units if unit.id in by_id)


def transpose_to_matmul(model: Model, units: Units) -> Units:
    """A Transpose before a product of activations stays float: the pair is next to the product.

    Source: github.com/NVIDIA/TensorRT issue 1604: with Q and DQ right before the Transpose int8 was always
    slower than float16.
    """

    def leads(unit: Unit) -> bool:
        if unit.op_type != "Transpose" or not unit.outputs:
            return False
        readers = [model.by_name[end.node] for end in model.consumers.get(unit.outputs[0], ())]
        return any(_is_product(model, node) for node in readers)

    return tuple(unit for unit in units if not leads(unit))


def _joined(model: Model, attention: Attention, scores: Unit, mixed: Unit) -> Unit | None:
    """One unit of both products; ``None`` if no format is left."""
    shape = model.shape(attention.scores.inputs[1])
    head, positions = shape[-2:] if shape is not None and len(shape) > 1 else (None, None)

    def fits(form: Form) -> bool:
        if form.choice.format == FP8:
            return attention.plain and (head is None or head in _HEADS_IN_FP8)
        return form.choice.format != INT8 or positions is None or positions <= _LONGEST_IN_INT8

    offered = {form.choice.format for form in scores.forms}
    forms = tuple(form for form in mixed.forms if form.choice.format in offered and fits(form))
    if not forms:
        return None
    names = {*scores.nodes, *(node.name for node in attention.between), *mixed.nodes}
    nodes = tuple(sorted(names, key=lambda name: model.by_name[name].index))
    return replace(mixed, id=scores.id, nodes=nodes, edges=(*scores.edges, *mixed.edges), forms=forms)


# ---- finding ------------------------------------------------------------------------------------


def attentions(model: Model) -> Iterator[Attention]:
    """Each Softmax between two products of activations, with pairs or without. A product belongs to one of them."""
    taken: set[str] = set()
    for node in model.nodes:
        if node.op_type != "Softmax" or not is_default(node):
            continue
        before, after = _before(model, node), _after(model, node)
        if before is None or after is None or {before[0].name, after[0].name} & taken:
            continue
        scores, path = before
        mixed, behind = after
        taken |= {scores.name, mixed.name}
        kinds = [n.op_type for n in reversed(path) if n.op_type not in _LAYOUT]
        scale = [kind for kind in kinds if kind in _SCALES]
        plain = kinds in ([], ["Add"], scale, [*scale, "Add"]) and len(scale) <= 1
        yield Attention(node, scores, (*path, node, *behind), mixed, plain)


def _before(model: Model, softmax: Node) -> tuple[Node, list[Node]] | None:
    """The product whose result, scaled and masked, a Softmax reads, and the nodes between."""
    path: list[Node] = []
    node = model.producer.get(softmax.inputs[0])
    while node is not None and not _is_product(model, node):
        if not is_default(node) or node.op_type not in _LAYOUT | _SCALES | _MASKS:
            return None
        path.append(node)
        # of two operands of a scale or mask the one after a product
        names = [name for name in node.inputs[:2] if name in model.producer and name not in model.constants]
        makers = [model.producer[name] for name in (names[:1] if node.op_type in _LAYOUT else names)]
        near = [m for m in makers if _is_product(model, m) or m.op_type in _LAYOUT | _SCALES | _MASKS]
        node = max(near, key=lambda maker: (_is_product(model, maker), maker.index), default=None)
    return None if node is None else (node, path)


def _after(model: Model, softmax: Node) -> tuple[Node, list[Node]] | None:
    """The product that reads the result of a Softmax, and the layout nodes between."""
    path: list[Node] = []
    node = softmax
    while True:
        ends = model.consumers.get(node.outputs[0], ())
        if len(ends) != 1 or node.outputs[0] in model.outputs:
            return None
        node = model.by_name[ends[0].node]
        if _is_product(model, node):
            return node, path
        if not is_default(node) or node.op_type not in _LAYOUT | {"Dropout"}:
            return None
        path.append(node)


def _is_product(model: Model, node: Node) -> bool:
    """Whether a node multiplies two activations."""
    return node.op_type == "MatMul" and is_default(node) and weight_input(model, node) is None


# Operators allowed between a convolution and its LayerNormalization: channels are moved last and back.
_FP8_OPERATORS = frozenset({"Conv", "Gemm", "MatMul"})
_BETWEEN = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def skip_side_of_residual_add(model: Model, units: Units) -> Units:
    """Quantize only the skip side of an Add that joins a weighted branch and a skip connection.

    These compilers compute Conv + Add (+ Relu) in one kernel, which a pair between Conv and Add prevents, and read
    the second operand in integers if the skip has a pair. If both sides are weighted, the deeper one fuses.

    Source: NVIDIA, "Working with Quantized Types", Q/DQ layer-placement recommendations ("quantize the
    residual input in skip connections"); github.com/NVIDIA/TensorRT issues 1992 and 3270.
    """
    makers = _weighted_makers(units)
    main = {unit.id: _weighted_side(model, makers, unit) for unit in units if unit.op_type == "Add"}
    fused = {edge[0] for edge in main.values() if edge is not None}

    def beside(unit: Unit) -> Unit:
        if (own := main.get(unit.id)) is not None:
            return replace(unit, edges=tuple(edge for edge in unit.edges if edge != own))
        kept = tuple(tensor for tensor in unit.outputs if tensor not in fused)
        return unit if kept == unit.outputs else unit.with_results(kept, unit.out_edges)

    return tuple(beside(unit) for unit in units)


def conv_to_layernorm(model: Model, units: Units) -> Units:
    """A convolution before a LayerNormalization gets the pair of its result at the data input of the latter.

    Only the copies Transpose, Reshape, Squeeze, Unsqueeze and Identity may be between, and they are followed
    along their data input; the path may begin at each tensor that the convolution's unit makes. Without the
    pair the compiler chooses convolutions that write float16, with it those that write int8.

    Source: github.com/NVIDIA/Model-Optimizer pull request 1117 (ConvNeXt).
    """
    convs = {node: unit.id for unit in units if unit.op_type == "Conv" for node in unit.nodes}
    gained: dict[str, list[Edge]] = {}
    passed: set[str] = set()  # tensors whose only path leads to the LayerNormalization
    for norm in model.nodes:
        if norm.op_type == "LayerNormalization" and is_default(norm):
            path = [norm.inputs[0]]  # its data, and the tensors before copies
            maker = model.producer.get(path[0])
            while maker is not None and maker.op_type in _BETWEEN and is_default(maker):
                path.append(maker.inputs[0])
                maker = model.producer.get(maker.inputs[0])
            if maker is not None and maker.name in convs:
                edge = norm.inputs[0], Consumer(norm.name, 0)
                gained.setdefault(convs[maker.name], []).append(edge)
                # If each tensor on the path has one reader, no other node needs the first one quantized.
                passed |= {path[-1]} if all(_is_private(model, tensor) for tensor in path) else set()
    return tuple(_with_edges(unit, gained.get(unit.id, ()), passed) for unit in units)


def q_before_pad(model: Model, units: Units) -> Units:
    """The pair of an input that a Pad makes is inserted before the Pad.

    Zero is exact in each format used, so padding with it (or with values of the tensor) commutes with the
    pair; between Pad and Conv it would prevent their fusion. A Pad with another constant is not changed.

    Source: github.com/NVIDIA/TensorRT issue 2592 (28 to 21 ms with the pair moved).
    """
    found = (node for node in model.nodes if node.op_type == "Pad" and _pads_alike(model, node))
    pads = {node.outputs[0]: node for node in found}

    def moved(edge: Edge) -> Edge:
        pad = pads.get(edge[0])
        return edge if pad is None else moved((pad.inputs[0], Consumer(pad.name, 0)))

    def beside(unit: Unit) -> Unit:
        edges = tuple([moved(edge) for edge in unit.edges]) if _is_weighted(unit) else unit.edges
        return unit if edges == unit.edges else replace(unit, edges=edges)

    return tuple(beside(unit) for unit in units) if pads else units


def fp8_operators(model: Model, units: Units) -> Units:
    """In fp8 only Conv, Gemm, MatMul and residual Adds are computed.

    An Add is residual if one side comes directly from a weighted operator.

    Source: github.com/NVIDIA/Model-Optimizer, onnx/quantization/fp8.py: "The quantizable op types for FP8 are
    limited to Conv, Gemm, Matmul, and Residual-Add".
    """
    makers = _weighted_makers(units)

    def excluded(unit: Unit, fmt: str) -> bool:
        if unit.op_type == "Add":
            return fmt == FP8 and _weighted_side(model, makers, unit) is None
        return fmt == FP8 and unit.op_type not in _FP8_OPERATORS

    return _without_formats(units, excluded)


# ---- residual Add -------------------------------------------------------------------------------


def _weighted_makers(units: Units) -> frozenset[str]:
    """The nodes that are weighted units by themselves."""
    return frozenset(unit.id for unit in units if _is_weighted(unit) and len(unit.nodes) == 1)


def _weighted_side(model: Model, makers: frozenset[str], add: Unit) -> Edge | None:
    """The operand that comes directly from one of these and has no other reader; of two, the deeper."""
    sides = []
    for edge in add.edges if len(add.edges) > 1 else ():
        node = model.producer.get(edge[0])
        if node is not None and node.name in makers and _is_private(model, edge[0]):
            sides.append((_depth(model, edge[0]), node.index, edge))
    return max(sides, key=lambda side: side[:2])[2] if sides else None


def _depth(model: Model, tensor: str) -> int:
    """Number of weighted operators above a tensor on the longest path, within the depth of a block."""
    depth, front = 0, {tensor}
    for _ in range(16):  # blocks are shorter; beyond, both branches share their path
        makers = [model.producer[name] for name in front if name in model.producer]
        depth += any(node.op_type in WEIGHT_INPUT for node in makers)
        front = {name for node in makers for name in node.inputs if name and name not in model.constants}
        if not front:
            break
    return depth


def _with_edges(unit: Unit, gained: Iterable[Edge], passed: set[str]) -> Unit:
    """The unit with further result edges, for which each form but weight-only ones offers ``in+out``."""
    edges = tuple(gained)
    if not edges:
        return unit

    def giving(form: Form) -> Form:
        gives = "in+out" in form.kinds or form.choice.activation is None
        return form if gives else replace(form, kinds=("in+out", *form.kinds))

    full = replace(unit, forms=tuple(map(giving, unit.forms)))
    outputs = tuple(tensor for tensor in unit.outputs if tensor not in passed)
    return full.with_results(outputs, (*unit.out_edges, *edges))


# ---- shared -------------------------------------------------------------------------------------


def _is_weighted(unit: Unit) -> bool:
    return unit.op_type in WEIGHT_INPUT and any(form.constants for form in unit.forms)


def _is_private(model: Model, tensor: str) -> bool:
    """Whether a tensor has exactly one reader."""
    outside = tensor in model.outputs or tensor in model.captured
    return not outside and len(model.consumers.get(tensor, ())) == 1


def _pads_alike(model: Model, pad: Node) -> bool:
    """Whether a Pad adds zeros or values of its input."""
    if pad.attributes.get("mode", b"constant") != b"constant":
        return True
    if pad.number("value", 0.0) != 0.0:  # an attribute before opset 11
        return False
    value = pad.inputs[2] if len(pad.inputs) > 2 else ""
    return not value or (value in model.constants and not model.array(value).any())
