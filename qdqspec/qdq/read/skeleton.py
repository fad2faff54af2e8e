"""Compares two models without Q/DQ: their nodes, constants and interface.

Constants are compared where nodes read them: a tool may have renamed them, and one that was stored in integers is
restored only within half a step. Names of nodes are aligned first, where a model has none of its own and numbers its
nodes: the numbers depend on the nodes before, such as those that a tool added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from qdqspec.graph.fold import folded_like
from qdqspec.graph.model import Model, Node
from qdqspec.graph.ops import is_constant_node
from qdqspec.graph.protos import copied
from qdqspec.qdq.read.strip import StrippedModel
from qdqspec.types import Consumer

HalfSteps: TypeAlias = Callable[[Consumer], npt.NDArray[np.generic] | None]

_NUMBERED = re.compile(r"(?:^|/)[^/]*#\d+(?:/|$)")  # a node, or a call, without a name of its own
_SLACK = 1e-6  # of the largest value: float32 rounding between integers and floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SkeletonDiff:
    """Differences of the float models: node names, and sentences on nodes, constants and interface.

    ``folded`` names BatchNormalization that only one of them has folded into its convolutions; ``converted`` is true if
    only one of them was converted from float16 to float32. Both are no differences.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    interface: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    converted: bool = False

    @property
    def differs(self) -> bool:
        """Whether there is any difference."""
        return bool(self.added or self.removed or self.changed or self.constants or self.interface)


def compare_skeletons(a: Model, b: Model, steps_a: HalfSteps, steps_b: HalfSteps) -> SkeletonDiff:
    """Compare two models without Q/DQ; ``steps`` are tolerances of the constants that nodes read.

    Inner tensors are identified by their producers, not by name.
    """
    a, b, folded = _fold_alike(a, b)
    mine, its = _find_operators(a), _find_operators(b)
    both = [name for name in mine if name in its]
    differing = (words for name in both for words in _compare_constants(a, b, name, steps_a, steps_b))
    return SkeletonDiff(
        added=tuple(name for name in its if name not in mine),
        removed=tuple(name for name in mine if name not in its),
        changed=tuple(words for name in both if (words := _describe_change(a, b, mine[name], its[name]))),
        constants=tuple(dict.fromkeys(differing)),
        interface=tuple(_compare_interface(a, b)),
        folded=folded,
    )


def _fold_alike(a: Model, b: Model) -> tuple[Model, Model, tuple[str, ...]]:
    """The models, with BatchNormalization and computed weights folded in one if they are in the other."""
    for one, other in ((a, b), (b, a)):
        if (folded := folded_like(one, other)) is not None:
            models = (folded.model, other) if one is a else (other, folded.model)
            return *models, folded.missing
    return a, b, ()


def _find_operators(model: Model) -> dict[str, Node]:
    return {
        node.name: node
        for node in model.nodes
        if node.outputs[:1]
        and not node.is_marker
        and not (node.op_type == "Constant" and node.outputs[0] in model.constants)
    }


def _describe_change(a: Model, b: Model, one: Node, other: Node) -> str:
    """The difference of two nodes with one name; empty if there is none."""
    if (one.op_type, one.domain) != (other.op_type, other.domain):
        return f"'{one.name}': {one.op_type} > {other.op_type}"
    if _attributes(one) != _attributes(other):
        return f"'{one.name}': other attributes"
    if [_find_source(a, name) for name in one.inputs] != [_find_source(b, name) for name in other.inputs]:
        return f"'{one.name}': reads {_read(a, one)} > {_read(b, other)}"
    if [_result(a, name) for name in one.outputs] != [_result(b, name) for name in other.outputs]:
        return f"'{one.name}': makes {', '.join(one.outputs)} > {', '.join(other.outputs)}"
    return ""


def _find_source(model: Model, tensor: str) -> tuple[str, int]:
    """The source of a tensor: a node and the index of its output, else the name of an input."""
    if tensor in model.constants:
        return "(constant)", 0
    maker = model.producer.get(tensor)
    return (f"input {tensor}", 0) if maker is None else (maker.name, maker.outputs.index(tensor))


def _result(model: Model, tensor: str) -> str:
    """The part of an output's name that is compared: whether it is present, and the name of a graph output."""
    return tensor if tensor in model.outputs or not tensor else "(inner)"


def _read(model: Model, node: Node) -> str:
    return ", ".join("(constant)" if name in model.constants else name for name in node.inputs)


def _attributes(node: Node) -> dict[str, bytes]:
    return {a.name: a.SerializeToString(deterministic=True) for a in node.proto.attribute}


def _compare_constants(
    a: Model, b: Model, name: str, steps_a: HalfSteps, steps_b: HalfSteps
) -> Iterator[str]:
    reads = (model.by_name[name].inputs for model in (a, b))
    for left, right in zip(*reads, strict=False):
        if left in a.constants and right in b.constants:
            steps = [_find_coarsest(a, left, steps_a), _find_coarsest(b, right, steps_b)]
            words = _compare_values(a, left, b, right, [step for step in steps if step is not None])
            if words:
                yield f"'{left}': {words}"


def _find_coarsest(model: Model, tensor: str, half_steps: HalfSteps) -> npt.NDArray[np.generic] | None:
    """Half a step of the coarsest pair on a tensor.

    Its readers may have different pairs, and a restored float weight comes from one of them.
    """
    found = [step for end in model.consumers.get(tensor, ()) if (step := half_steps(end)) is not None]
    return reduce(np.maximum, found) if found else None


def _compare_values(a: Model, left: str, b: Model, right: str, steps: list[npt.NDArray[np.generic]]) -> str:
    one, other = a.constants[left], b.constants[right]
    if one.data_type != other.data_type or list(one.dims) != list(other.dims):
        kinds = (f"{onnx.TensorProto.DataType.Name(t.data_type)}{list(t.dims)}".lower() for t in (one, other))
        return " > ".join(kinds)
    x, y = a.array(left), b.array(right)
    # The bytes of strings are addresses.
    if np.array_equal(x, y) if x.dtype.hasobject else x.tobytes() == y.tobytes():
        return ""
    if x.dtype.kind != "f":
        return f"{int(np.count_nonzero(x != y))} of {x.size} values"
    return _compare_floats(x.astype(np.float64), y.astype(np.float64), steps)


def _compare_floats(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], steps: list[npt.NDArray[np.generic]]
) -> str:
    """The values that differ by more than rounding to integers; without integers each difference counts."""
    allowed = np.zeros(())
    if steps:
        allowed = _SLACK * np.max(np.abs(x), initial=0.0) + sum(s.astype(np.float64) for s in steps)
    with np.errstate(invalid="ignore"):
        apart = ~((np.abs(x - y) <= allowed) | (x == y) | (np.isnan(x) & np.isnan(y)))
    if not apart.any():
        return ""
    more = ", by more than rounding to integers" if steps else ""
    return f"{int(np.count_nonzero(apart))} of {x.size} values, by up to {np.nanmax(np.abs(x - y)):.3g}{more}"


def _compare_interface(a: Model, b: Model) -> Iterator[str]:
    if a.opset != b.opset:
        yield f"opset {a.opset} > {b.opset}"
    for kind, left, right in (
        ("input", a.proto.graph.input, b.proto.graph.input),
        ("output", a.proto.graph.output, b.proto.graph.output),
    ):
        mine = {i.name: i.type for i in left if i.name not in a.constants}
        its = {i.name: i.type for i in right if i.name not in b.constants}
        yield from (f"{kind} '{name}' removed" for name in mine if name not in its)
        yield from (f"{kind} '{name}' added" for name in its if name not in mine)
        yield from (f"{kind} '{n}': other type or shape" for n in mine if n in its and mine[n] != its[n])


# ---- names -------------------------------------------------------------------------------------


def aligned(first: StrippedModel, second: StrippedModel) -> tuple[StrippedModel, StrippedModel]:
    """Both models; nodes of the second have the names of the first where the same operator makes the same tensor.

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
    makers = {(node.op_type, node.outputs[0]): node.name for node in a.nodes if node.outputs}
    names: dict[str, str] = {}
    for node in b.nodes:
        name = makers.get((node.op_type, node.outputs[0])) if node.outputs else None
        if name is not None and (_NUMBERED.search(name) or _NUMBERED.search(node.name)):
            names[node.name] = name
    taken = {*names.values()}
    for node in b.nodes:
        name = names.get(node.name, node.name)
        while node.name not in names and name in taken:  # another node has this number in ``a``
            name += "'"
        names[node.name] = name
        taken.add(name)
    return names
