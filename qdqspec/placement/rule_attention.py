"""Placement rules for attention: two products around a Softmax, computed in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_default
from qdqspec.placement.forms import Form
from qdqspec.placement.ops import weight_input
from qdqspec.placement.units import Unit

# Operators allowed between a product and the Softmax: scaling, masks, layout. In fp8 the order matters too: a
# Mul or Div, then an Add. Source: Model-Optimizer, graph_utils, `find_mha_partitions` and
# `match_fp8_mha_pattern`.
_LAYOUT = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Transpose"})
_SCALES, _MASKS = frozenset({"Div", "Mul"}), frozenset({"Add"})
_LONGEST_IN_INT8 = 512  # positions
_HEADS_IN_FP8 = range(9, 257)


@dataclass(frozen=True, slots=True)
class _Attention:
    """The product of queries and keys, the nodes up to the product with the values, and that product."""

    scores: Node
    between: tuple[Node, ...]
    mixed: Node
    plain: bool  # whether the nodes between match the fp8 kernel


def whole_attention(model: Model, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Both products of an attention are quantized together, with all four inputs, or not at all.

    The nodes between them stay float. In int8 up to 512 positions; in fp8 with 9 to 256 numbers per head, and
    only if at most a scale and then a mask precede the Softmax. Unknown sizes count as fitting.

    Source: github.com/NVIDIA/Model-Optimizer, graph_utils, `find_nodes_from_mha_to_exclude`,
    `match_fp8_mha_pattern`. That a part of the pattern is slower than none of it is inferred, not read.
    """
    by_id = {unit.id: unit for unit in units}
    for attention in _attentions(model):
        scores, mixed = (by_id.get(node.name) for node in (attention.scores, attention.mixed))
        inside = (node.name for node in attention.between)
        whole = None if scores is None or mixed is None else _joined(model, attention, scores, mixed)
        for name in (attention.scores.name, attention.mixed.name, *inside):
            by_id.pop(name, None)
        if whole is not None:
            by_id[whole.id] = whole
    return tuple(by_id[unit.id] for unit in units if unit.id in by_id)


def transpose_to_matmul(model: Model, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """A Transpose before a product of activations stays float: the pair is next to the product.

    Source: github.com/NVIDIA/TensorRT issue 1604: with Q and DQ right before the Transpose int8 was always
    slower than float16.
    """

    def leads(unit: Unit) -> bool:
        readers = (
            [model.by_name[end.node] for end in model.consumers.get(unit.outputs[0], ())]
            if unit.outputs
            else []
        )
        return unit.op_type == "Transpose" and any(_is_product(model, node) for node in readers)

    return tuple(unit for unit in units if not leads(unit))


def _joined(model: Model, attention: _Attention, scores: Unit, mixed: Unit) -> Unit | None:
    """One unit of both products; ``None`` if no format is left."""
    offered = {form.choice.format for form in scores.forms}
    forms = tuple(
        form for form in mixed.forms if form.choice.format in offered and _fits(model, attention, form)
    )
    if not forms:
        return None
    names = {*scores.nodes, *(node.name for node in attention.between), *mixed.nodes}
    nodes = tuple(sorted(names, key=lambda name: model.by_name[name].index))
    return replace(mixed, id=scores.id, nodes=nodes, edges=(*scores.edges, *mixed.edges), forms=forms)


def _fits(model: Model, attention: _Attention, form: Form) -> bool:
    shape = model.shape(attention.scores.inputs[1])
    head, positions = shape[-2:] if shape is not None and len(shape) > 1 else (None, None)
    if form.choice.format == "fp8":
        return attention.plain and (head is None or head in _HEADS_IN_FP8)
    return form.choice.format != "int8" or positions is None or positions <= _LONGEST_IN_INT8


# ---- finding ------------------------------------------------------------------------------------


def _attentions(model: Model) -> Iterator[_Attention]:
    """Each Softmax between two products of activations, once; a product belongs to one attention."""
    taken: set[str] = set()
    for node in model.nodes:
        if node.op_type != "Softmax" or not is_default(node):
            continue
        before, after = _before(model, node), _after(model, node)
        if before is None or after is None or {before[0].name, after[0].name} & taken:
            continue
        scores, way = before
        mixed, behind = after
        taken |= {scores.name, mixed.name}
        kinds = [n.op_type for n in reversed(way) if n.op_type not in _LAYOUT]
        scale = [kind for kind in kinds if kind in _SCALES]
        plain = kinds in ([], ["Add"], scale, [*scale, "Add"]) and len(scale) <= 1
        yield _Attention(scores, (*way, node, *behind), mixed, plain)


def _before(model: Model, softmax: Node) -> tuple[Node, list[Node]] | None:
    """The product whose result, scaled and masked, a Softmax reads, and the nodes between."""
    way: list[Node] = []
    node = model.producer.get(softmax.inputs[0])
    while node is not None and not _is_product(model, node):
        if not is_default(node) or node.op_type not in _LAYOUT | _SCALES | _MASKS:
            return None
        way.append(node)
        node = _source(model, node)
    return None if node is None else (node, way)


def _source(model: Model, node: Node) -> Node | None:
    """The producer of the data of a scale, mask or layout: of two operands the one after a product."""
    makers = [
        model.producer[name]
        for name in node.inputs[:2]
        if name in model.producer and name not in model.constants
    ]
    if node.op_type in _LAYOUT:
        makers = makers[:1]
    near = [
        maker for maker in makers if _is_product(model, maker) or maker.op_type in _LAYOUT | _SCALES | _MASKS
    ]
    return max(near, key=lambda maker: (_is_product(model, maker), maker.index), default=None)


def _after(model: Model, softmax: Node) -> tuple[Node, list[Node]] | None:
    """The product that reads the result of a Softmax, and the layout nodes between."""
    way: list[Node] = []
    node = softmax
    while True:
        ends = model.consumers.get(node.outputs[0], ())
        if len(ends) != 1 or node.outputs[0] in model.outputs:
            return None
        node = model.by_name[ends[0].node]
        if _is_product(model, node):
            return node, way
        if not is_default(node) or node.op_type not in _LAYOUT | {"Dropout"}:
            return None
        way.append(node)


def _is_product(model: Model, node: Node) -> bool:
    """Whether a node multiplies two activations."""
    return node.op_type == "MatMul" and is_default(node) and weight_input(model, node) is None
