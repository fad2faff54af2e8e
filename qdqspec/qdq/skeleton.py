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

from qdqspec.graph import Model, Node, folded_like
from qdqspec.graph.ops import is_constant_node
from qdqspec.graph.protos import copied
from qdqspec.qdq.strip import StrippedModel
from qdqspec.types import Consumer

HalfSteps: TypeAlias = Callable[[Consumer], npt.NDArray[np.generic] | None]

_NUMBERED = re.compile(r"(?:^|/)[^/]*#\d+(?:/|$)")  # a node, or a call, without a name of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class SkeletonDiff:
    """Differences of the float models: node names, and sentences on nodes, constants and interface.

    ``folded`` names nodes that only one of them has folded into its convolutions or weights; ``converted`` is true if
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
    folded = tuple[str, ...]()  # in one model, if the other one has folded its nodes and computed its weights
    if (part := folded_like(a, b)) is not None:
        a, folded = part.model, part.missing
    elif (part := folded_like(b, a)) is not None:
        b, folded = part.model, part.missing
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


def _find_operators(model: Model) -> dict[str, Node]:
    return {
        node.name: node
        for node in model.nodes
        if node.outputs[:1]
        and not node.is_marker
        and not (node.op_type == "Constant" and node.outputs[0] in model.constants)
    }


def _describe_change(a: Model, b: Model, one: Node, other: Node) -> str:
    """The difference of two nodes with one name; empty if there is none.

    Of an output the name counts if it is one of the graph.
    """
    if (one.op_type, one.domain) != (other.op_type, other.domain):
        return f"'{one.name}': {one.op_type} > {other.op_type}"
    sides = (a, one), (b, other)
    fields = [
        {f.name: f.SerializeToString(deterministic=True) for f in node.proto.attribute} for _, node in sides
    ]
    if fields[0] != fields[1]:
        return f"'{one.name}': other attributes"
    sources = [[_find_source(model, name) for name in node.inputs] for model, node in sides]
    if sources[0] != sources[1]:
        reads = (
            ", ".join("(constant)" if name in model.constants else name for name in node.inputs)
            for model, node in sides
        )
        return f"'{one.name}': reads {' > '.join(reads)}"
    results = [
        [name if name in model.outputs or not name else "(inner)" for name in node.outputs]
        for model, node in sides
    ]
    if results[0] != results[1]:
        return f"'{one.name}': makes {', '.join(one.outputs)} > {', '.join(other.outputs)}"
    return ""


def _find_source(model: Model, tensor: str) -> tuple[str, int]:
    """The source of a tensor: a node and the index of its output, else the name of an input."""
    if tensor in model.constants:
        return "(constant)", 0
    maker = model.producer.get(tensor)
    return (f"input {tensor}", 0) if maker is None else (maker.name, maker.outputs.index(tensor))


def _compare_constants(
    a: Model, b: Model, name: str, steps_a: HalfSteps, steps_b: HalfSteps
) -> Iterator[str]:
    for left, right in zip(a.by_name[name].inputs, b.by_name[name].inputs, strict=False):
        if left in a.constants and right in b.constants:
            steps = [_find_coarsest(a, left, steps_a), _find_coarsest(b, right, steps_b)]
            words = compare_values(a, left, b, right, [step for step in steps if step is not None])
            if words:
                yield f"'{left}': {words}"


def _find_coarsest(model: Model, tensor: str, half_steps: HalfSteps) -> npt.NDArray[np.generic] | None:
    """Half a step of the coarsest pair on a tensor.

    Its readers may have different pairs, and a restored float weight comes from one of them.
    """
    found = [step for end in model.consumers.get(tensor, ()) if (step := half_steps(end)) is not None]
    return reduce(np.maximum, found) if found else None


def compare_values(a: Model, left: str, b: Model, right: str, steps: list[npt.NDArray[np.generic]]) -> str:
    """The values of two constants that differ; where ``steps`` are given, by more than rounding to integers."""
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
    x, y, allowed = x.astype(np.float64), y.astype(np.float64), np.zeros(())
    if steps:  # and float32 rounding between integers and floats
        allowed = 1e-6 * np.max(np.abs(x), initial=0.0) + sum(step.astype(np.float64) for step in steps)
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

    One of the two names must be a number. Nodes that the first model lacks have names that it has not. Folding keeps
    the names.
    """
    a, b = first.stripped, second.stripped
    if not any(_NUMBERED.search(node.name) for node in (*a.nodes, *b.nodes)):
        return first, second
    makers = {(node.op_type, node.outputs[0]): node.name for node in a.nodes if node.outputs}
    names: dict[str, str] = {}
    for node in b.nodes:
        known = makers.get((node.op_type, node.outputs[0])) if node.outputs else None
        if known is not None and (_NUMBERED.search(known) or _NUMBERED.search(node.name)):
            names[node.name] = known
    taken = {*names.values()}
    for node in b.nodes:
        name = names.get(node.name, node.name)
        while node.name not in names and name in taken:  # another node has this number in the first model
            name += "'"
        names[node.name] = name
        taken.add(name)
    return _rename_nodes(first, {node.name: node.name for node in a.nodes}), _rename_nodes(second, names)


def _rename_nodes(part: StrippedModel, names: Mapping[str, str]) -> StrippedModel:
    stripped = Model(part.stripped.flat, path=part.stripped.path)
    nodes = []
    for node in part.stripped.nodes:
        name, proto = names[node.name], node.proto
        if not is_constant_node(node) and proto.name != name:  # a copy of a constant would copy a weight
            proto = copied(proto)
            proto.name = name
        nodes.append(replace(node, name=name, proto=proto))
    stripped.nodes = tuple(nodes)
    return replace(part, stripped=stripped, names={node: names[name] for node, name in part.names.items()})
