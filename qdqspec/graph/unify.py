"""Derives element types by unification where shape inference cannot.

Shape inference stops at an operator of an unknown domain. But the schema of a Conv states that its data,
weight and result are of one type, so the weight alone determines the other two: tensors of one type variable
of a node have one type, and the known type of one applies to all. (Type inference by unification: Robinson
1965.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import onnx
from onnx import defs

from qdqspec._core.groups import joined
from qdqspec.graph.protos import CONTRIBUTED, DEFAULT_DOMAINS

# Of each parameter: its type variable, whether it applies to all further ones, and the types it allows.
_Formal = tuple[tuple[str, bool, frozenset[str]], ...]
_NONE = "", False, frozenset[str]()


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
        for names, allowed in _list_groups(node, opset):
            if wanted not in allowed:
                refused.update(leaders[name] for name in names)
    return tuple(name for name, leader in leaders.items() if leader not in refused)


def _find_leaders(nodes: Sequence[onnx.NodeProto], opset: int) -> dict[str, str]:
    """For each tensor of ONNX's operators, the first tensor of the same type."""
    groups = [names for node in nodes for names, _ in _list_groups(node, opset)]
    tensors = dict.fromkeys(name for names in groups for name in names)
    return {name: group[0] for group in joined(tensors, groups) for name in group}


def _list_groups(node: onnx.NodeProto, opset: int) -> Iterator[tuple[list[str], frozenset[str]]]:
    """The tensors of one of ONNX's or `_CONTRIBUTED` operators that are of one type, and the types that it allows."""
    if node.domain == CONTRIBUTED:
        inputs, outputs = _CONTRIBUTED.get(node.op_type, (0, 0))
        yield [name for name in (*node.input[:inputs], *node.output[:outputs]) if name], _FLOATS
    formal = _read_schema(node.op_type, opset) if node.domain in DEFAULT_DOMAINS else ((), ())
    groups: dict[tuple[str, str], tuple[list[str], frozenset[str]]] = {}
    for names, parameters in zip((node.input, node.output), formal, strict=True):
        for index, name in enumerate(names):
            variable, is_last, allowed = parameters[min(index, len(parameters) - 1)] if parameters else _NONE
            if name and (index < len(parameters) or is_last):
                key = variable, "" if variable else name
                groups.setdefault(key, ([], allowed))[0].append(name)
    yield from groups.values()


@lru_cache(maxsize=512)
def _read_schema(op_type: str, opset: int) -> tuple[_Formal, _Formal]:
    """The inputs and outputs of an operator; none for one that onnx does not know."""
    try:
        schema = defs.get_schema(op_type, opset)
    except defs.SchemaError:
        return (), ()
    variables = {each.type_param_str: frozenset(each.allowed_type_strs) for each in schema.type_constraints}

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
