"""Compares two models without Q/DQ: which nodes of both are the same, their constants, and the interface.

Constants are compared where nodes read them: a tool may have renamed them, and one that was stored in integers is
restored only within half a step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto

from qdqspec._core.arrays import Array
from qdqspec.graph import Folded, Model, Node, fold_weights, in_float32
from qdqspec.types import Consumer

_NUMBERED = re.compile(r"(?:^|/)[^/]*#\d+(?:/|$)")  # a node, or a call, without a name of its own


def find_same_nodes(model: Model, other: Model, *, named_first: bool = False) -> dict[str, str]:
    """The names in a model of the nodes that the ``other`` model has too, by their names there.

    The same node has the same operator and makes the same tensor, or has the same name of its own: nodes without one
    are numbered, which depends on the nodes before them, and tools rename nodes, some by numbers too. With
    ``named_first`` the name decides if a node has one in both.
    """
    makers = {key: node.name for node in model.nodes if (key := _find_product(node))}
    own = {n.name for n in other.nodes if n.name in model.by_name and not _NUMBERED.search(n.name)}
    names: dict[str, str] = {}
    for node in other.nodes:
        known = makers.get(_find_product(node) or ("", ""))
        if known is not None and not (named_first and node.name in own and not _NUMBERED.search(known)):
            names[node.name] = known
    return {name: name for name in own.difference(names, names.values())} | names


def _find_product(node: Node) -> tuple[str, str] | None:
    """The operator and the first tensor that it makes: the first output of an LSTM may have no name."""
    made = next(filter(None, node.outputs), "")
    return (node.op_type, made) if made else None


def align_names(model: Model, other: Model, *, named_first: bool = False) -> dict[str, str]:
    """The names of all nodes of the ``other`` model for a comparison: those of the same nodes, or the same numbers.

    Nodes that the model lacks have names that it has not.
    """
    names = find_same_nodes(model, other, named_first=named_first)
    taken = {*names.values()}
    for node in other.nodes:
        name = names.get(node.name, node.name)
        while node.name not in names and name in taken:  # another node has this number in the model
            name += "'"
        names[node.name] = name
        taken.add(name)
    return names


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


def converted_like(model: Model, other: Model) -> Model:
    """The model, in float32 if ``other`` was converted from float16."""
    return in_float32(model) if other.converted_from else model


def folded_like(model: Model, other: Model) -> Folded | None:
    """The model as `fold_weights` makes it, if that removes nodes and ``other`` has none of these; else ``None``.

    Those on integers of a weight do not count: without the pair after them, their result is a weight.
    """
    folded = fold_weights(model)
    mine, its = ({(n.op_type, n.outputs[0]): n for n in each.nodes if n.outputs} for each in (model, other))
    missing = [model.by_name[name] for name in folded.missing]
    same = [its[key] for node in missing if (key := (node.op_type, node.outputs[0])) in its]
    named = (other.by_name[node.name] for node in missing if node.name in other.by_name)
    # the name of one that makes the tensor of another node of the model may be a number
    same += [node for node in named if (node.op_type, node.outputs[0]) not in mine]
    narrow = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)
    is_kept = any(other.elem_type(node.outputs[0]) not in narrow for node in same)
    return folded if folded.missing and not is_kept else None


class Skeleton:
    """A model without Q/DQ that is compared with another one.

    ``names`` are those of its nodes in the other model; ``half_steps`` tolerances of the constants at inputs of nodes.
    Values of the constants ``others`` do not count.
    """

    def __init__(
        self,
        model: Model,
        names: Mapping[str, str] = MappingProxyType({}),
        half_steps: Mapping[Consumer, Array] = MappingProxyType({}),
        others: Collection[str] = (),
    ) -> None:
        self.model, self.names, self.half_steps, self._others = model, names, half_steps, others

    def folded_like(self, other: Skeleton) -> tuple[Skeleton, tuple[str, ...]]:
        """This model, folded if the other one was, and the names of the nodes that this removes."""
        part = folded_like(self.model, other.model)
        if part is None:
            return self, ()
        changed = copy(self)
        changed.model = part.model
        return changed, part.missing

    @cached_property
    def operators(self) -> dict[str, Node]:
        """The nodes by their names in the other model, without constants."""
        return {
            self.names.get(node.name, node.name): node
            for node in self.model.nodes
            if node.outputs[:1]
            and not node.is_marker
            and not (node.op_type == "Constant" and node.outputs[0] in self.model.constants)
        }

    def sources(self, node: Node) -> list[tuple[str, int]]:
        """The source of each input: a node and the index of its output, else the name of an input."""
        found = []
        for tensor in node.inputs:
            maker = self.model.producer.get(tensor)
            if tensor in self.model.constants:
                found.append(("(constant)", 0))
            elif maker is None:
                found.append((f"input {tensor}", 0))
            else:
                found.append((self.names.get(maker.name, maker.name), maker.outputs.index(tensor)))
        return found

    def reads(self, node: Node) -> str:
        """The inputs of a node, for readers."""
        return ", ".join("(constant)" if name in self.model.constants else name for name in node.inputs)

    def results(self, node: Node) -> list[str]:
        """The outputs of a node, of which the names count that are outputs of the graph."""
        return [name if name in self.model.outputs or not name else "(inner)" for name in node.outputs]

    def coarsest(self, tensor: str) -> list[Array]:
        """Half a step of the coarsest pair on a tensor, if it has one.

        Its readers may have different pairs, and a restored float weight comes from one of them.
        """
        if tensor in self._others:
            return [np.array(np.inf)]
        ends = self.model.consumers.get(tensor, ())
        found = [self.half_steps[end] for end in ends if end in self.half_steps]
        return [reduce(np.maximum, found)] if found else []


def compare_skeletons(a: Skeleton, b: Skeleton) -> SkeletonDiff:
    """Compare two models without Q/DQ. Inner tensors are identified by their producers, not by name."""
    # one may have folded its nodes and computed its weights
    (a, folded), (b, others) = a.folded_like(b), b.folded_like(a)
    both = [name for name in a.operators if name in b.operators]
    differing = (words for name in both for words in _compare_constants(a, b, name))
    return SkeletonDiff(
        added=tuple(name for name in b.operators if name not in a.operators),
        removed=tuple(name for name in a.operators if name not in b.operators),
        changed=tuple(f"'{name}': {words}" for name in both if (words := _describe_change(a, b, name))),
        constants=tuple(dict.fromkeys(differing)),
        interface=tuple(_compare_interface(a.model, b.model)),
        folded=folded or others,
    )


def _describe_change(a: Skeleton, b: Skeleton, name: str) -> str:
    """The difference of two nodes with one name; empty if there is none."""
    one, other = a.operators[name], b.operators[name]
    if (one.op_type, one.domain) != (other.op_type, other.domain):
        return f"{one.op_type} > {other.op_type}"
    if _read_attributes(a.model, one) != _read_attributes(b.model, other):
        return "other attributes"
    if a.sources(one) != b.sources(other):
        return f"reads {a.reads(one)} > {b.reads(other)}"
    if a.results(one) != b.results(other):
        return f"makes {', '.join(one.outputs)} > {', '.join(other.outputs)}"
    return ""


def _read_attributes(model: Model, node: Node) -> dict[str, bytes]:
    """The attributes of a node, without the bodies whose nodes are nodes of the model."""
    has_bodies = node.name in model.bodies
    kept = (
        each for each in node.proto.attribute if not (has_bodies and each.type == onnx.AttributeProto.STRING)
    )
    return {each.name: each.SerializeToString(deterministic=True) for each in kept}


def _compare_constants(a: Skeleton, b: Skeleton, name: str) -> Iterator[str]:
    for left, right in zip(a.operators[name].inputs, b.operators[name].inputs, strict=False):
        if left in a.model.constants and right in b.model.constants:
            steps = [*a.coarsest(left), *b.coarsest(right)]
            if words := compare_values(a.model, left, b.model, right, steps):
                yield f"'{left}': {words}"


def compare_values(a: Model, left: str, b: Model, right: str, steps: list[Array]) -> str:
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
