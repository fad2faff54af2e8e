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

_Formal = tuple[
    tuple[str, bool], ...
]  # type variable of each parameter, and whether it applies to all further ones


def unified(nodes: Sequence[onnx.NodeProto], opset: int, known: Mapping[str, int]) -> dict[str, int]:
    """Element types of tensors not in ``known`` that must equal known ones. Contradictions are skipped."""
    leader: dict[str, str] = {}

    def root(name: str) -> str:
        while leader.setdefault(name, name) != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    for node in nodes:
        for group in _alike(node, opset):
            for other in group[1:]:
                leader[root(other)] = root(group[0])
    types: dict[str, set[int]] = {}
    for name, elem_type in known.items():
        if name in leader:
            types.setdefault(root(name), set()).add(elem_type)
    found: dict[str, int] = {}
    for name in [name for name in leader if name not in known]:
        told = types.get(root(name), set())
        if len(told) == 1:
            (found[name],) = told
    return found


def _alike(node: onnx.NodeProto, opset: int) -> Iterator[list[str]]:
    """The tensors of a node by type variable; none for an operator that is not ONNX's own."""
    if node.domain not in ("", "ai.onnx"):
        return
    formal = _schema(node.op_type, opset)
    if formal is None:
        return
    groups: dict[str, list[str]] = {}
    for names, parameters in ((node.input, formal[0]), (node.output, formal[1])):
        for index, name in enumerate(names):
            variable = _variable(parameters, index)
            if name and variable:
                groups.setdefault(variable, []).append(name)
    yield from groups.values()


def _variable(parameters: _Formal, index: int) -> str:
    """The type variable of a parameter; empty if there is none, as for a list of tensors of different types."""
    if index < len(parameters):
        return parameters[index][0]
    return parameters[-1][0] if parameters and parameters[-1][1] else ""


@lru_cache(maxsize=512)
def _schema(op_type: str, opset: int) -> tuple[_Formal, _Formal] | None:
    try:
        schema = defs.get_schema(op_type, opset)
    except defs.SchemaError:
        return None
    variables = {constraint.type_param_str for constraint in schema.type_constraints}
    return _formal(schema.inputs, variables), _formal(schema.outputs, variables)


def _formal(parameters: Sequence[defs.OpSchema.FormalParameter], variables: set[str]) -> _Formal:
    variadic = defs.OpSchema.FormalParameterOption.Variadic
    return tuple(
        (p.type_str if p.type_str in variables and p.is_homogeneous else "", p.option == variadic)
        for p in parameters
    )
