"""Derives element types by unification where shape inference cannot.

Shape inference stops at an operator of an unknown domain. But the schema of a Conv states that its data,
weight and result are of one type, so the weight alone determines the other two: tensors of one type variable
of a node have one type, and the known type of one applies to all. (Type inference by unification: Robinson
1965.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import onnx
from onnx import defs

from qdqspec.graph.protos import CONTRIBUTED, DEFAULT_DOMAINS

K = TypeVar("K", bound=Hashable)

# Of each parameter: its type variable, whether it applies to all further ones, and the types it allows.
_Formal = tuple[tuple[str, bool, frozenset[str]], ...]


# Operators that optimizers for transformers write: the numbers of first inputs and outputs, which are of one type.
# Source: the schemas of the runtime that defines them, in its document ContribOperators.md.
_CONTRIBUTED: Mapping[str, tuple[int, int]] = {
    "Attention": (3, 1),
    "BiasGelu": (2, 1),
    "FastGelu": (2, 1),
    "FusedMatMul": (2, 1),
    "Gelu": (1, 1),
    "QuickGelu": (1, 1),
    "SkipLayerNormalization": (5, 1),
    "SkipSimplifiedLayerNormalization": (4, 1),
}
_FLOATS = frozenset({"tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"})


def unified(nodes: Sequence[onnx.NodeProto], opset: int, known: Mapping[str, int]) -> dict[str, int]:
    """Element types of tensors not in ``known`` that must equal known ones. Contradictions are skipped."""
    leaders = _find_leaders(nodes, opset)
    types: dict[str, set[int]] = {}
    for name in known.keys() & leaders.keys():
        types.setdefault(leaders[name], set()).add(known[name])
    found: dict[str, int] = {}
    for name, leader in leaders.items():
        members = types.get(leader, set())
        if name not in known and len(members) == 1:
            (found[name],) = members
    return found


def assumed(
    nodes: Sequence[onnx.NodeProto], opset: int, known: Mapping[str, int], elem_type: int
) -> tuple[str, ...]:
    """The tensors of ONNX's operators with no type in ``known`` that may all be of ``elem_type``.

    Tensors of one type are omitted together if an operator that reads or makes one does not allow the type.
    """
    leaders = _find_leaders(nodes, opset)
    wanted = f"tensor({onnx.TensorProto.DataType.Name(elem_type).lower()})"
    refused = {leaders[name] for name in known.keys() & leaders.keys()}
    for node in nodes:
        for name, _, allowed in _list_tensors(node, opset):
            if wanted not in allowed:
                refused.add(leaders[name])
    return tuple(name for name, leader in leaders.items() if leader not in refused)


def _find_leaders(nodes: Sequence[onnx.NodeProto], opset: int) -> dict[str, str]:
    """For each tensor of ONNX's operators, the first tensor of the same type."""
    tensors: dict[str, None] = {}
    groups: list[list[str]] = []
    for node in nodes:
        alike: dict[str, list[str]] = {}
        for name, variable, _ in _list_tensors(node, opset):
            tensors[name] = None
            if variable:
                alike.setdefault(variable, []).append(name)
        groups += alike.values()
    found = {name: group[0] for group in joined(tensors, groups) for name in group}
    return {name: found[name] for name in tensors}


def joined(keys: Iterable[K], groups: Iterable[Iterable[K]]) -> tuple[tuple[K, ...], ...]:
    """The classes of keys that are in one group, directly or through other groups; both in the order of the keys."""
    parent = {key: key for key in keys}

    def root(key: K) -> K:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for group in groups:
        roots = [root(key) for key in group]
        parent.update((other, roots[0]) for other in roots)
    found: dict[K, list[K]] = {}
    for key in parent:
        found.setdefault(root(key), []).append(key)
    return tuple(map(tuple, found.values()))


def _list_tensors(node: onnx.NodeProto, opset: int) -> Iterator[tuple[str, str, frozenset[str]]]:
    """The tensors of one of ONNX's or `_CONTRIBUTED` operators, each with its type variable and the types allowed."""
    if node.domain == CONTRIBUTED:
        inputs, outputs = _CONTRIBUTED.get(node.op_type, (0, 0))
        yield from ((name, "T", _FLOATS) for name in (*node.input[:inputs], *node.output[:outputs]) if name)
    formal = _read_schema(node.op_type, opset) if node.domain in DEFAULT_DOMAINS else None
    if formal is None:
        return
    for names, parameters in ((node.input, formal[0]), (node.output, formal[1])):
        for index, name in enumerate(names):
            if not name or not parameters:
                continue
            variable, is_last, allowed = parameters[min(index, len(parameters) - 1)]
            if index < len(parameters) or is_last:
                yield name, variable, allowed


@lru_cache(maxsize=512)
def _read_schema(op_type: str, opset: int) -> tuple[_Formal, _Formal] | None:
    try:
        schema = defs.get_schema(op_type, opset)
    except defs.SchemaError:
        return None
    variables = {
        constraint.type_param_str: frozenset(constraint.allowed_type_strs)
        for constraint in schema.type_constraints
    }

    def read(parameters: Sequence[defs.OpSchema.FormalParameter]) -> _Formal:
        return tuple(
            (
                p.type_str if p.type_str in variables and p.is_homogeneous else "",
                p.option == defs.OpSchema.FormalParameterOption.Variadic,
                variables.get(p.type_str, frozenset({p.type_str})),
            )
            for p in parameters
        )

    return read(schema.inputs), read(schema.outputs)
