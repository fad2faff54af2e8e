"""Aligns the names of two models' nodes, where a model has none of its own and numbers its nodes.

Numbers depend on the nodes before: on constants of an inlined function, for example, or on nodes that a tool added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_constant_node
from qdqspec.graph.protos import copied
from qdqspec.qdq.read.strip import StrippedModel

_NUMBERED = re.compile(r"(?:^|/)[^/]*#\d+(?:/|$)")  # a node, or a call, without a name of its own


def aligned(first: StrippedModel, second: StrippedModel) -> tuple[StrippedModel, StrippedModel]:
    """Both models; nodes of the second have the names of the first where they compute the same from the same tensors.

    One of the two names must be a number. Folding keeps the names.
    """
    a, b = first.stripped, second.stripped
    if not any(_NUMBERED.search(node.name) for node in (*a.nodes, *b.nodes)):
        return first, second
    return _rename_nodes(first, {node.name: node.name for node in a.nodes}), _rename_nodes(
        second, _match_names(a, b)
    )


def _rename_nodes(part: StrippedModel, names: Mapping[str, str]) -> StrippedModel:
    stripped = Model(part.stripped.flat, path=part.stripped.path)
    stripped.nodes = tuple(_rename_node(node, names[node.name]) for node in part.stripped.nodes)
    return replace(part, stripped=stripped, names={node: names[name] for node, name in part.names.items()})


def _rename_node(node: Node, name: str) -> Node:
    if is_constant_node(node) or node.proto.name == name:  # a copy of a constant would copy a weight
        return replace(node, name=name)
    proto = copied(node.proto)
    proto.name = name
    return replace(node, name=name, proto=proto)


def _match_names(a: Model, b: Model) -> dict[str, str]:
    """The name of each node of ``b`` in the terms of ``a``; nodes that ``a`` lacks have names that it has not."""
    alike: dict[object, list[Node]] = {}
    results: dict[tuple[str, str], Node] = {}
    for node in _find_unmatched(a, b):
        alike.setdefault(_describe_origin(a, node, {}), []).append(node)
        results[node.op_type, node.outputs[0]] = node
    open_nodes = {node.name for node in _find_unmatched(b, a)}
    names: dict[str, str] = {}
    taken: set[str] = set()

    def fits(one: Node, other: Node) -> bool:
        return one.name not in taken and bool(_NUMBERED.search(one.name) or _NUMBERED.search(other.name))

    for node in b.nodes:
        found = None
        if node.name in open_nodes:
            same = [each for each in alike.get(_describe_origin(b, node, names), ()) if fits(each, node)]
            found = min(same, key=lambda each: _measure_distance(each, node), default=None)
            by_result = results.get((node.op_type, node.outputs[0]))
            if found is None and by_result is not None and fits(by_result, node):
                found = by_result
        name = node.name if found is None else found.name
        while name in taken:  # another node has this number in ``a``
            name += "'"
        names[node.name] = name
        taken.add(name)
    return names


def _find_unmatched(model: Model, other: Model) -> Iterator[Node]:
    """The nodes with numbers for names, and those whose names the other model lacks."""
    for node in model.nodes:
        is_open = _NUMBERED.search(node.name) or node.name not in other.by_name
        if is_open and node.outputs and not is_constant_node(node):
            yield node


def _describe_origin(model: Model, node: Node, names: Mapping[str, str]) -> tuple[object, ...]:
    """The operator of a node and the sources of its inputs, nodes by these names."""
    sources: list[tuple[str, int]] = []
    for tensor in node.inputs:
        maker = model.producer.get(tensor)
        if tensor in model.constants or maker is None:
            sources.append(("" if tensor in model.constants else tensor, -1))
        else:
            sources.append((names.get(maker.name, maker.name), maker.outputs.index(tensor)))
    return node.op_type, node.domain, *sources


def _measure_distance(one: Node, other: Node) -> tuple[bool, bool, bool]:
    attributes = (sorted(a.SerializeToString() for a in node.proto.attribute) for node in (one, other))
    return next(attributes) != next(attributes), one.outputs != other.outputs, one.name != other.name
